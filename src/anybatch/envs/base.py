"""What every environment family looks like from the inside of anybatch.

N environments; one autoreset convention, SAME_STEP: the observation of a step that ended an episode is already
the first one of the next episode, and no row exists that was not a real transition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import gymnasium
import numpy as np

Observation: TypeAlias = np.ndarray | dict[str, np.ndarray]
"""A batch of observations (N, ...), or one such array for every key of a Dict space."""


@dataclass(frozen=True)
class Steps:
    """What one step of N environments returned; K of their episodes were cut by a time limit."""

    observation: Observation
    """(N, ...) to act on next: where an episode ended, the first observation of the next one."""
    reward: np.ndarray
    """(N,) float32, in the environment's own units."""
    terminated: np.ndarray
    """(N,) bool: the episode reached an end of its own."""
    truncated: np.ndarray
    """(N,) bool: the episode was cut from outside, by a time limit."""
    final_index: np.ndarray
    """(K,) int64, ascending: environments that were truncated and not terminated."""
    final_observation: Observation | None
    """(K, ...) the real last observation of those, to bootstrap from; None if K is 0."""

    @property
    def done(self) -> np.ndarray:
        """(N,) bool: an episode ended with this step, for either reason."""
        done: np.ndarray = self.terminated | self.truncated
        return done


class VectorEnv(Protocol):
    """N copies of one environment that are stepped together; :func:`anybatch.envs.factory` returns one."""

    num_envs: int
    """N."""
    observation_space: gymnasium.Space[Any]
    """Of a single environment, as handed out here: floats are float32, Discrete ones start at 0."""
    action_space: gymnasium.Space[Any]
    """Of a single environment, as taken here: Box is float32, Discrete ones start at 0."""
    bootstrap_truncated: bool
    """Whether this family bootstraps the value of truncated episodes by default."""

    def reset(self) -> Observation:
        """Begin an episode in every environment and return the observations (N, ...); the first call seeds them."""

    def step(self, action: np.ndarray) -> Steps:
        """Act in every environment.

        action: int64 (N,) for Discrete, (N, k) for MultiDiscrete and MultiBinary; for Box float32 (N, ...) in bounds.
        Raises EnvError if an environment breaks its contract (shape, or a number that is not finite).
        """

    def save_state(self) -> dict[str, Any] | None:
        """Everything that the next steps depend on, for `torch.load(weights_only=True)`; None if it cannot be saved."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from where `save_state` was called; the observation to act on is the caller's to keep."""

    def render(self) -> np.ndarray:
        """A picture (H, W, 3) uint8 of environment 0; raises EnvError if there is none to be had."""

    def close(self) -> None:
        """Free processes, windows and memory."""


def derive_seeds(seed: int, count: int) -> list[int]:
    """`count` different seeds in [0, 2**31), unrelated to those derived from any other seed.

    Seeding environment i with seed + i would let runs with neighbouring seeds share environments. A longer list
    begins with the shorter one.
    """
    # Spares make up for the repetitions that 31 bits bring at large N.
    drawn = np.random.SeedSequence(seed).generate_state(count + count // 8 + 8) >> 1
    return list(dict.fromkeys(drawn.tolist()))[:count]
