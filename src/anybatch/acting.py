"""How a policy acts for the T steps of a rollout: with PyTorch, or with NumPy where networks are small and on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from anybatch.envs.base import Observation as EnvObservation
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import Agent
from anybatch.models.array_policy import ArrayPolicy
from anybatch.observation_buffer import ObservationBuffer
from anybatch.observations import Observation, leaves, map_observation


class Actor(Protocol):
    """What acting takes: an :class:`anybatch.models.agent.Agent`, or one that replays its recording."""

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Raw distribution parameters (N, P) and values (N,)."""

    def value(self, observation: Observation) -> Tensor:
        """Values (B,) of any number of observations."""


@dataclass(frozen=True)
class Acted:
    """What a policy saw and did in T steps of N environments, on the device."""

    observation: Observation
    """(N, T, ...), or such a tensor for every key."""
    action: Tensor
    """(N, T, ...) as the policy produced them."""
    params: Tensor
    """(N, T, P) raw distribution parameters that the actions were drawn from, fp32."""
    value: Tensor
    """(N, T) of the observations, fp32."""


class Acting(Protocol):
    """Acts for one rollout, and keeps what learning needs."""

    def act(self, t: int, observation: EnvObservation) -> np.ndarray:
        """Draw the actions of step ``t``, as the environment takes them, for its observations (N, ...)."""

    def result(self) -> Acted:
        """All T steps."""


def acting(
    agent: Actor, spec: ActionSpec, generator: torch.Generator, like: EnvObservation, steps: int, device: torch.device
) -> Acting:
    """Act with ``agent`` for one rollout, during which its weights stay as they are.

    Args:
        agent: the behaviour policy and value function.
        spec: what its outputs mean.
        generator: of the actions' random numbers, all of which are drawn here.
        like: observations (N, ...) of the environments.
        steps: T.
        device: of the agent, and of what is kept.
    """
    num_envs = len(leaves(like)[0])
    noise = spec.noise((steps, num_envs), generator, device)
    observations = ObservationBuffer(like, steps, device)
    policy = ArrayPolicy.of(agent.policy, num_envs) if isinstance(agent, Agent) else None
    if isinstance(agent, Agent) and policy is not None:
        return _WithNumpy(policy, agent, spec, noise, observations)
    return _WithTorch(agent, spec, noise, observations)


class _WithTorch:
    def __init__(self, agent: Actor, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer) -> None:
        self._agent, self._spec, self._observations = agent, spec, observations
        self._noise = noise.unbind(0)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def act(self, t: int, observation: EnvObservation) -> np.ndarray:
        params, value = self._agent(self._observations.put(t, observation))
        action = self._spec.distribution(params).transform(self._noise[t])
        self._kept.append((action, params, value))
        return self._spec.to_env(action)

    def result(self) -> Acted:
        kept = (torch.stack(one, dim=1) for one in zip(*self._kept, strict=True))
        return Acted(self._observations.observations, *kept)


class _WithNumpy:
    def __init__(
        self, policy: ArrayPolicy, agent: Agent, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer
    ) -> None:
        self._policy, self._agent, self._spec, self._observations = policy, agent, spec, observations
        self._noise = noise.numpy()
        self._action = torch.empty((*noise.shape[:2], *spec.shape), dtype=spec.dtype)
        self._params = torch.empty((*noise.shape[:2], spec.num_params))
        self._actions, self._all_params = self._action.numpy(), self._params.numpy()  # (T, N, ...), the same memory

    def act(self, t: int, observation: EnvObservation) -> np.ndarray:
        self._observations.keep(t, observation)
        params, action = self._policy(observation, self._noise[t])
        self._all_params[t], self._actions[t] = params, action
        return self._spec.array_to_env(action)

    def result(self) -> Acted:
        observation = self._observations.observations
        # all at once: the weights have not changed on the way
        value = self._agent.value(map_observation(lambda x: x.flatten(0, 1), observation))
        action, params = (x.transpose(0, 1).contiguous() for x in (self._action, self._params))
        return Acted(observation, action, params, value.view(action.shape[:2]))
