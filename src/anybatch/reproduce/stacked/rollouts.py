"""Sampling for R runs at once: one EnvPool of R*N environments, which R single runs would have had one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anybatch.config.schema import EnvConfig
from anybatch.envs.base import Observation as EnvObservation
from anybatch.envs.base import Steps, derive_seeds
from anybatch.envs.envpool import EnvPoolVectorEnv, check_options, make_spec
from anybatch.models.actions import ActionSpec
from anybatch.models.distributions import Categorical
from anybatch.observations import map_observation
from anybatch.reproduce.stacked.networks import StackedNetworks, Vectors
from anybatch.reproduce.stacked.weights import Views


@dataclass(frozen=True)
class StackedRollout:
    """T steps of N environments of R runs; :class:`anybatch.sampling.rollout.Rollout` with a leading axis."""

    vectors: Vectors
    """(R, N, T, F) observations as the networks take them, for each part."""
    action: Tensor
    behavior_logp: Tensor
    behavior_params: Tensor
    reward: Tensor
    value: Tensor
    next_value: Tensor
    first: Tensor
    done: Tensor
    terminated: Tensor

    def finite(self) -> Tensor:
        """(R,) bool, the run's networks gave finite numbers throughout, and squares of values do not overflow."""
        return (torch.isfinite(self.value.square()) & torch.isfinite(self.behavior_logp)).flatten(1).all(1)


def make_stacked_env(config: EnvConfig, seeds: Sequence[int]) -> EnvPoolVectorEnv:
    """The environments of R runs in one pool, run after run, each as a single run with that seed would have it.

    Args:
        config: what is played; ``num_envs`` is N.
        seeds: R seeds, as :func:`anybatch.envs.factory.make` takes them.
    """
    name = config.id.partition(":")[2]
    options = check_options(config.options, make_spec(name, config.id), config.id, reserved=frozenset())
    env_seeds = [env_seed for seed in seeds for env_seed in derive_seeds(seed, config.num_envs)]
    # without a choice one thread: these environments take less time than handing them to another does
    threads = config.threads or 1
    return EnvPoolVectorEnv(name, env_seeds, env_id=config.id, options=options, threads=threads)


class Episodes:
    """Returns and lengths of the episodes of R runs, and the last ones of each."""

    def __init__(self, runs: int, num_envs: int, window: int) -> None:
        """All environments start a new episode; ``window``: episodes that are remembered for each run."""
        self._num_envs = num_envs
        self._returns = np.zeros(runs * num_envs)
        self._lengths = np.zeros(runs * num_envs, dtype=np.int64)
        self.first = np.ones(runs * num_envs, dtype=bool)
        self.recent_returns: list[deque[float]] = [deque(maxlen=window) for _ in range(runs)]
        self.recent_lengths: list[deque[int]] = [deque(maxlen=window) for _ in range(runs)]
        self.count = np.zeros(runs, dtype=np.int64)
        """(R,) episodes that have ended."""
        self.total = np.zeros(runs)
        """(R,) sums of their returns."""

    def add(self, reward: np.ndarray, done: np.ndarray, ended: np.ndarray) -> None:
        """Count a step of all R*N environments; ``ended`` holds the indices where ``done``."""
        self._returns += reward
        self._lengths += 1
        self.first = done
        if len(ended):
            runs = ended // self._num_envs
            returns, lengths = self._returns[ended], self._lengths[ended]
            np.add.at(self.count, runs, 1)
            np.add.at(self.total, runs, returns)
            for run, value, length in zip(runs.tolist(), returns.tolist(), lengths.tolist(), strict=True):
                self.recent_returns[run].append(value)
                self.recent_lengths[run].append(length)
            self._returns[ended] = 0
            self._lengths[ended] = 0


class StackedSampler:
    """Where the environments of R runs stand, and the randomness of their actions."""

    def __init__(
        self,
        env: EnvPoolVectorEnv,
        networks: StackedNetworks,
        action_spec: ActionSpec,
        generators: Sequence[torch.Generator],
        *,
        bootstrap_truncated: bool,
        window: int,
    ) -> None:
        """Reset ``env``.

        Args:
            env: R*N environments.
            networks: of the R runs.
            action_spec: of discrete actions.
            generators: of the actions, one for each run.
            bootstrap_truncated: whether a time limit's last value is bootstrapped.
            window: ended episodes that are remembered for each run.
        """
        self.runs = len(generators)
        self.num_envs = env.num_envs // self.runs
        self.episodes = Episodes(self.runs, self.num_envs, window)
        self._env = env
        self._networks = networks
        self._action_spec = action_spec
        self._generators = generators
        self._bootstrap_truncated = bootstrap_truncated
        self._vectors = self._prepare(env.reset())

    @torch.no_grad()
    def collect(self, views: Views, steps: int) -> StackedRollout:
        """Run the R policies for T timesteps in every environment.

        The values are computed after the last step, all at once: the weights do not change on the way.

        Args:
            views: the weights that act.
            steps: T.
        """
        runs, num_envs = self.runs, self.num_envs
        shape = (runs, num_envs, steps)
        vectors = tuple(torch.empty(*shape, part.shape[-1]) for part in self._vectors)
        params = torch.empty(*shape, self._action_spec.num_params)
        action = torch.empty(shape, dtype=torch.int64)
        # a run's numbers in the order in which its single run draws them
        noise = self._action_spec.noise((runs, steps, num_envs), self._generators)
        reward = np.empty((steps, runs * num_envs), dtype=np.float32)
        first, done, terminated = (np.empty((steps, runs * num_envs), dtype=bool) for _ in range(3))
        cut: list[tuple[int, Steps]] = []
        for t in range(steps):
            for stored, part in zip(vectors, self._vectors, strict=True):
                stored[:, :, t] = part
            raw = self._networks.policy(views, self._vectors)
            chosen = Categorical(raw).transform(noise[:, t])
            params[:, :, t] = raw
            action[:, :, t] = chosen
            first[t] = self.episodes.first
            step = self._env.step(self._action_spec.to_env(chosen.view(-1)))
            self._vectors = self._prepare(step.observation)
            reward[t], done[t] = step.reward, step.done
            terminated[t] = step.terminated if self._bootstrap_truncated else done[t]
            if self._bootstrap_truncated and len(step.final_index):
                cut.append((t, step))
            self.episodes.add(step.reward, done[t], np.flatnonzero(done[t]))
        value = self._networks.value(views, tuple(part.flatten(1, 2) for part in vectors)).view(shape)
        last = self._networks.value(views, self._vectors)
        next_value = torch.cat([value[:, :, 1:], last.unsqueeze(-1)], dim=-1)
        self._write_final_values(next_value, views, cut)
        return StackedRollout(
            vectors=vectors,
            action=action,
            behavior_logp=Categorical(params).log_prob(action),
            behavior_params=params,
            reward=self._tensor(reward),
            value=value,
            next_value=next_value,
            first=self._tensor(first),
            done=self._tensor(done),
            terminated=self._tensor(terminated),
        )

    def _write_final_values(self, next_value: Tensor, views: Views, cut: Sequence[tuple[int, Steps]]) -> None:
        """Put the values of the real last observations of truncated episodes into (R, N, T) next values."""
        if not cut:
            return
        envs = np.concatenate([step.final_index for _, step in cut])
        times = np.repeat([t for t, _ in cut], [len(step.final_index) for _, step in cut])
        runs, inside = np.divmod(envs, self.num_envs)
        order = np.argsort(runs, kind="stable")
        counts = np.bincount(runs, minlength=self.runs)
        place = np.empty_like(runs)  # among the truncated episodes of its run
        place[order] = np.concatenate([np.arange(count) for count in counts])
        vectors = self._padded(cut, runs, place, int(counts.max()))
        value = self._networks.value(views, vectors)
        index = tuple(torch.from_numpy(x) for x in (runs, inside, times, place))
        next_value[index[0], index[1], index[2]] = value[index[0], index[3]]

    def _padded(self, cut: Sequence[tuple[int, Steps]], runs: np.ndarray, place: np.ndarray, most: int) -> Vectors:
        """The final observations as (R, most, F), with zeros where a run has fewer."""

        def pad(*arrays: np.ndarray) -> Tensor:
            found = np.concatenate(arrays)
            padded = np.zeros((self.runs, most, *found.shape[1:]), dtype=found.dtype)
            padded[runs, place] = found
            return torch.from_numpy(padded).flatten(0, 1)

        observations = [step.final_observation for _, step in cut if step.final_observation is not None]
        head = observations[0]
        if isinstance(head, dict):
            return self._networks.vectors({key: pad(*(o[key] for o in observations)) for key in head})
        return self._networks.vectors(pad(*observations))  # type: ignore[arg-type]

    def _prepare(self, observation: EnvObservation) -> Vectors:
        return self._networks.vectors(map_observation(torch.from_numpy, observation))

    def _tensor(self, array: np.ndarray) -> Tensor:
        """(T, R*N) as (R, N, T)."""
        return torch.from_numpy(array).view(len(array), self.runs, self.num_envs).permute(1, 2, 0).contiguous()
