"""The interface of all environment families.

N environments with one autoreset convention, SAME_STEP: the observation of a step that ends an episode is the first one
of the next episode, and every row is a real transition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import gymnasium
import numpy as np

Observation: TypeAlias = np.ndarray | dict[str, np.ndarray]
"""A batch of observations (N, ...), or one such array for every key of a Dict space."""


Games: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Rewards before clipping, and bool, the whole game is over, of the same shape."""


@dataclass(frozen=True)
class Steps:
    """Results of one step of N environments, K of whose episodes were cut by a time limit."""

    observation: Observation
    """(N, ...) to act on next: after the end of an episode, the first observation of the next one."""
    reward: np.ndarray
    """(N,) float32, in the environment's own units."""
    terminated: np.ndarray
    """(N,) bool: the episode reached a terminal state."""
    truncated: np.ndarray
    """(N,) bool: the episode was cut by a time limit."""
    final_index: np.ndarray
    """(K,) int64, ascending: environments that were truncated and not terminated."""
    final_observation: Observation | None
    """(K, ...) their last observations before the reset, to bootstrap from; None if K is 0."""
    games: Games | None = None
    """(N,) where the environment clips rewards or a life is an episode, since returns are those of games; None where
    games are episodes."""

    @property
    def counted(self) -> Games:
        """(N,) rewards that returns are made of, and (N,) bool, where a return is complete."""
        return self.games or (self.reward, self.done)

    @property
    def done(self) -> np.ndarray:
        """(N,) bool: the episode was terminated or truncated."""
        done: np.ndarray = self.terminated | self.truncated
        return done


class VectorEnv(Protocol):
    """N copies of one environment that are stepped together; :func:`anybatch.envs.make` returns one."""

    num_envs: int
    """N."""
    observation_space: gymnasium.Space[Any]
    """Of a single environment, after conversion: floats are float32, Discrete spaces start at 0."""
    action_space: gymnasium.Space[Any]
    """Of a single environment, before conversion: Box is float32, Discrete spaces start at 0."""
    native_spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]]
    """Observation and action space of a single environment, without conversion."""
    bootstrap_truncated: bool
    """Whether truncated episodes are bootstrapped by default."""

    def reset(self) -> Observation:
        """Begin an episode in every environment and return the observations (N, ...); the first call seeds them."""

    def step(self, action: np.ndarray) -> Steps:
        """Act in every environment.

        action: int64 (N,) for Discrete, (N, k) for MultiDiscrete and MultiBinary; for Box float32 (N, ...) in bounds.
        Raises EnvError if an environment breaks its contract (shape, or a number that is not finite).
        """

    def save_state(self) -> dict[str, Any] | None:
        """The complete state, for `torch.load(weights_only=True)`; None if it cannot be saved."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state of `save_state`; the caller keeps the observation to act on."""

    def render(self) -> np.ndarray:
        """A frame (H, W, 3) uint8 of environment 0; raises EnvError if there is none."""

    def close(self) -> None:
        """Release processes, windows and memory."""


def derive_seeds(seed: int, count: int) -> list[int]:
    """`count` different seeds in [0, 2**31), unrelated to those derived from any other seed.

    Seeding environment i with seed + i would give runs with neighbouring seeds the same environments. A larger `count`
    extends the list.
    """
    # A few more than needed, because numbers of 31 bits repeat at large N.
    candidates = np.random.SeedSequence(seed).generate_state(count + count // 8 + 8) >> 1
    return list(dict.fromkeys(candidates.tolist()))[:count]
