"""The training loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anybatch.advantages import gae
from anybatch.auxiliary_phase import AuxiliaryPhase
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.distributed.collectives import (
    any_worker,
    check_equal,
    envs_per_worker,
    is_distributed,
    is_main,
    joined_process_group,
    local_num_envs,
    mean_over_workers,
    moments_of,
    rank,
    wait_for_all,
    world_size,
)
from anybatch.errors import AnybatchError, CheckpointError, ConfigError, DivergenceError
from anybatch.minibatches import Batch
from anybatch.normalize import AdvantageNormalizer
from anybatch.policy_phase import policy_phase
from anybatch.runs.build import Parts, build
from anybatch.runs.files import SEGMENTS
from anybatch.runs.resharding import state_of_worker
from anybatch.runs.run import Run, create_run, open_run
from anybatch.sampling.rollout import Rollout
from anybatch.sampling.sources import RolloutSource, staleness
from anybatch.scaling.changes import Change
from anybatch.system.memory import keep_freed_memory
from anybatch.system.signals import Interrupted

_COMPARE_EVERY = 10
"""Iterations between two comparisons of what all workers should have the same bits of."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    run_dir: Path
    """The run folder."""
    env_steps: int
    """Environment steps done, over all environments."""
    mean_episode_return: float
    """Mean raw return of the last 100 episodes; NaN if none has ended."""
    interrupted: bool
    """A stop was asked for; ``anybatch resume`` goes on."""


@joined_process_group()
def train(
    config: TrainConfig, out: str | Path, seed: int = 0, *, quiet: bool = False, changes: Sequence[Change] = ()
) -> TrainResult:
    """Train from scratch; started by ``torchrun``, together with the other workers.

    Args:
        config: what to train; see :mod:`anybatch.presets`.
        out: the run folder, which must not hold a run yet.
        seed: every random choice of the run follows from it.
        quiet: show no progress.
        changes: how ``config`` was scaled from another batch size; kept in the run folder, nothing else.

    Raises:
        ConfigError: a setting makes no sense.
        EnvError: the environment cannot be made, or broke while it ran.
        WorkerError: another data-parallel worker has died or hangs.
        DivergenceError: training is no longer finite; the last checkpoint stays.
    """
    validate(config)
    if seed < 0:
        raise ConfigError(f"seed is {seed}, but must be at least 0")
    parts = build(config, seed, segments=Path(out) / SEGMENTS)
    with _closing(parts):
        run = create_run(Path(out), config, seed, quiet=quiet, changes=changes)
        _prepare_auxiliary_phase(run, parts)
        run.save(parts.state_dict())  # so that a run stopped in its first iteration can go on
        return _run(run, parts)


@joined_process_group()
def resume(run_dir: str | Path, *, total_env_steps: int | None = None, quiet: bool = False) -> TrainResult:
    """Go on with a run from its newest intact checkpoint.

    Where the environments' state can be saved (Gymnasium's classic control and toy text, and environments with
    ``get_state`` and ``set_state``) the result is bitwise that of a run that never stopped. Elsewhere the environments
    start new episodes, with new seeds, and a line says so.

    Args:
        run_dir: the run folder.
        total_env_steps: train up to this many environment steps instead; written to the run's config.yaml.
        quiet: show no progress.

    Raises:
        CheckpointError: there is none, or it does not belong here.
        ConfigError: ``total_env_steps`` is not above what is done.
        EnvError, DivergenceError, WorkerError: as for :func:`train`.
    """
    run, content = open_run(Path(run_dir), total_env_steps=total_env_steps, quiet=quiet)
    validate(run.config)
    # environments that start anew must not replay the levels that the run began with
    parts = build(run.config, run.seed, env_stream=run.iteration, segments=run.folder / SEGMENTS)
    with _closing(parts):
        _prepare_auxiliary_phase(run, parts)
        try:
            given = envs_per_worker(run.config.env.num_envs, world_size())
            state, anew = state_of_worker(content, parts.state_dict(), rank(), given)
            lost = anew + parts.load_state_dict(state)
        except AnybatchError:  # says what it is about
            raise
        except (RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoints of {str(run_dir)!r} do not fit its config.yaml: was it edited?"
            ) from error
        for sentence in lost if run.iteration else ():  # a run that has only begun loses nothing
            run.message(sentence)
        return _run(run, parts)


@contextlib.contextmanager
def _closing(parts: Parts) -> Iterator[None]:
    """Catch signals, and leave nothing running at the end, whatever ends it."""
    with parts.learner.interrupts:
        try:
            yield
        finally:
            if parts.source.close() and not parts.learner.interrupts.call_interrupted:
                parts.env.close()
            if parts.auxiliary:
                parts.auxiliary.store.close()


def _run(run: Run, parts: Parts) -> TrainResult:
    interrupted = False
    try:
        _loop(run, parts)
        if parts.auxiliary and run.finished:
            parts.auxiliary.store.discard()
        run.save(parts.state_dict())
    except Interrupted:
        interrupted = True
    finally:
        run.close()
    interrupted = interrupted or not run.finished
    return TrainResult(run.folder, run.env_steps, run.mean_episode_return, interrupted)


def _loop(run: Run, parts: Parts) -> None:
    learner, config = parts.learner, run.config
    if config.keep_freed_memory and learner.device.type == "cpu" and keep_freed_memory():
        run.remark("freed memory is kept for the next gradient step (keep_freed_memory)")
    if config.compile:
        run.remark("the first iteration takes up to a minute longer (compile)")
    share = local_num_envs(config.env.num_envs) / config.env.num_envs
    wait_for_all()
    while not run.finished and not any_worker(learner.interrupts.requested):
        if parts.auxiliary and parts.auxiliary.due:
            _auxiliary_phase(run, parts, parts.auxiliary)
        learner.optimizers.set_progress(run.progress)
        rollout = _sample(parts.source, run.iteration)
        reward = parts.reward_normalizer(rollout.reward, rollout.first) if parts.reward_normalizer else rollout.reward
        batch, seen = estimate_advantages(rollout, reward, config, parts.advantage_normalizer)
        trained = staleness(rollout, run.iteration, config) | policy_phase(batch, learner)
        seen |= mean_over_workers(trained, share)
        if parts.auxiliary:
            parts.auxiliary.after_iteration(batch)
            seen |= parts.auxiliary.statistics()
        del rollout, batch  # so that an auxiliary phase, and the next rollout, have their memory
        if is_distributed() and run.iteration % _COMPARE_EVERY == 0:
            check_equal(parts.shared_state(), f"after iteration {run.iteration + 1}")
        run.end_iteration(seen, parts.source.drain(), parts.state_dict)


def _sample(source: RolloutSource, iteration: int) -> Rollout:
    """The next rollout; a worker that has to abandon it takes the others along."""
    rollout = None
    with contextlib.suppress(Interrupted):
        rollout = source.next(iteration)
    if any_worker(rollout is None):
        raise Interrupted
    assert rollout is not None
    return rollout


def _auxiliary_phase(run: Run, parts: Parts, auxiliary: AuxiliaryPhase) -> None:
    """Run the phase between two iterations; it can last hours, so it is saved and stopped in its middle."""
    run.note("auxiliary phase: outputs of the old policy")
    for _ in auxiliary.gradient_steps(run.progress):
        run.note(f"auxiliary phase: gradient step {auxiliary.steps_done:,} of {auxiliary.steps:,}")
        if any_worker(parts.learner.interrupts.requested):
            run.save(parts.state_dict())
            raise Interrupted
        if any_worker(is_main() and run.checkpoint_due):
            run.save(parts.state_dict())
    # the next iteration overwrites the files that the checkpoint before refers to
    run.save(parts.state_dict())


def _prepare_auxiliary_phase(run: Run, parts: Parts) -> None:
    """Reserve the room for the auxiliary phase's data and tell the user about it."""
    if parts.auxiliary is None or run.finished:
        return
    parts.auxiliary.store.open()
    run.message(f"the auxiliary phase keeps {parts.auxiliary.store.describe()}")
    phase = run.config.aux.policy_iterations * run.config.iteration_batch
    if phase >= run.config.total_env_steps:
        run.message(
            f"no auxiliary phase will run: the first one comes after {phase:,} environment steps, and "
            f"total_env_steps is {run.config.total_env_steps:,}"
        )


def estimate_advantages(
    rollout: Rollout, reward: torch.Tensor, config: TrainConfig, normalizer: AdvantageNormalizer | None
) -> tuple[Batch, dict[str, float]]:
    """GAE and its normalisation ("Compute advantage estimates").

    Args:
        rollout: (N, T) data.
        reward: (N, T) normalised rewards.
        config: supplies gamma and lambda.
        normalizer: moments over iterations, updated with this one; None leaves advantages as they are.

    Returns:
        The batch, and columns for the log; ``advantage_std`` is this iteration's own, before normalisation.

    Raises:
        DivergenceError: an advantage is not finite.
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
    (mean, var, count), (_, target_var, _), (_, residual_var, _) = moments_of(
        advantage, target, target.double() - rollout.value.double()
    )
    if not torch.isfinite(var):
        raise DivergenceError("advantages are not finite: a reward or value has overflowed; lower optimizer.step_size")
    seen = {
        "advantage_mean": float(mean),
        "advantage_std": float(var.sqrt()),
        "explained_variance": float((1 - residual_var / target_var).float()) if target_var > 0 else math.nan,
    }
    if normalizer is not None:
        normalizer.update(mean, var, count)
        seen["advantage_std_used"] = normalizer.moments()[1] ** 0.5
        advantage = normalizer(advantage)
    batch = Batch(
        observation=rollout.observation,
        action=rollout.action,
        behavior_logp=rollout.behavior_logp,
        behavior_params=rollout.behavior_params,
        advantage=advantage,
        value_target=target,
    )
    return batch, seen
