"""Evaluation of policies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from anybatch.config.schema import EnvConfig, TrainConfig
from anybatch.envs.base import Observation as EnvObservation
from anybatch.envs.factory import make, spaces
from anybatch.errors import ConfigError
from anybatch.models.agent import Agent, build_agent
from anybatch.models.precision import resolve_device, resolve_precision
from anybatch.runs import checkpoint
from anybatch.runs.files import CHECKPOINTS
from anybatch.runs.run import read_config
from anybatch.sampling.rollout import to_device

_MAX_ENVS = 64


@dataclass(frozen=True)
class LoadedPolicy:
    """A trained policy: observations in, actions out."""

    agent: Agent
    config: TrainConfig
    """Configuration of its training."""
    device: torch.device
    """Device of the networks."""

    def act(
        self, observation: EnvObservation, generator: torch.Generator | None = None, *, greedy: bool = False
    ) -> np.ndarray:
        """Choose actions.

        Args:
            observation: (B, ...) array, or a dictionary of such arrays.
            generator: generator for sampled actions, on the policy's device; None for torch's global one.
            greedy: take the most likely action instead of sampling.

        Returns:
            (B, ...) actions in the environment's format.
        """
        with torch.no_grad():
            distribution = self.agent.policy.distribution(to_device(observation, self.device))
            action = distribution.mode() if greedy else distribution.sample(generator)
        return self.agent.action_spec.to_env(action)


@dataclass(frozen=True)
class Evaluation:
    """Returns of complete episodes, not normalised."""

    returns: list[float]
    """Return of each episode."""
    lengths: list[int]
    """Steps of each episode."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; NaN for a single episode."""
        count = len(self.returns)
        return float(np.std(self.returns, ddof=1)) / math.sqrt(count) if count > 1 else math.nan

    def __str__(self) -> str:
        """``mean +- standard error (episodes)``."""
        return f"{self.mean:.2f} +- {self.standard_error:.2f} ({len(self.returns)} episodes)"


def load_policy(run_dir: str | Path, *, device: str = "auto") -> LoadedPolicy:
    """Load the policy of a run from its newest intact checkpoint.

    Raises:
        CheckpointError: the folder is not a run folder, or has no intact checkpoint.
        ConfigError: the device does not exist.
    """
    folder = Path(run_dir)
    config, _ = read_config(folder)
    content, _ = checkpoint.load_newest(folder / CHECKPOINTS)
    policy = initial_policy(config, device=device)
    policy.agent.load_state_dict(content["state"]["agent"])
    return policy


def initial_policy(config: TrainConfig, *, seed: int = 0, device: str = "auto") -> LoadedPolicy:
    """Create an untrained policy for a configuration, as a baseline."""
    where = resolve_device(device)
    observation_space, action_space = spaces(config.env)
    agent = build_agent(
        config.model,
        observation_space,
        action_space,
        precision=resolve_precision(config.precision, where),
        auxiliary_head=config.aux.enabled,
        seed=seed,
    )
    return LoadedPolicy(agent.to(where), config, where)


def evaluate(
    policy: LoadedPolicy,
    env: str | EnvConfig | None = None,
    episodes: int = 100,
    seed: int = 0,
    *,
    greedy: bool = False,
) -> Evaluation:
    """Evaluate a policy on complete episodes.

    Every environment runs a fixed number of episodes, so that short ones are not over-represented.

    Args:
        policy: policy to evaluate.
        env: environment id or configuration; None for the policy's training environment.
        episodes: number of episodes, at least 1.
        seed: seed of environments and actions.
        greedy: take the most likely action instead of sampling.

    Raises:
        ConfigError: fewer than 1 episode, or an unknown environment.
        EnvError: the environment cannot be made.
    """
    if episodes < 1:
        raise ConfigError(f"episodes is {episodes}, but must be at least 1")
    config = policy.config.env if env is None else EnvConfig(id=env) if isinstance(env, str) else env
    count = min(episodes, _MAX_ENVS)
    quota = np.full(count, episodes // count)
    quota[: episodes % count] += 1
    games = make(replace(config, num_envs=count), count, seed)
    try:
        generator = torch.Generator(policy.device).manual_seed(seed)
        returns: list[float] = []
        lengths: list[int] = []
        total, length = np.zeros(count), np.zeros(count, dtype=np.int64)
        observation = games.reset()
        while len(returns) < episodes:
            step = games.step(policy.act(observation, generator, greedy=greedy))
            observation = step.observation
            total += step.reward
            length += 1
            for index in np.flatnonzero(step.done & (quota > 0)):
                returns.append(float(total[index]))
                lengths.append(int(length[index]))
                quota[index] -= 1
            total[step.done] = 0
            length[step.done] = 0
        return Evaluation(returns, lengths)
    finally:
        games.close()


def unseen_levels(config: EnvConfig) -> EnvConfig | None:
    """The same Procgen game with all levels, if training used a limited set of them; otherwise None.

    Training used levels ``start_level`` to ``start_level + num_levels - 1``; with ``num_levels 0`` it used all.
    """
    is_procgen = isinstance(config.id, str) and config.id.startswith("procgen:")
    if not is_procgen or not config.options.get("num_levels"):
        return None
    return replace(config, options={**config.options, "num_levels": 0, "start_level": 0})
