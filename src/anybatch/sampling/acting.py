"""Acting for the T steps of a rollout: with PyTorch, or with NumPy for small networks on a CPU.

NumPy makes a step of sampling on CartPole 2 to 3 times as fast (measured in :mod:`anybatch.sampling.numpy_policy`). On
a GPU, PyTorch acts from a CUDA graph (measured in :mod:`anybatch.sampling.cuda_graph`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from anybatch.envs.base import Observation as EnvObservation
from anybatch.errors import ConfigError
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import Agent
from anybatch.models.masks import ILLEGAL
from anybatch.models.normalizer import ObservationNormalizer
from anybatch.observations import Observation, map_observation
from anybatch.sampling.numpy_policy import NumpyPolicy
from anybatch.sampling.observation_buffer import ObservationBuffer

_TOLERANCE = 1e-3  # far above rounding errors


class Actor(Protocol):
    """Networks to act with: an :class:`anybatch.models.agent.Agent`, or the CUDA graph of one."""

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Raw distribution parameters (N, P) and values (N,)."""

    def value(self, observation: Observation) -> Tensor:
        """Values (B,) of any number of observations."""

    @property
    def observation_normalizer(self) -> ObservationNormalizer | None:
        """Normalises the environments' observations before they are used; None changes nothing."""


@dataclass(frozen=True)
class PolicyOutputs:
    """Actions, parameters and values of T steps of N environments, on the device."""

    action: Tensor
    """(N, T, ...) as the policy produced them."""
    params: Tensor
    """(N, T, P) raw distribution parameters that the actions were drawn from, fp32."""
    value: Tensor
    """(N, T) of the observations, fp32."""


class RolloutActor(Protocol):
    """Acts for one rollout and keeps the outputs that learning needs."""

    def act(self, t: int, observation: EnvObservation) -> np.ndarray:
        """Compute the actions of step ``t`` from its observations (N, ...), in the form that the environment takes."""

    def result(self) -> PolicyOutputs:
        """Outputs of all T steps."""


def rollout_actor(agent: Actor, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer) -> RolloutActor:
    """Act with ``agent`` for one rollout, during which its weights do not change.

    Args:
        agent: the behaviour policy and value function.
        spec: the action space of its outputs.
        noise: (T, N, K) the random numbers of all steps, from :meth:`ActionSpec.noise`.
        observations: keeps those of all steps.
    """
    policy = NumpyPolicy.of(agent.policy, noise.shape[1]) if isinstance(agent, Agent) else None
    if isinstance(agent, Agent) and policy is not None:
        return _NumpyActor(policy, agent, spec, noise, observations)
    return _TorchActor(agent, spec, noise, observations)


class _TorchActor:
    def __init__(self, agent: Actor, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer) -> None:
        self._agent, self._spec, self._observations = agent, spec, observations
        self._noise = noise.unbind(0)
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def act(self, t: int, observation: EnvObservation) -> np.ndarray:
        params, value = self._agent(self._observations.put(t, observation))
        action = self._spec.distribution(params).transform(self._noise[t])
        self._steps.append((action, params, value))
        return self._spec.to_env(action)

    def result(self) -> PolicyOutputs:
        return PolicyOutputs(*(torch.stack(steps, dim=1) for steps in zip(*self._steps, strict=True)))


class _NumpyActor:
    def __init__(
        self, policy: NumpyPolicy, agent: Agent, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer
    ) -> None:
        self._policy, self._agent, self._spec, self._observations = policy, agent, spec, observations
        self._noise = noise.numpy()
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []

    def act(self, t: int, observation: EnvObservation) -> np.ndarray:
        self._observations.keep(t, observation)
        params, action = self._policy(observation, self._noise[t])
        self._steps.append((params, action))
        return self._spec.array_to_env(action)

    def result(self) -> PolicyOutputs:
        observations = self._observations.observations
        params, action = (torch.from_numpy(np.stack(steps, axis=1)) for steps in zip(*self._steps, strict=True))
        self._check(map_observation(lambda x: x[:, 0], observations), params[:, 0])
        # all at once, since the weights did not change meanwhile
        value = self._agent.value(map_observation(lambda x: x.flatten(0, 1), observations))
        return PolicyOutputs(action, params, value.view(action.shape[:2]))

    def _check(self, observation: Observation, params: Tensor) -> None:
        """Raise ConfigError if NumPy and PyTorch disagree, which would bias every gradient without any other sign."""
        expected = self._agent.policy(observation)
        if self._agent.policy.masking is not None:  # beside the logits of illegal actions any error is small
            legal = expected > ILLEGAL / 2
            params, expected = (torch.where(legal, x, 0.0) for x in (params, expected))
        error = (params - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        # weights that are not finite are reported elsewhere
        if not error <= _TOLERANCE and bool(torch.isfinite(expected).all()):
            name = type(self._agent.policy.encoder).__name__
            raise ConfigError(
                f"in_numpy of the encoder {name} differs from its forward pass: the policy's outputs "
                f"differ by {float(error):.2g} of their size; correct or remove it"
            )
