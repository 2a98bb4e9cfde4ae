"""Sampling: run the behaviour policy for T steps in every environment and keep what learning needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.distributed.state import Slot, State, concatenate, of_rank, rows
from anybatch.envs.base import Games, Steps, VectorEnv
from anybatch.envs.base import Observation as EnvObservation
from anybatch.envs.snapshot import OtherStateError
from anybatch.errors import CheckpointError, DivergenceError, EnvError
from anybatch.minibatches import Samples
from anybatch.models.actions import ActionSpec
from anybatch.models.normalizer import rollout_normalizer
from anybatch.observations import Observation, leaves, map_observation
from anybatch.sampling.acting import Actor, rollout_actor
from anybatch.sampling.memory import remembering, value_after
from anybatch.sampling.observation_buffer import ObservationBuffer
from anybatch.system.signals import Interrupts, interruptible

__all__ = ["EpisodeTracker", "Rollout", "Sampled", "Sampler", "Steps", "collect"]


@dataclass(frozen=True)
class Rollout(Samples):
    """T steps of N environments; every tensor is (N, T, ...)."""

    reward: Tensor
    """(N, T) in the environment's own units."""
    value: Tensor
    """V(s_t) of the weights that acted."""
    next_value: Tensor
    """V(s_{t+1}) before any reset, of the weights that acted; its content is unused where ``terminated``."""
    first: Tensor
    """bool, the step was the first of its episode."""
    done: Tensor
    """bool, the episode ended with this step."""
    terminated: Tensor
    """bool, it ended and its value must not be bootstrapped."""
    version: int = 0
    """Iterations of training behind the weights that acted."""
    observation_moments: Tensor | None = None
    """(N, 2, F) moments of each environment's raw observations where ``observation`` is normalised; see
    :meth:`anybatch.models.normalizer.ObservationNormalizer.update`."""
    state: Tensor | None = None
    """(N, T, S) state of recurrent networks before each step, which is not used for ``first`` steps; None without."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> Rollout:
        """The rollout that :meth:`state_dict` gave, on a device."""
        return cls(**state).map(lambda tensor: tensor.to(device))


@dataclass
class Sampled:
    """Counts of the sampling since the last call of ``drain``; the warm-up of a delay counts as well."""

    env_steps: int = 0
    """Environment steps of this worker."""
    episode_returns: list[float] = field(default_factory=list)
    """Sums of raw rewards of the episodes that ended."""
    episode_lengths: list[int] = field(default_factory=list)
    """Steps of the episodes that ended."""
    episode_info: dict[str, list[float]] = field(default_factory=dict)
    """For each key of env.info_keys its number at the end of these episodes, NaN where there was none."""

    def add(self, other: Sampled) -> None:
        """Add the counts of ``other``."""
        self.env_steps += other.env_steps
        self.episode_returns += other.episode_returns
        self.episode_lengths += other.episode_lengths
        for key, numbers in other.episode_info.items():
            self.episode_info.setdefault(key, []).extend(numbers)


class EpisodeTracker:
    """Return and length so far of the current episode of each environment."""

    def __init__(self, num_envs: int) -> None:
        """All environments start a new episode."""
        self.returns = np.zeros(num_envs, dtype=np.float64)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.first = np.ones(num_envs, dtype=bool)
        self._games: list[Games | None] = []
        self._info: list[Mapping[str, np.ndarray] | None] = []
        self._sampled = Sampled()

    def note(self, step: Steps) -> None:
        """Take what else a step tells of games and episodes, before :meth:`add` counts it."""
        self._games.append(step.games)
        self._info.append(step.episode_info)

    def add(self, reward: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Count T steps of every environment; those that were noted may have returns of games, and numbers from info.

        Args:
            reward: (N, T) raw rewards.
            done: (N, T) bool, an episode ended with the step.

        Returns:
            (N, T) bool, the step was the first of its episode.
        """
        first = np.concatenate([self.first[:, None], done[:, :-1]], axis=1)
        start = np.zeros(len(done), dtype=np.int64)
        reward, ended = _over_time(self._games) or (reward, done)
        for t, env in np.argwhere(ended.T):  # in the order of their ends
            steps = slice(start[env], t + 1)
            self._sampled.episode_returns.append(float(self.returns[env] + reward[env, steps].sum(dtype=np.float64)))
            self._sampled.episode_lengths.append(int(self.lengths[env] + t + 1 - start[env]))
            self.returns[env], self.lengths[env], start[env] = 0, 0, t + 1
            for key, numbers in (self._info[t] or {}).items() if self._info else ():
                self._sampled.episode_info.setdefault(key, []).append(float(numbers[env]))
        for env, begin in enumerate(start):
            self.returns[env] += reward[env, begin:].sum(dtype=np.float64)
        self.lengths += done.shape[1] - start
        self.first = done[:, -1].copy()
        self._sampled.env_steps += done.size
        self._forget()
        return first

    def drain(self) -> Sampled:
        """Return the counts since the last call, and start again from zero."""
        sampled, self._sampled = self._sampled, Sampled()
        return sampled

    def restart(self) -> None:
        """Note that all environments start a new episode; the counts stay."""
        self.returns[:] = 0
        self.lengths[:] = 0
        self.first = np.ones_like(self.first)
        self._forget()

    def _forget(self) -> None:
        self._games.clear()
        self._info.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        arrays = {"returns": self.returns, "lengths": self.lengths, "first": self.first}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.returns, self.lengths, self.first = (state[k].numpy().copy() for k in ("returns", "lengths", "first"))


class Sampler:
    """The environments of this worker, their latest observations, and the random generator of the actions."""

    def __init__(
        self, env: VectorEnv, action_spec: ActionSpec, *, bootstrap_truncated: bool, generator: torch.Generator
    ) -> None:
        """Take over ``env``; it is reset when the first rollout is collected."""
        self.env = env
        self.action_spec = action_spec
        self.bootstrap_truncated = bootstrap_truncated
        self.generator = generator
        self.episodes = EpisodeTracker(env.num_envs)
        self.observation: EnvObservation | None = None
        """(N, ...) to act on next; None before the first step."""
        self.state: Tensor | None = None
        """(N, S) of recurrent networks after the last step; None before it, and for other networks."""

    def take_observation(self, interrupts: Interrupts) -> EnvObservation:
        """Remove and return the observations (N, ...) to act on next; reset the environments if there are none.

        They are removed so that after an abandoned rollout the next one begins new episodes.
        """
        if self.observation is None:
            with interrupts.interruptible():
                self.observation = self._reset()
            self.episodes.restart()
        observation, self.observation = self.observation, None
        return observation

    def _reset(self) -> Any:
        return self.env.reset()

    def state_dict(self) -> dict[str, object]:
        """State for a checkpoint; ``env`` is None where the environments' state cannot be saved."""
        env_state, observation = None, None
        if self.observation is not None:
            with interruptible():
                env_state = self.env.save_state()
            observation = None if env_state is None else map_observation(self._to_tensor, self.observation)
        return {
            "env": env_state,
            "observation": observation,
            "episodes": self.episodes.state_dict(),
            "generator": self.generator.get_state(),
            **({} if self.state is None else {"state": self.state}),
        }

    @staticmethod
    def merge(workers: Sequence[State]) -> State:
        """One state over the environments of all workers."""
        merged: State = {
            "env": None,
            "observation": None,
            "episodes": concatenate([worker["episodes"] for worker in workers]),
            "generators": [worker["generator"] for worker in workers],
        }
        if all(worker["env"] is not None and list(worker["env"]) == ["envs"] for worker in workers):
            merged["env"] = {"envs": [env for worker in workers for env in worker["env"]["envs"]]}
            merged["observation"] = concatenate([worker["observation"] for worker in workers])
            if all("state" in worker for worker in workers):
                merged["state"] = concatenate([worker["state"] for worker in workers])
        return merged

    def split(self, merged: State, slot: Slot) -> State:
        """State of one worker, from :meth:`merge`."""
        env = merged["env"]
        return {
            "env": None if env is None else {"envs": env["envs"][slot.envs]},
            "observation": None if env is None else rows(merged["observation"], slot.envs),
            "episodes": rows(merged["episodes"], slot.envs),
            "generator": of_rank(merged["generators"], slot.rank, self.generator.get_state()),
            **({"state": rows(merged["state"], slot.envs)} if "state" in merged else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore :meth:`state_dict`; False if the environments start new episodes instead.

        Raises:
            CheckpointError: it is the state of another number of environments.
        """
        if len(state["generator"]) == len(self.generator.get_state()):  # else that of a CPU on a GPU, or the reverse
            self.generator.set_state(state["generator"])
        if state["env"] is None:
            return False
        before, now = len(leaves(state["observation"])[0]), self.env.num_envs
        if before != now:
            raise CheckpointError(
                f"the checkpoint has the state of {before} environments, but there are {now} now: set env.num_envs "
                f"back to {before}"
            )
        try:
            self.env.load_state(state["env"])
        except OtherStateError:
            return False
        self.observation = map_observation(self._from_tensor, state["observation"])
        self.episodes.load_state_dict(state["episodes"])
        if "state" in state:
            self.state = state["state"].to(self.generator.device)
        return True

    def _to_tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array.copy())

    def _from_tensor(self, tensor: Tensor) -> Any:
        return tensor.numpy().copy()


@torch.no_grad()
def collect(
    sampler: Sampler, agent: Actor, steps: int, *, device: torch.device, interrupts: Interrupts, version: int = 0
) -> Rollout:
    """Run ``agent`` for T timesteps in every environment (appendix A, "Run policy pi_behav in environment").

    Args:
        sampler: the environments, which continue from their last observation.
        agent: the behaviour policy and value function.
        steps: T.
        device: where the rollout is kept.
        interrupts: lets a stop request through between steps.
        version: iterations of training behind the weights, recorded in the rollout.

    Returns:
        The rollout, with normalised observations where the agent normalises them; every row is a real transition.

    Raises:
        EnvError: the environment broke its contract.
        DivergenceError: the policy's outputs are not finite.
    """
    env, spec, observation = sampler.env, sampler.action_spec, sampler.take_observation(interrupts)
    reward = np.empty((env.num_envs, steps), dtype=np.float32)
    done, terminated = (np.empty(reward.shape, dtype=bool) for _ in range(2))
    finals: list[tuple[np.ndarray, int, EnvObservation]] = []
    normalized = rollout_normalizer(agent.observation_normalizer, steps, env.num_envs)
    buffer = ObservationBuffer.allocate(observation, steps, device)
    agent, memory = remembering(agent, sampler.state, torch.from_numpy(sampler.episodes.first))
    actor = rollout_actor(agent, spec, spec.noise((steps, env.num_envs), sampler.generator, device), buffer)
    for t in range(steps):
        interrupts.check()
        action = actor.act(t, normalized.step(t, observation))
        with interrupts.interruptible():
            step = step_of(env, action)
        observation = step.observation
        reward[:, t], done[:, t], terminated[:, t] = step.reward, step.done, step.terminated
        sampler.episodes.note(step)
        if memory:
            memory.ended(torch.from_numpy(step.done))
        if sampler.bootstrap_truncated and step.final_observation is not None:
            finals.append((step.final_index, t, step.final_observation))
    sampler.observation, sampler.state = observation, memory.state if memory else None
    final_values = [(i, t, value_after(agent, i, t, to_device(normalized(x), device))) for i, t, x in finals]
    acted, moments = actor.result(), normalized.moments()
    logp = spec.distribution(acted.params).log_prob(acted.action)
    check_finite(acted.value, logp)
    return Rollout(
        observation=buffer.observations,
        action=acted.action,
        behavior_logp=logp,
        behavior_params=acted.params,
        reward=torch.from_numpy(reward).to(device),
        value=acted.value,
        next_value=_next_value(acted.value, agent.value(to_device(normalized(observation), device)), final_values),
        first=torch.from_numpy(sampler.episodes.add(reward, done)).to(device),
        done=torch.from_numpy(done).to(device),
        terminated=torch.from_numpy(terminated if sampler.bootstrap_truncated else done).to(device),
        version=version,
        observation_moments=None if moments is None else moments.to(device),
        state=memory.stored() if memory else None,
    )


INFINITE_ACTIONS = "the policy's actions are not finite; lower optimizer.step_size"


def step_of(env: VectorEnv, action: np.ndarray) -> Steps:
    """A step of the environments.

    Raises:
        DivergenceError: it failed, and the actions were not finite: the policy is the reason.
        EnvError: it failed otherwise.
    """
    try:
        return env.step(action)
    except EnvError as error:
        if action.dtype.kind == "f" and not np.isfinite(action).all():
            raise DivergenceError(INFINITE_ACTIONS) from error
        raise


def _over_time(games: Sequence[Games | None]) -> Games | None:
    """Rewards and ends of games (N, T), from those of each step (N,); None where games are episodes."""
    steps = [step for step in games if step is not None]
    return (np.stack([x for x, _ in steps], 1), np.stack([over for _, over in steps], 1)) if steps else None


def _next_value(value: Tensor, last_value: Tensor, final_values: list[tuple[np.ndarray, int, Tensor]]) -> Tensor:
    """V(s_{t+1}) before any reset (N, T), from V(s_t) and the values of what resets replaced."""
    next_value = torch.cat([value[:, 1:], last_value.unsqueeze(1)], dim=1)
    for env_index, t, final_value in final_values:
        next_value[torch.from_numpy(env_index).to(value.device), t] = final_value
    return next_value


def check_finite(value: Tensor, logp: Tensor) -> None:
    """Raise DivergenceError if a value or log-probability is not finite."""
    if not bool(torch.isfinite(value).all() and torch.isfinite(logp).all()):
        raise DivergenceError(
            "the networks gave a log-probability or value that is not finite while sampling; lower optimizer.step_size"
        )


def to_device(observation: EnvObservation, device: torch.device) -> Observation:
    """Convert an environment's observation to tensors on a device; on the CPU they share its memory."""
    return map_observation(lambda array: torch.from_numpy(array).to(device), observation)
