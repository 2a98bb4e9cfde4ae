"""The interface of all environment families.

N environments with one autoreset convention, SAME_STEP: the observation of a step that ends an episode is the first one
of the next episode, and every row is a real transition.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import gymnasium
import numpy as np

from anybatch.errors import EnvError, shown

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
    episode_info: Mapping[str, np.ndarray] | None = None
    """(N,) float64 for each key of env.info_keys: the numbers in the info of the steps that ended an episode, NaN
    elsewhere; None without such keys, or if no episode ended."""
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


def close_env(env: VectorEnv) -> None:
    """Close environments when their work is done; an error is printed, since the result or an earlier error counts."""
    try:
        env.close()
    except EnvError as error:
        print(f"anybatch: {error}", file=sys.stderr, flush=True)


class EpisodeInfo:
    """Numbers from the info of the steps that end episodes, for the keys of env.info_keys."""

    _PATIENCE = 20

    def __init__(self, keys: Sequence[str], num_envs: int, env_id: str) -> None:
        """`keys`: those that are wanted, of each of N environments."""
        self._env_id = env_id
        self._num_envs = num_envs
        self._episodes = 0
        self._missing = set(keys)
        self._others: set[str] = set()
        self._keys = tuple(keys)
        self._numbers: dict[str, np.ndarray] = {}

    def take(self, info: Mapping[str, Any], index: int) -> None:
        """Take the info of a single environment whose episode has ended; `index` is its number."""
        if not self._numbers:
            self._numbers = {key: np.full(self._num_envs, np.nan) for key in self._keys}
        for key in self._keys:
            if info.get(key) is not None:
                self._numbers[key][index] = self._number(info[key], key, index)
                self._missing.discard(key)
        self._episodes += 1
        if self._missing:
            self._others |= {str(key) for key in info}
            if self._episodes >= self._PATIENCE:  # a wrong name, or one that only some episodes have, such as successes
                had = f"it had {', '.join(sorted(self._others))}" if self._others else "it was empty"
                missing = ", ".join(map(repr, sorted(self._missing)))
                warnings.warn(
                    f"env.info_keys has {missing}, which the info of {self._env_id} lacked at the "
                    f"end of {self._episodes} episodes; {had}",
                    stacklevel=2,
                )
                self._missing = set()

    def take_batch(self, infos: Mapping[str, Any], done: np.ndarray) -> None:
        """Take the infos of a vector environment, arrays (N, ...) by key, where `done` (N,).

        Gymnasium's have the rows that are valid under the key with an underscore before it.
        """
        keys = [key for key, x in infos.items() if str(key)[:1] != "_" and np.ndim(x)]
        rows = {key: infos.get(f"_{key}", np.ones_like(done)) for key in keys}
        for index in np.flatnonzero(done).tolist():
            self.take({key: infos[key][index] for key, valid in rows.items() if valid[index]}, index)

    def pop(self) -> Mapping[str, np.ndarray] | None:
        """The numbers taken since the last call, as :class:`Steps` has them."""
        numbers, self._numbers = self._numbers, {}
        return numbers or None

    def _number(self, value: Any, key: str, index: int) -> float:
        if np.size(value) == 1 and np.asarray(value).dtype.kind in "buif":
            return float(np.asarray(value).item())
        raise EnvError(
            f"info[{key!r}] of environment {index} of {self._env_id} is {shown(value)}, but env.info_keys needs numbers"
        )


def derive_seeds(seed: int, count: int) -> list[int]:
    """`count` different seeds in [0, 2**31), unrelated to those derived from any other seed.

    Seeding environment i with seed + i would give runs with neighbouring seeds the same environments. A larger `count`
    extends the list.
    """
    # A few more than needed, because numbers of 31 bits repeat at large N.
    candidates = np.random.SeedSequence(seed).generate_state(count + count // 8 + 8) >> 1
    return list(dict.fromkeys(candidates.tolist()))[:count]
