"""The training loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from anybatch.advantages import explained_variance, gae
from anybatch.config import TrainConfig
from anybatch.distributed import moments
from anybatch.errors import DivergenceError
from anybatch.interrupts import Interrupted
from anybatch.memory import keep_freed_memory
from anybatch.minibatches import Batch
from anybatch.normalize import AdvantageNormalizer
from anybatch.parts import Parts, build
from anybatch.policy_phase import policy_phase
from anybatch.rollout import Rollout
from anybatch.run import Run, create_run, open_run
from anybatch.validation import validate


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    run_dir: Path
    env_steps: int
    mean_episode_return: float
    """Mean raw return of the last 100 episodes; NaN if none has ended."""
    interrupted: bool
    """A stop was asked for; ``anybatch resume`` goes on."""


def train(config: TrainConfig, out: str | Path, seed: int = 0, *, quiet: bool = False) -> TrainResult:
    """Train from scratch.

    Args:
        config: what to train; see :mod:`anybatch.presets`.
        out: the run folder, which must not hold a run yet.
        seed: every random choice of the run follows from it.
        quiet: show no progress.

    Raises:
        ConfigError: a setting makes no sense.
        EnvError: the environment cannot be made, or broke while it ran.
        DivergenceError: training is no longer finite; the last checkpoint stays.
    """
    validate(config)
    parts = build(config, seed)
    run = create_run(Path(out), config, seed, quiet=quiet)
    run.save(parts.state_dict())  # so that a run stopped in its first iteration can go on
    return _run(run, parts)


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
        EnvError, DivergenceError: as for :func:`train`.
    """
    run, state = open_run(Path(run_dir), total_env_steps=total_env_steps, quiet=quiet)
    # environments that start anew must not replay the levels that the run began with
    parts = build(run.config, run.seed, env_stream=run.iteration)
    if not parts.load_state_dict(state):
        run.message("the environments' state cannot be saved: they start new episodes")
    return _run(run, parts)


def _run(run: Run, parts: Parts) -> TrainResult:
    interrupted = False
    with parts.learner.interrupts:
        try:
            _loop(run, parts)
            run.save(parts.state_dict())
        except Interrupted:
            interrupted = True
        finally:
            run.close()
            parts.env.close()
    interrupted = interrupted or not run.finished
    return TrainResult(run.folder, run.env_steps, run.mean_episode_return, interrupted)


def _loop(run: Run, parts: Parts) -> None:
    learner, config = parts.learner, run.config
    keep_freed_memory()
    while not run.finished and not learner.interrupts.requested:
        learner.optimizers.set_progress(run.progress)
        rollout = parts.source.next()
        reward = parts.reward_normalizer(rollout.reward, rollout.first) if parts.reward_normalizer else rollout.reward
        batch, seen = estimate_advantages(rollout, reward, config, parts.advantage_normalizer)
        seen |= policy_phase(batch, learner)
        run.end_iteration(seen, parts.source.drain(), parts.state_dict)


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
    mean, var, count = moments(advantage)
    if not torch.isfinite(var):
        raise DivergenceError("advantages are not finite: a reward or value has overflowed; lower optimizer.step_size")
    seen = {
        "advantage_mean": float(mean),
        "advantage_std": float(var.sqrt()),
        "explained_variance": float(explained_variance(rollout.value, target)),
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
        value=rollout.value,
        value_target=target,
    )
    return batch, seen
