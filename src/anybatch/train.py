"""The training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anybatch.advantages import explained_variance, gae
from anybatch.config import TrainConfig
from anybatch.distributed import moments, rank, world_size
from anybatch.envs.base import VectorEnv
from anybatch.envs.make import make
from anybatch.errors import DivergenceError
from anybatch.interrupts import Interrupted, Interrupts
from anybatch.memory import keep_freed_memory
from anybatch.minibatches import Batch
from anybatch.models.agent import build_agent
from anybatch.models.actions import ActionSpec
from anybatch.models.precision import resolve_device, resolve_precision
from anybatch.normalize import AdvantageNormalizer, RewardNormalizer
from anybatch.optimizers import Optimizers
from anybatch.policy_phase import Learner, policy_phase
from anybatch.proximal import BehaviorProximal, EwmaProximal, ProximalPolicy, RecentProximal
from anybatch.rollout import Rollout, Sampler, collect
from anybatch.run import Run, create_run, open_run
from anybatch.sources import Delayed, RolloutSource, Synchronous
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
    return _run(create_run(Path(out), config, seed, quiet=quiet), parts)


def resume(run_dir: str | Path, *, quiet: bool = False) -> TrainResult:
    """Go on with an interrupted run from its newest intact checkpoint.

    Raises:
        CheckpointError: there is none, or it does not belong here.
        EnvError, DivergenceError: as for :func:`train`.
    """
    run, state = open_run(Path(run_dir), quiet=quiet)
    parts = build(run.config, run.seed)
    if not parts.load_state_dict(state):
        run.message("the environments' state cannot be saved: they start new episodes")
    return _run(run, parts)


@dataclass(frozen=True)
class Parts:
    """Everything that training changes."""

    source: RolloutSource
    learner: Learner
    reward_normalizer: RewardNormalizer | None
    advantage_normalizer: AdvantageNormalizer | None
    env: VectorEnv

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "agent": self.learner.agent.state_dict(),
            "optimizers": self.learner.optimizers.state_dict(),
            "proximal": self.learner.proximal.state_dict(),
            "shuffle": self.learner.shuffle.get_state(),
            "source": self.source.state_dict(),
            **{name: part.state_dict() for name, part in self._normalizers().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what :meth:`state_dict` gave; False if the environments start new episodes instead."""
        self.learner.agent.load_state_dict(state["agent"])
        self.learner.optimizers.load_state_dict(state["optimizers"])
        self.learner.proximal.load_state_dict(state["proximal"])
        self.learner.shuffle.set_state(state["shuffle"])
        for name, part in self._normalizers().items():
            part.load_state_dict(state[name])
        return self.source.load_state_dict(state["source"])

    def _normalizers(self) -> dict[str, RewardNormalizer | AdvantageNormalizer]:
        named = {"reward_normalizer": self.reward_normalizer, "advantage_normalizer": self.advantage_normalizer}
        return {name: part for name, part in named.items() if part is not None}


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


def build(config: TrainConfig, seed: int) -> Parts:
    """Make everything that a run consists of, each part with its own stream of the seed."""
    workers = world_size()
    model_seed, *worker_seeds = (int(s.generate_state(1)[0]) for s in np.random.SeedSequence(seed).spawn(1 + 3 * workers))
    env_seed, action_seed, shuffle_seed = worker_seeds[3 * rank() : 3 * rank() + 3]
    device = resolve_device(config.device)
    interrupts = Interrupts()
    env = make(config.env, config.env.num_envs // workers, env_seed)
    action_spec = ActionSpec(env.action_space)
    agent = build_agent(
        config.model,
        env.observation_space,
        env.action_space,
        precision=resolve_precision(config.precision, device),
        seed=model_seed,
    ).to(device)
    learner = Learner(
        config=config,
        agent=agent,
        action_spec=action_spec,
        proximal=_proximal(config, agent.policy),
        optimizers=Optimizers(agent, config.optimizer),
        shuffle=torch.Generator().manual_seed(shuffle_seed),
        interrupts=interrupts,
    )
    bootstrap = config.env.bootstrap_truncated
    sampler = Sampler(
        env,
        action_spec,
        bootstrap_truncated=env.bootstrap_truncated if bootstrap is None else bootstrap,
        generator=torch.Generator(device).manual_seed(action_seed),
    )
    return Parts(
        source=_source(config, sampler, _collector(config, sampler, learner, device)),
        learner=learner,
        reward_normalizer=(
            RewardNormalizer(env.num_envs, config.reward.return_discount, config.reward.clip)
            if config.reward.normalize
            else None
        ),
        advantage_normalizer=AdvantageNormalizer(config.advantage.span) if config.advantage.normalize else None,
        env=env,
    )


def _collector(config: TrainConfig, sampler: Sampler, learner: Learner, device: torch.device) -> Callable[[], Rollout]:
    return lambda: collect(sampler, learner.agent, config.rollout.steps, device=device, interrupts=learner.interrupts)


def _proximal(config: TrainConfig, policy: torch.nn.Module) -> ProximalPolicy:
    if config.policy.proximal == "ewma":
        return EwmaProximal(policy, config.policy.center_of_mass)
    if config.policy.proximal == "recent":
        return RecentProximal(policy)
    return BehaviorProximal()


def _source(config: TrainConfig, sampler: Sampler, collect_one: Callable[[], Rollout]) -> RolloutSource:
    if config.rollout.source.kind == "delayed":
        return Delayed(collect_one, sampler, config.rollout.source.delay)
    return Synchronous(collect_one, sampler)
