"""The training loop: sample, estimate advantages, policy phase, auxiliary phase, log and save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anybatch.advantages import gae
from anybatch.auxiliary_phase import AuxiliaryPhase
from anybatch.callbacks.callback import Callback
from anybatch.callbacks.calls import Callbacks, list_of_callbacks
from anybatch.callbacks.configured import callbacks_of
from anybatch.callbacks.context import RunContext
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import check_integer, validate
from anybatch.distributed.collectives import (
    any_worker,
    broadcast_buffers_,
    check_equal,
    envs_per_worker,
    is_distributed,
    is_main,
    joined_process_group,
    local_num_envs,
    mean_over_workers,
    moments_of,
    on_main,
    rank,
    wait_for_all,
    world_size,
)
from anybatch.distributed.random_state import callers_random_state
from anybatch.distributed.state import State, Stateful
from anybatch.envs.base import close_env
from anybatch.errors import DivergenceError, UserCodeError
from anybatch.minibatches import Batch
from anybatch.normalize import AdvantageNormalizer
from anybatch.policy_phase import policy_phase
from anybatch.runs.build import Components, build
from anybatch.runs.checkpoint import check_newest, must_fit
from anybatch.runs.files import CHECKPOINTS, SEGMENTS
from anybatch.runs.folder import create_run, open_run, read_config, write_config
from anybatch.runs.initial import start_from
from anybatch.runs.owned import checked_folder, owned
from anybatch.runs.resharding import restore
from anybatch.runs.run import Run
from anybatch.sampling.rollout import Rollout, Sampled
from anybatch.sampling.sources import RolloutSource, staleness
from anybatch.scaling.changes import Change
from anybatch.system.memory import keep_freed_memory
from anybatch.system.signals import Interrupted
from anybatch.system.timer import PhaseTimer

_COMPARE_EVERY = 10
"""Iterations between two checks that all workers hold the same weights."""


class LoopRun(Protocol):
    """Counters and log of a run as the loop uses them: a :class:`~anybatch.runs.run.Run`, or stacked runs."""

    config: TrainConfig
    iteration: int

    @property
    def finished(self) -> bool: ...

    @property
    def progress(self) -> float: ...

    @property
    def iteration_is_open(self) -> bool: ...

    @property
    def checkpoint_due(self) -> bool: ...

    def record(self, statistics: Mapping[str, Any], sampled: Sampled) -> None: ...

    def end_iteration(self, parts: Mapping[str, Stateful], timings: Mapping[str, float]) -> None: ...

    def show_status(self, text: str) -> None: ...

    def save(self, parts: Mapping[str, Stateful]) -> None: ...


def training_loop(run: LoopRun, components: Components) -> None:
    """Train until the environment steps of the configuration are done, or a stop is requested.

    Raises:
        Interrupted: a stop was requested and the iteration could not be finished in time.
    """
    config, learner = run.config, components.learner
    reward_normalizer, auxiliary = components.reward_normalizer, components.auxiliary
    timer = PhaseTimer(("sampling", "policy_phase", "auxiliary_phase") if auxiliary else ("sampling", "policy_phase"))
    local_fraction = local_num_envs(config.env.num_envs) / config.env.num_envs
    if run.iteration_is_open:  # it was interrupted inside its auxiliary phase
        _finish_iteration(run, components, timer)
    while not run.finished and not any_worker(learner.interrupts.requested):
        timer.restart()
        learner.optimizers.set_progress(run.progress)
        rollout = _sample(components.source, run.iteration)
        timer.end("sampling")
        if rollout.observation_moments is not None:
            learner.update_observation_normalizer(rollout.observation_moments)
        reward = reward_normalizer(rollout.reward, rollout.first) if reward_normalizer else rollout.reward
        batch, statistics = estimate_advantages(rollout, reward, config, components.advantage_normalizer)
        present = learner.at(run.progress, run.iteration - rollout.version)
        optimization = staleness(rollout, run.iteration, config) | policy_phase(batch, present, run.show_status)
        statistics |= mean_over_workers(optimization, local_fraction)
        statistics |= learner.optimizers.follow(statistics)
        if auxiliary:
            auxiliary.after_iteration(batch)
            statistics |= auxiliary.statistics()
        timer.end("policy_phase")
        del rollout, batch  # frees their memory for the auxiliary phase and the next rollout
        run.record(statistics, components.source.drain())
        _finish_iteration(run, components, timer)


def _finish_iteration(run: LoopRun, components: Components, timer: PhaseTimer) -> None:
    """The auxiliary phase, if this iteration completes a policy phase of PPG; then log and save."""
    if components.auxiliary and components.auxiliary.due:
        _auxiliary_phase(run, components, components.auxiliary)
        timer.end("auxiliary_phase")
    learner = components.learner
    broadcast_buffers_(*(x for x in (learner.agent, learner.proximal.module) if x is not None))
    if is_distributed() and (run.iteration - 1) % _COMPARE_EVERY == 0:
        check_equal(components.replicated_tensors(), f"after iteration {run.iteration}")
    run.end_iteration(components.stateful, timer.columns())


def _sample(source: RolloutSource, iteration: int) -> Rollout:
    """The next rollout; a worker that has to abandon it makes the others abandon theirs."""
    rollout = None
    with contextlib.suppress(Interrupted):
        rollout = source.next(iteration)
    if any_worker(rollout is None):
        raise Interrupted
    assert rollout is not None
    return rollout


def estimate_advantages(
    rollout: Rollout, reward: Tensor, config: TrainConfig, normalizer: AdvantageNormalizer | None
) -> tuple[Batch, dict[str, Any]]:
    """GAE and its normalisation ("Compute advantage estimates", appendix A).

    Args:
        rollout: (N, T) data; (R, N, T) for R stacked runs.
        reward: (N, T) normalised rewards.
        config: supplies gamma and lambda.
        normalizer: mean and variance over iterations, updated with this one; None leaves advantages as they are.

    Returns:
        The batch, and columns for the log: floats, or lists of R floats. ``advantage_std`` is that of this iteration
        before normalisation.

    Raises:
        DivergenceError: an advantage is not finite, in every run.
    """
    advantage, target = gae(
        reward,
        rollout.value,
        rollout.next_value,
        rollout.done,
        rollout.terminated,
        discount=config.advantage.discount,
        gae_lambda=config.advantage.gae_lambda,
    )
    residual = target.double() - rollout.value.double()
    (mean, var, count), (_, target_var, _), (_, residual_var, _) = moments_of(
        advantage, target, residual, run_axis=advantage.dim() > 2
    )
    if not bool(torch.isfinite(var).any()):
        raise DivergenceError("advantages are not finite: a reward or value has overflowed; lower optimizer.step_size")
    explained = torch.where(target_var > 0, (1 - residual_var / target_var).float(), torch.nan)
    statistics = {"advantage_mean": mean, "advantage_std": var.sqrt(), "explained_variance": explained}
    if normalizer is not None:
        normalizer.update(mean, var, count)
        statistics["advantage_std_used"] = torch.as_tensor(normalizer.moments()[1], dtype=torch.float64).sqrt()
        advantage = normalizer(advantage)
    batch = Batch.of(rollout, advantage=advantage, value_target=target, first=rollout.first, state=rollout.state)
    return batch, {name: column.tolist() for name, column in statistics.items()}


def _auxiliary_phase(run: LoopRun, components: Components, auxiliary: AuxiliaryPhase) -> None:
    """Run the auxiliary phase; it can last hours, so it saves checkpoints and can be stopped inside."""
    run.show_status("auxiliary phase: outputs of the old policy")
    for _ in auxiliary.gradient_steps(run.progress):
        run.show_status(f"auxiliary phase: gradient step {auxiliary.steps_done:,} of {auxiliary.steps:,}")
        if any_worker(components.learner.interrupts.requested):
            run.save(components.stateful)
            raise Interrupted
        if any_worker(is_main() and run.checkpoint_due):
            run.save(components.stateful)


@dataclass(frozen=True)
class TrainResult:
    """Outcome of a run."""

    run_dir: Path
    """The run folder."""
    env_steps: int
    """Environment steps done, over all environments."""
    mean_episode_return: float
    """Mean raw return of the last 100 episodes; NaN if none has ended."""
    interrupted: bool
    """A stop was requested before the end; ``anybatch resume`` continues the run."""
    stopped: str | None = None
    """Reason for which a callback ended the run before the end; None if none did."""


@joined_process_group()
@callers_random_state()
def train(
    config: TrainConfig,
    out: str | Path,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    *,
    quiet: bool = False,
    changes: Sequence[Change] = (),
    init_from: str | Path | None = None,
) -> TrainResult:
    """Train from scratch; under ``torchrun``, as one of several data-parallel workers.

    Args:
        config: the configuration; see :mod:`anybatch.presets`.
        out: the run folder, which must not hold a run yet.
        seed: determines every random choice of the run.
        callbacks: hooks, called in this order; see :class:`anybatch.callbacks.Callback`.
        quiet: show no progress.
        changes: how ``config`` was scaled from another batch size; written to the run folder.
        init_from: a run folder whose weights, statistics, optimiser and proximal policy are the start, also at another
            batch; ``config`` stays as it is (:func:`anybatch.scaling.rescale` of that run's configuration fits). A
            message says what is taken over, see :mod:`anybatch.runs.initial`. config.yaml records the folder.

    Raises:
        CheckpointError: ``init_from`` is no run folder, or has other spaces or networks.
        ConfigError: a setting makes no sense.
        EnvError: the environment cannot be made, or it or a callback failed.
        WorkerError: another data-parallel worker has died or hangs.
        DivergenceError: training is no longer finite; the last checkpoint stays.
    """
    validate(config)
    seed = check_integer("seed", seed, at_least=0)
    callbacks = callbacks_of(config, callbacks)
    folder = checked_folder("out", out)
    source = None if init_from is None else checked_folder("init_from", init_from)
    components = build(config, seed, segments=folder / SEGMENTS)
    with _closing(components), owned(folder):
        sentences = [] if source is None else start_from(source, components)
        run = create_run(folder, config, seed, quiet=quiet, changes=changes, init_from=source)
        try:
            for sentence in sentences:
                run.message(sentence)
            hooks = _hooks(run, components, callbacks, resumed=False)
            _announce_length(run)
            _prepare_auxiliary_phase(run, components)
            return _run(run, components, hooks)
        finally:
            run.close()


@joined_process_group()
@callers_random_state()
def resume(
    run_dir: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    env: str | Callable[..., Any] | None = None,
    total_env_steps: int | None = None,
    trust_code: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Continue a run from its newest intact checkpoint.

    Where the environments' state can be saved (environments whose attributes are plain data, as most are, and those
    with ``get_state`` and ``set_state``) the result is bitwise that of a run that never stopped. Elsewhere the
    environments start new episodes, with new seeds, and a message is printed.

    Args:
        run_dir: the run folder.
        callbacks: those of the run have to be passed again, except for those that the configuration asks for.
        env: the environment's id or callable, made with the run's options, instead of the one in its config.yaml; a
            callable without an import path has to be passed again, in every process.
        total_env_steps: train up to this many environment steps instead; written to the run's config.yaml. Schedules
            adapt: their values are those of a run of this length at the same point. A run that a callback has ended
            continues only if this is given.
        trust_code: import the code that the run's config.yaml names (environment, encoder) even if this user has not
            made the run on this machine.
        quiet: show no progress.

    Raises:
        CheckpointError: there is none, or it does not fit the configuration.
        ConfigError: ``total_env_steps`` is not above the steps done.
        EnvError, DivergenceError, WorkerError: as for :func:`train`.
    """
    callbacks = list_of_callbacks(callbacks)
    folder = checked_folder("run_dir", run_dir)
    on_main(lambda: read_config(folder))  # so that no folder is made where there is no run
    with owned(folder):
        run, content = open_run(folder, env=env, total_env_steps=total_env_steps, trust_code=trust_code, quiet=quiet)
        changed = env is not None or total_env_steps is not None
        try:
            return _resume(run, content, callbacks, changed=changed)
        finally:
            run.close()  # also where it has not begun


def _resume(run: Run, content: State, callbacks: Sequence[Callback], *, changed: bool) -> TrainResult:
    validate(run.config)
    callbacks = callbacks_of(run.config, callbacks)
    # environments that start new episodes must not replay the levels of the run's beginning
    components = build(run.config, run.seed, env_stream=run.iteration, segments=run.folder / SEGMENTS)
    with _closing(components):
        hooks = _hooks(run, components, callbacks, resumed=True)
        with must_fit(run.folder):
            lost = restore(components.stateful, content, rank(), envs_per_worker(run.config.env.num_envs, world_size()))
            lost += hooks.load_state_dict(content["run"].get("callbacks", {}))
        _prepare_auxiliary_phase(run, components)  # files of another size are changed only now
        for sentence in lost if run.iteration and not run.finished else ():  # else nothing can be lost
            run.message(sentence)
        run.open_logs()  # only now, when the checkpoint is known to fit
        if changed:
            write_config(run)
        return _run(run, components, hooks)


@contextlib.contextmanager
def _closing(components: Components) -> Iterator[None]:
    """Catch signals, and leave nothing running however the block ends."""
    with components.learner.interrupts:
        try:
            yield
        except SystemExit as error:  # it would look like a run that is done
            raise UserCodeError(f"the run's own code called sys.exit({error})") from error
        finally:
            if components.source.close() and not components.learner.interrupts.call_interrupted:
                with contextlib.suppress(Interrupted), components.learner.interrupts.interruptible():
                    close_env(components.env)
            if components.auxiliary:
                components.auxiliary.store.close()


def _hooks(run: Run, components: Components, callbacks: Sequence[Callback], *, resumed: bool) -> Callbacks:
    context = RunContext(run, components, resumed=resumed)
    return Callbacks(callbacks, run, context)


def _run(run: Run, components: Components, hooks: Callbacks) -> TrainResult:
    config, interrupted = run.config, False
    if config.keep_freed_memory and components.learner.device.type == "cpu":
        keep_freed_memory()
    if config.compile:
        run.inform("the first iteration takes up to a minute longer (compile)")
    wait_for_all()
    run.hooks = hooks
    run.start_clock()
    try:
        with hooks.running():
            if run.iteration == 0:  # so that a run stopped in its first iteration can be resumed
                run.save(components.stateful)
                on_main(lambda: check_newest(run.folder / CHECKPOINTS))
            training_loop(run, components)
            if components.auxiliary and run.finished:
                components.auxiliary.store.discard()
            run.save(components.stateful)
    except Interrupted:
        interrupted = True
    interrupted = interrupted or not run.finished
    return TrainResult(run.folder, run.env_steps, run.mean_episode_return, interrupted, run.stopped)


def _announce_length(run: Run) -> None:
    """Tell the user if the run is longer than total_env_steps, which iterations are not cut for."""
    config, source = run.config, run.config.rollout.source
    least = config.iteration_batch * (1 + (source.delay if source.kind == "delayed" else 0))
    if least > config.total_env_steps:
        run.message(
            f"total_env_steps is {config.total_env_steps:,}, but the first iteration ends after {least:,}: the run has "
            "one iteration; for a shorter one, set fewer env.num_envs, rollout.steps or rollout.source.delay"
        )


def _prepare_auxiliary_phase(run: Run, components: Components) -> None:
    """Reserve the memory or disk space for the auxiliary phase's data, and tell the user."""
    if components.auxiliary is None or run.finished:
        return
    components.auxiliary.store.open()
    run.message(f"the auxiliary phase stores {components.auxiliary.store.describe()}")
    phase = run.config.aux.policy_iterations * run.config.iteration_batch
    if phase > run.config.total_env_steps:
        run.message(
            f"no auxiliary phase will run: the first would start after {phase:,} environment steps, and "
            f"total_env_steps is {run.config.total_env_steps:,}"
        )
