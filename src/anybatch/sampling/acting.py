"""How a policy acts for the T steps of a rollout: with PyTorch, or with NumPy where networks are small and on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from anybatch.envs.base import Observation as EnvObservation
from anybatch.errors import ConfigError
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import Agent
from anybatch.observations import Observation, map_observation
from anybatch.sampling.numpy_policy import ArrayPolicy
from anybatch.sampling.observation_buffer import ObservationBuffer

_TOLERANCE = 1e-3  # rounding stays far below


class Actor(Protocol):
    """What acting takes: an :class:`anybatch.models.agent.Agent`, or one that replays its recording."""

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Raw distribution parameters (N, P) and values (N,)."""

    def value(self, observation: Observation) -> Tensor:
        """Values (B,) of any number of observations."""


@dataclass(frozen=True)
class Acted:
    """What a policy did in T steps of N environments, on the device."""

    action: Tensor
    """(N, T, ...) as the policy produced them."""
    params: Tensor
    """(N, T, P) raw distribution parameters that the actions were drawn from, fp32."""
    value: Tensor
    """(N, T) of the observations, fp32."""


class Acting(Protocol):
    """Acts for one rollout, and keeps what learning needs."""

    def ask(self, t: int, observation: EnvObservation) -> None:
        """Begin to compute the actions of step ``t``, for its observations (N, ...)."""

    def take(self) -> np.ndarray:
        """Those actions, as the environment takes them; waits for a GPU, which else goes on by itself."""

    def result(self) -> Acted:
        """All T steps."""


def acting(agent: Actor, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer) -> Acting:
    """Act with ``agent`` for one rollout, during which its weights stay as they are.

    Args:
        agent: the behaviour policy and value function.
        spec: what its outputs mean.
        noise: (T, N, K) the random numbers of all steps, from :meth:`ActionSpec.noise`.
        observations: keeps those of all steps.
    """
    policy = ArrayPolicy.of(agent.policy, noise.shape[1]) if isinstance(agent, Agent) else None
    if isinstance(agent, Agent) and policy is not None:
        return _WithNumpy(policy, agent, spec, noise, observations)
    return _WithTorch(agent, spec, noise, observations)


def joined(groups: Sequence[Acted]) -> Acted:
    """What was done in all groups of environments; they follow each other along N."""
    if len(groups) == 1:
        return groups[0]
    return Acted(
        action=torch.cat([group.action for group in groups]),
        params=torch.cat([group.params for group in groups]),
        value=torch.cat([group.value for group in groups]),
    )


class _WithTorch:
    def __init__(self, agent: Actor, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer) -> None:
        self._agent, self._spec, self._observations = agent, spec, observations
        self._noise = noise.unbind(0)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._to_host = _ToHost() if noise.is_cuda else None

    def ask(self, t: int, observation: EnvObservation) -> None:
        params, value = self._agent(self._observations.put(t, observation))
        action = self._spec.distribution(params).transform(self._noise[t])
        self._kept.append((action, params, value))
        if self._to_host:
            self._to_host.begin(action)

    def take(self) -> np.ndarray:
        return self._spec.array_to_env(self._to_host.end() if self._to_host else self._kept[-1][0].numpy())

    def result(self) -> Acted:
        return Acted(*(torch.stack(one, dim=1) for one in zip(*self._kept, strict=True)))


class _ToHost:
    """Copies a GPU's tensors of one shape to the host while the host does something else."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None
        self._copied = torch.cuda.Event()

    def begin(self, tensor: Tensor) -> None:
        if self._pinned is None:
            self._pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._pinned.copy_(tensor, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(tensor.device))

    def end(self) -> np.ndarray:
        assert self._pinned is not None
        self._copied.synchronize()
        return self._pinned.numpy()  # until the next one


class _WithNumpy:
    def __init__(
        self, policy: ArrayPolicy, agent: Agent, spec: ActionSpec, noise: Tensor, observations: ObservationBuffer
    ) -> None:
        self._policy, self._agent, self._spec, self._observations = policy, agent, spec, observations
        self._noise = noise.numpy()
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []

    def ask(self, t: int, observation: EnvObservation) -> None:
        self._observations.keep(t, observation)
        self._kept.append(self._policy(observation, self._noise[t]))

    def take(self) -> np.ndarray:
        return self._spec.array_to_env(self._kept[-1][1])

    def result(self) -> Acted:
        observations = self._observations.observations
        params, action = (torch.from_numpy(np.stack(one, axis=1)) for one in zip(*self._kept, strict=True))
        self._check(map_observation(lambda x: x[:, 0], observations), params[:, 0])
        # all at once: the weights have not changed on the way
        value = self._agent.value(map_observation(lambda x: x.flatten(0, 1), observations))
        return Acted(action, params, value.view(action.shape[:2]))

    def _check(self, observation: Observation, params: Tensor) -> None:
        """A policy that acts otherwise than it is trained would bias every gradient, and nothing else would show it."""
        expected = self._agent.policy(observation)
        error = (params - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        # weights that are not finite are reported for what they are
        if not error <= _TOLERANCE and bool(torch.isfinite(expected).all()):
            name = type(self._agent.policy.encoder).__name__
            raise ConfigError(
                f"in_numpy of the encoder {name} does not compute what its forward pass does: the policy's outputs "
                f"differ by {float(error):.2g} of their size; correct it, or remove it"
            )
