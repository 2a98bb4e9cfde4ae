"""Sampling for R runs at once, in the R*N environments that R single runs would have."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.envs.base import Observation as EnvObservation
from anybatch.envs.base import Steps, VectorEnv
from anybatch.models.agent import Agent
from anybatch.models.normalizer import RolloutNormalizer, rollout_normalizer
from anybatch.observations import Observation, map_observation
from anybatch.sampling.observation_buffer import ObservationBuffer
from anybatch.sampling.rollout import Rollout, Sampled

WINDOWS = {"mean_episode_return": 100, "mean_episode_return_400": 400}
"""Episodes that each mean return covers."""


class Episodes:
    """Returns and lengths of the episodes of R runs."""

    def __init__(self, runs: int, num_envs: int) -> None:
        """All N environments of each run start a new episode."""
        self.runs = runs
        self._num_envs = num_envs
        self._returns = np.zeros(runs * num_envs)
        self._lengths = np.zeros(runs * num_envs, dtype=np.int64)
        self.first = np.ones(runs * num_envs, dtype=bool)
        """(R*N,) the next step is the first of an episode."""
        self._recent_returns: list[deque[float]] = [deque(maxlen=max(WINDOWS.values())) for _ in range(runs)]
        self._recent_lengths: list[deque[int]] = [deque(maxlen=min(WINDOWS.values())) for _ in range(runs)]
        self._count = np.zeros(runs, dtype=np.int64)
        self._total = np.zeros(runs)
        self._env_steps = 0

    def add(self, reward: np.ndarray, done: np.ndarray) -> None:
        """Count a step of all R*N environments."""
        self._env_steps += self._num_envs
        self._returns += reward
        self._lengths += 1
        self.first = done
        ended = np.flatnonzero(done)
        if len(ended):
            runs = ended // self._num_envs
            returns, lengths = self._returns[ended], self._lengths[ended]
            np.add.at(self._count, runs, 1)
            np.add.at(self._total, runs, returns)
            for run, value, length in zip(runs.tolist(), returns.tolist(), lengths.tolist(), strict=True):
                self._recent_returns[run].append(value)
                self._recent_lengths[run].append(length)
            self._returns[ended] = 0
            self._lengths[ended] = 0

    def drain(self) -> Sampled:
        """Return the environment steps of each run since the last call."""
        env_steps, self._env_steps = self._env_steps, 0
        return Sampled(env_steps)

    def columns(self) -> dict[str, np.ndarray]:
        """Statistics (R,) of the ended episodes, by column."""
        returns = [list(recent) for recent in self._recent_returns]
        return {
            **{name: np.array([_mean(recent[-window:]) for recent in returns]) for name, window in WINDOWS.items()},
            "mean_episode_length": np.array([_mean(recent) for recent in self._recent_lengths]),
            "episodes": self._count.copy(),
            "episode_return_sum": self._total.copy(),
        }


class StackedSampler:
    """The environments of R runs, and the randomness of their actions."""

    def __init__(
        self,
        env: VectorEnv,
        agent: Agent,
        generators: Sequence[torch.Generator],
        *,
        bootstrap_truncated: bool,
    ) -> None:
        """Reset ``env``.

        Args:
            env: R*N environments, run after run.
            agent: a :class:`~anybatch.reproduce.stacked.networks.StackedAgent` of the R runs.
            generators: of the actions, one for each run.
            bootstrap_truncated: whether to bootstrap the value where a time limit ended the episode.
        """
        self.runs = len(generators)
        self.num_envs = env.num_envs // self.runs
        self.episodes = Episodes(self.runs, self.num_envs)
        self._env = env
        self._agent = agent
        self._generators = generators
        self._bootstrap_truncated = bootstrap_truncated
        self._observation = env.reset()

    @torch.no_grad()
    def collect(self, steps: int, version: int) -> Rollout:
        """Run the R policies for T timesteps in every environment.

        The values are computed after the last step, all at once: the weights do not change on the way.

        Args:
            steps: T.
            version: iterations of training behind the weights.

        Returns:
            A rollout (R, N, T, ...).
        """
        agent, spec, shape = self._agent, self._agent.action_spec, (self.runs, self.num_envs, steps)
        normalized = rollout_normalizer(agent.observation_normalizer, steps, self.num_envs)
        buffer = ObservationBuffer.allocate(self._observation, steps, torch.device("cpu"))
        # a run's numbers in the order in which its single run draws them
        noise = spec.noise((self.runs, steps, self.num_envs), self._generators)
        params, action = [], []
        reward = np.empty((steps, self._env.num_envs), dtype=np.float32)
        first, done, terminated = (np.empty(reward.shape, dtype=bool) for _ in range(3))
        truncated: list[tuple[int, Steps]] = []
        for t in range(steps):
            observation = self._all(normalized.step(t, self._each(self._observation)))
            params.append(agent.policy(self._unstack(buffer.put(t, observation))))
            action.append(spec.distribution(params[-1]).transform(noise[:, t]))
            # of a diverged run it may be NaN, which environments refuse
            native = torch.nan_to_num(action[-1]) if spec.continuous else action[-1]
            step = self._env.step(spec.to_env(native.flatten(0, 1)))
            self._observation = step.observation
            first[t], reward[t], done[t] = self.episodes.first, step.reward, step.done
            terminated[t] = step.terminated if self._bootstrap_truncated else step.done
            if self._bootstrap_truncated and step.final_observation is not None:
                truncated.append((t, step))
            self.episodes.add(*step.counted)
            self.episodes.first = done[t]
        observations = self._unstack(buffer.observations)
        value = agent.value(map_observation(lambda x: x.flatten(1, 2), observations)).view(shape)
        last_value = agent.value(_tensors(normalized(self._each(self._observation))))
        next_value = torch.cat([value[:, :, 1:], last_value.unsqueeze(-1)], dim=-1)
        if truncated:
            self._write_final_values(next_value, truncated, normalized)
        behavior_params, actions = torch.stack(params, dim=2), torch.stack(action, dim=2)
        return Rollout(
            observation=observations,
            action=actions,
            behavior_logp=spec.distribution(behavior_params).log_prob(actions),
            behavior_params=behavior_params,
            reward=self._by_run(reward),
            value=value,
            next_value=next_value,
            first=self._by_run(first),
            done=self._by_run(done),
            terminated=self._by_run(terminated),
            version=version,
            observation_moments=normalized.moments(),
        )

    def _write_final_values(
        self, next_value: Tensor, truncated: Sequence[tuple[int, Steps]], normalized: RolloutNormalizer
    ) -> None:
        """Put the values of the real last observations of truncated episodes into (R, N, T) next values."""
        envs = np.concatenate([step.final_index for _, step in truncated])
        times = np.repeat([t for t, _ in truncated], [len(step.final_index) for _, step in truncated])
        runs, env_of_run = np.divmod(envs, self.num_envs)
        counts = np.bincount(runs, minlength=self.runs)
        place = np.empty_like(runs)  # among the truncated episodes of its run
        place[np.argsort(runs, kind="stable")] = np.arange(len(runs)) - np.repeat(counts.cumsum() - counts, counts)

        def padded(final: Sequence[np.ndarray]) -> np.ndarray:
            """All as (R, largest count, ...), with zeros where a run has fewer."""
            whole = np.zeros((self.runs, counts.max(), *final[0].shape[1:]), dtype=final[0].dtype)
            whole[runs, place] = np.concatenate(final)
            return whole

        final: Any = [step.final_observation for _, step in truncated]
        by_key = isinstance(final[0], dict)
        whole = {key: padded([x[key] for x in final]) for key in final[0]} if by_key else padded(final)
        value = self._agent.value(_tensors(normalized(whole)))
        next_value[runs, env_of_run, times] = value[runs, place]

    def _each(self, observation: EnvObservation) -> EnvObservation:
        """Observations (R*N, ...) of the environments by run, (R, N, ...)."""
        return map_observation(lambda x: x.reshape(self.runs, self.num_envs, *x.shape[1:]), observation)

    def _all(self, observation: EnvObservation) -> EnvObservation:
        """Observations (R, N, ...) as (R*N, ...)."""
        return map_observation(lambda x: x.reshape(-1, *x.shape[2:]), observation)

    def _unstack(self, observation: Observation) -> Observation:
        """Observations (R*N, ...) as (R, N, ...)."""
        return map_observation(lambda x: x.view(self.runs, self.num_envs, *x.shape[1:]), observation)

    def _by_run(self, array: np.ndarray) -> Tensor:
        """(T, R*N) as (R, N, T)."""
        return torch.from_numpy(array).view(len(array), self.runs, self.num_envs).permute(1, 2, 0).contiguous()


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _tensors(observation: EnvObservation) -> Observation:
    return map_observation(torch.from_numpy, observation)
