"""Between the spaces that Gymnasium knows and the few kinds of array that anybatch trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from anybatch.envs.base import Observation
from anybatch.errors import EnvError

_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and a flat Dict of these"
_ACTIONS = "Discrete, MultiDiscrete and MultiBinary of one dimension, and Box with a float dtype"


@dataclass(frozen=True)
class _Leaf:
    """One array of an observation, or an action: its space as it is outside, and what it becomes inside."""

    native: gymnasium.Space[Any]
    space: gymnasium.Space[Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: Any  # first value of a Discrete space; inside, all of them start at 0

    def inside(self, raw: Any, lead: tuple[int, ...], who: str, copy: bool) -> np.ndarray:
        """`raw` (*lead, *shape) in this leaf's dtype; `who` names the culprit in the EnvError if it does not fit."""
        array = np.asarray(raw)
        if array.shape != (*lead, *self.shape):
            raise EnvError(f"{who} has shape {array.shape}, where its space says {(*lead, *self.shape)}.")
        if self.dtype.kind in "iub" and array.dtype.kind not in "iub":
            raise EnvError(f"{who} has dtype {array.dtype}, where its space says {self.dtype}.")
        if array.dtype == self.dtype:
            array = array.copy() if copy else array
        else:
            with np.errstate(over="ignore"):  # beyond float32 becomes inf, which check_finite reports
                array = array.astype(self.dtype)
        return array if self.start is None else array - self.start


def _leaf(space: gymnasium.Space[Any]) -> _Leaf | None:
    """The leaf for `space`, or None if its kind is not supported."""
    if isinstance(space, spaces.Box):
        if space.dtype.kind != "f":
            return _Leaf(space, space, space.dtype, space.shape, None)
        inside = space
        if space.dtype != np.float32:
            with np.errstate(over="ignore"):
                low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            inside = spaces.Box(low, high, space.shape, np.float32)
        return _Leaf(space, inside, np.dtype(np.float32), space.shape, None)
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return _Leaf(space, spaces.Discrete(int(space.n)), np.dtype(np.int64), (), start or None)
    if isinstance(space, spaces.MultiDiscrete):
        begin = space.start if np.any(space.start) else None
        return _Leaf(space, spaces.MultiDiscrete(space.nvec), np.dtype(np.int64), space.shape, begin)
    if isinstance(space, spaces.MultiBinary):
        return _Leaf(space, space, np.dtype(np.int8), space.shape, None)
    return None


class Observations:
    """Checks and converts the observations of one environment id; raises EnvError for a space that is not supported."""

    def __init__(self, space: gymnasium.Space[Any], env_id: str) -> None:
        self.env_id = env_id
        self.leaves: dict[str | None, _Leaf] = {}
        entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {None: space}
        for key, entry in entries.items():
            leaf = _leaf(entry)
            if leaf is None:
                where = "" if key is None else f" has an entry '{key}' that"
                hint = "" if key is None else "; wrap the environment so that it leaves this entry out or encodes it"
                raise EnvError(
                    f"The observation space of {env_id}{where} is a {type(entry).__name__}, "
                    f"and anybatch supports {_OBSERVATIONS}{hint}."
                )
            self.leaves[key] = leaf
        self.is_dict = isinstance(space, spaces.Dict)
        self.space: gymnasium.Space[Any] = (
            spaces.Dict({str(k): leaf.space for k, leaf in self.leaves.items()})
            if self.is_dict
            else self.leaves[None].space
        )

    def empty(self, count: int) -> Observation:
        """Uninitialised arrays for `count` observations."""
        arrays = {k: np.empty((count, *leaf.shape), leaf.dtype) for k, leaf in self.leaves.items()}
        return self._pack(arrays)

    def put(self, into: Observation, index: int, raw: Any, env_index: int | None = None) -> None:
        """Write the single observation `raw` of environment `env_index` (default: `index`) to row `index` of `into`."""
        who = f"The observation of environment {index if env_index is None else env_index} of {self.env_id}"
        for key, leaf in self.leaves.items():
            value = leaf.inside(self._entry(raw, key, who), (), who if key is None else f"{who}, entry '{key}',", False)
            _arrays(into)[key][index] = value

    def batch(self, raw: Any, count: int, copy: bool) -> Observation:
        """A batch that arrived in one piece: checked, converted, and with `copy` owning its memory."""
        who = f"The batch of observations of {self.env_id}"
        arrays = {
            key: leaf.inside(
                self._entry(raw, key, who), (count,), who if key is None else f"{who}, entry '{key}',", copy
            )
            for key, leaf in self.leaves.items()
        }
        return self._pack(arrays)

    def check_finite(self, observation: Observation, index: np.ndarray | None = None) -> None:
        """Raise EnvError if a row holds NaN or infinity; `index` maps rows to environments."""
        for array in _arrays(observation).values():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])
                env_index = row if index is None else int(index[row])
                raise EnvError(f"The observation of environment {env_index} of {self.env_id} is not finite.")

    def _entry(self, raw: Any, key: str | None, who: str) -> Any:
        if key is None:
            return raw
        try:
            return raw[key]
        except (KeyError, TypeError, IndexError) as error:
            raise EnvError(f"{who} lacks the entry '{key}' of its space.") from error

    def _pack(self, arrays: dict[str | None, np.ndarray]) -> Observation:
        return {str(key): array for key, array in arrays.items()} if self.is_dict else arrays[None]


class Actions:
    """Turns anybatch's actions into those of one environment id; raises EnvError for a space that is not supported."""

    def __init__(self, space: gymnasium.Space[Any], env_id: str) -> None:
        self.env_id = env_id
        leaf = _leaf(space)
        flat = len(space.shape or ()) == 1 or not isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary))
        if leaf is None or not flat or (isinstance(space, spaces.Box) and space.dtype.kind != "f"):
            found = " ".join(str(space).split())  # arrays print on several lines
            raise EnvError(f"The action space of {env_id} is {found}, and anybatch supports {_ACTIONS}.")
        self.space = leaf.space
        self._leaf = leaf
        self._native_dtype = np.dtype(space.dtype)

    def native(self, action: np.ndarray, count: int) -> np.ndarray:
        """`action` (N, ...) in the environment's own dtype and numbering."""
        if action.shape != (count, *self._leaf.shape):
            raise EnvError(f"{self.env_id} takes actions of shape {(count, *self._leaf.shape)}, not {action.shape}.")
        array = action.astype(self._native_dtype, copy=False)
        if self._leaf.start is not None:
            array = array + self._leaf.start
        box = self._leaf.native
        if isinstance(box, spaces.Box) and self._native_dtype != np.float32:
            array = np.clip(array, box.low, box.high)  # a float32 bound can lie just outside the float64 one
        return array


def check_reward(reward: np.ndarray, env_id: str) -> None:
    """Raise EnvError if a reward (N,) is NaN or infinite."""
    if not np.isfinite(reward).all():
        index = int(np.flatnonzero(~np.isfinite(reward))[0])
        raise EnvError(f"The reward of environment {index} of {env_id} is {reward[index]}.")


def take(observation: Observation, index: np.ndarray) -> Observation:
    """A copy of the rows `index` (K,) of a batch."""
    if isinstance(observation, dict):
        return {key: array[index] for key, array in observation.items()}
    rows: np.ndarray = observation[index]
    return rows


def write(into: Observation, index: np.ndarray, rows: Observation) -> None:
    """Overwrite the rows `index` (K,) of a batch."""
    source = _arrays(rows)
    for key, array in _arrays(into).items():
        array[index] = source[key]


def picture(observation: Observation | None, env_id: str) -> np.ndarray:
    """The observation of environment 0 as a frame (H, W, 3) uint8; raises EnvError if it holds no image."""
    for array in [] if observation is None else _arrays(observation).values():
        if array.dtype != np.uint8 or array.ndim != 4:
            continue
        frame = array[0]
        if frame.shape[-1] not in (1, 3) and frame.shape[0] <= 4:
            frame = frame[-1][..., None] if frame.shape[0] != 3 else frame.transpose(1, 2, 0)
        if frame.shape[-1] in (1, 3):
            return np.array(np.broadcast_to(frame, (*frame.shape[:2], 3)))
    raise EnvError(f"{env_id} cannot be rendered: it offers no frames, and its observation is not an image.")


def _arrays(observation: Observation) -> dict[Any, np.ndarray]:
    return observation if isinstance(observation, dict) else {None: observation}
