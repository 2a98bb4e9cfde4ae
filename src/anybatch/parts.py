"""Everything that training changes, and how it is made from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anybatch.config import TrainConfig
from anybatch.distributed import rank, world_size
from anybatch.envs.base import VectorEnv
from anybatch.envs.make import make
from anybatch.interrupts import Interrupts
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import build_agent
from anybatch.models.precision import resolve_device, resolve_precision
from anybatch.normalize import AdvantageNormalizer, RewardNormalizer
from anybatch.optimizers import Optimizers
from anybatch.policy_phase import Learner
from anybatch.proximal import BehaviorProximal, EwmaProximal, ProximalPolicy, RecentProximal
from anybatch.rollout import Rollout, Sampler, collect
from anybatch.sources import Delayed, RolloutSource, Synchronous


@dataclass(frozen=True)
class Parts:
    """Everything that training changes, each part with its own state."""

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


def build(config: TrainConfig, seed: int, env_stream: int = 0) -> Parts:
    """Make everything that a run consists of, each part with its own stream of the seed.

    Args:
        config: what to train.
        seed: the run's seed.
        env_stream: which of the seed's streams the environments take.
    """
    workers = world_size()
    model_seed, env_seed, action_seed, shuffle_seed = (
        _stream(seed, name, worker, number)
        for name, worker, number in (
            ("model", 0, 0),
            ("env", rank(), env_stream),
            ("action", rank(), 0),
            ("shuffle", rank(), 0),
        )
    )
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


def _stream(seed: int, name: str, worker: int, number: int) -> int:
    """A seed for one purpose of one worker; different arguments give independent ones."""
    words = [seed, *name.encode(), worker, number]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


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
