"""State of recurrent networks while they act: for a rollout, or as a trained policy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anybatch.errors import ConfigError
from anybatch.models.agent import Agent, Policy
from anybatch.models.normalizer import ObservationNormalizer
from anybatch.models.recurrent import RecurrentEncoder
from anybatch.observations import Observation, Sequences, leaves
from anybatch.sampling.acting import Actor


class Memory:
    """An :class:`anybatch.sampling.acting.Actor` that carries the state of a recurrent agent from step to step."""

    def __init__(self, agent: Agent, state: Tensor | None, first: Tensor) -> None:
        """Continue from ``state`` (N, S), or from zeros; where ``first`` (N,) is true it does not count."""
        self._agent = agent
        device = next(agent.parameters()).device
        self._first = first.to(device)
        self.state = torch.zeros(len(first), agent.state_size, device=device) if state is None else state
        """(N, S) after the last step."""
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Raw distribution parameters (N, P) and values (N,) of the next step."""
        self._before.append(self.state)
        params, value, self.state = self._agent.step(Sequences(observation, self._first, self.state, 1))
        self._after.append(self.state)
        return params, value

    def ended(self, done: Tensor) -> None:
        """Note which episodes, (N,) bool, ended with the step."""
        self._first = done.to(self.state.device)

    def value(self, observation: Observation) -> Tensor:
        """Values (N,) of the observations to act on next."""
        return self._agent.value(Sequences(observation, self._first, self.state, 1))

    def value_after(self, env: Tensor, t: int | Tensor, observation: Observation) -> Tensor:
        """Values (K,) of last observations of episodes, which ended in environments ``env``, (K,).

        ``t`` are the steps that they ended with, (K,), or the one step.
        """
        env = env.to(self.state.device)
        if isinstance(t, int):
            state = self._after[t][env]
        else:
            state = torch.stack(self._after, dim=1)[env, t.to(self.state.device)]
        first = torch.zeros(len(state), dtype=torch.bool, device=state.device)
        return self._agent.value(Sequences(observation, first, state, 1))

    def stored(self) -> Tensor:
        """The state before each step, (N, T, S)."""
        return torch.stack(self._before, dim=1)

    @property
    def observation_normalizer(self) -> ObservationNormalizer | None:
        """The agent's."""
        return self._agent.observation_normalizer


def remembering(agent: Actor, state: Tensor | None, first: Tensor) -> tuple[Actor, Memory | None]:
    """An actor for one rollout, and its memory: a recurrent agent acts as its :class:`Memory`; others have None."""
    if not isinstance(agent, Agent) or not agent.state_size:
        return agent, None
    memory = Memory(agent, state, first)
    return memory, memory


def value_after(agent: Actor, env: np.ndarray | Tensor, t: int | Tensor, observation: Observation) -> Tensor:
    """:meth:`Memory.value_after`; for agents that remember nothing, the values of the observations."""
    if not isinstance(agent, Memory):
        return agent.value(observation)
    return agent.value_after(torch.as_tensor(env), t, observation)


class PolicyMemory:
    """Memory of a policy between the steps of B environments that act at the same time.

    Of a policy that is not recurrent it stays empty.
    """

    def __init__(self) -> None:
        """Start new episodes everywhere."""
        self._state: Tensor | None = None
        self._first: Tensor | None = None

    def reset(self, done: np.ndarray | Tensor | bool = True) -> None:
        """Forget the past where an episode is ``done``: (B,) bool, 0 or 1, or one for all.

        Raises:
            ConfigError: B is another one than before.
        """
        if self._first is not None:
            ended = torch.as_tensor(done, device=self._first.device).bool()
            if ended.dim() and ended.shape != self._first.shape:
                raise ConfigError(f"done has shape {tuple(ended.shape)}, but must be ({len(self._first)},)")
            self._first = self._first | ended

    def params(self, policy: Policy, observation: Observation) -> Tensor:
        """Raw distribution parameters (B, P) of the next step.

        Raises:
            ConfigError: B is another one than before.
        """
        encoder = policy.encoder
        if not isinstance(encoder, RecurrentEncoder):
            return policy(observation)
        size, device = len(leaves(observation)[0]), leaves(observation)[0].device
        if self._state is None or self._first is None:
            self._state = torch.zeros(size, encoder.state_size, device=device)
            self._first = torch.ones(size, dtype=torch.bool, device=device)
        if len(self._state) != size:
            raise ConfigError(f"the memory is of {len(self._state)} environments, but {size} observations were given")
        params, self._state = policy.step(Sequences(observation, self._first, self._state, 1))
        self._first = torch.zeros_like(self._first)
        return params
