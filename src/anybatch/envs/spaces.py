"""Conversion between Gymnasium's spaces and the few kinds of array that anybatch trains on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from anybatch.config.masks import ActionMask
from anybatch.envs.base import Observation
from anybatch.envs.masks import MaskEntry
from anybatch.errors import EnvError

_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
_ACTIONS = "Discrete, MultiDiscrete, MultiBinary, and Box of floats or integers"


class UnfitError(Exception):
    """An array does not fit its space; `row` is the first wrong row of a batch, if the rows are to blame."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


@dataclass(frozen=True)
class _Leaf:
    """One array of an observation, or an action: its space in the environment, and its form in anybatch."""

    path: tuple[Any, ...]  # keys of Dict spaces and positions in Tuple spaces; empty outside of them
    native: gymnasium.Space[Any]
    space: gymnasium.Space[Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: Any = None  # first value of a Discrete space; in anybatch, all of them start at 0
    bounds: tuple[Any, Any] | None = None  # smallest and largest integers in the environment; None for floats
    unbounded: bool = False  # whether any value of the dtype is within the bounds, as in images

    @property
    def takes_any(self) -> bool:
        """Whether every array of the right shape and dtype fits, and stays as it is."""
        return type(self) is _Leaf and self.start is None and (self.bounds is None or self.unbounded)

    def convert(self, raw: Any, lead: tuple[int, ...], copy: bool) -> np.ndarray:
        """`raw` (*lead, *shape) in this leaf's dtype; raises UnfitError if it does not fit the space."""
        try:
            array = np.asarray(raw)
        except ValueError as error:  # lists of different lengths
            raise UnfitError(f"is not an array: {error}") from error
        if array.shape != (*lead, *self.shape):
            raise UnfitError(f"has shape {array.shape}, but its space has {(*lead, *self.shape)}")
        if array.dtype.kind not in ("iub" if self.dtype.kind in "iub" else "iubf"):
            raise UnfitError(f"has dtype {array.dtype}, but its space has {self.dtype}")
        if self.bounds is not None and not (self.unbounded and array.dtype == self.dtype):
            self._check_bounds(array, len(lead))
        if array.dtype == self.dtype:
            array = array.copy() if copy else array
        else:
            with np.errstate(over="ignore"):  # values beyond float32 become inf, which check_finite reports
                array = array.astype(self.dtype)
        return array if self.start is None else array - self.start

    def _check_bounds(self, array: np.ndarray, lead: int) -> None:
        assert self.bounds is not None
        low, high = self.bounds
        if array.ndim == 0 and low <= array.item() <= high:  # saves microseconds a step
            return
        outside = (array < low) | (array > high)
        if outside.any():
            index = tuple(int(i) for i in np.argwhere(outside)[0])
            least, greatest = (np.broadcast_to(bound, array.shape)[index] for bound in self.bounds)
            where = f" at {list(index[lead:])}" if self.shape else ""
            raise UnfitError(
                f"is {array[index]}{where}, but its space allows {least} to {greatest}", index[0] if lead else None
            )


class _MaskLeaf(_Leaf):
    """A mask of actions (n,), int8, however the environment shapes it."""

    def convert(self, raw: Any, lead: tuple[int, ...], copy: bool) -> np.ndarray:
        """`raw` as (*lead, n); of a single MultiDiscrete action it may be a tuple of arrays."""
        if isinstance(raw, tuple | list) and not lead:
            raw = np.concatenate([np.ravel(part) for part in raw])
        array = np.asarray(raw)
        if array.shape[: len(lead)] != lead or array.size != int(np.prod(lead)) * self.shape[0]:
            raise UnfitError(f"has shape {array.shape}, but must have {(*lead, *self.shape)}")
        if array.dtype.kind not in "biuf":
            raise UnfitError(f"has dtype {array.dtype}, but a mask of actions must have numbers")
        array = array.reshape(*lead, *self.shape)
        wrong = np.argwhere((array != 0) & (array != 1))
        if len(wrong):
            index = tuple(int(i) for i in wrong[0])
            row = index[0] if lead else None
            raise UnfitError(f"is {array[index]} at {list(index[len(lead) :])}, but a mask must have 1 or 0", row)
        return array.astype(np.int8)

    @classmethod
    def of(cls, space: gymnasium.Space[Any], entry: MaskEntry) -> _MaskLeaf:
        mask = ActionMask(entry.sizes)
        return cls((entry.key,), space, mask, np.dtype(np.int8), (sum(mask.sizes),))


def _dimensions(raw: Any) -> int:
    """Number of axes of an observation; raises UnfitError if it is no array."""
    try:
        array = np.asarray(raw)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of different lengths; tensors of a GPU
        raise UnfitError(f"is not an array: {error}") from error
    if array.dtype.kind == "O":
        raise UnfitError(f"is a {type(raw).__name__}, but must be an array")
    return array.ndim


def _paths(space: gymnasium.Space[Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The spaces inside of Dict and Tuple spaces, with the way to each."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield path, space
        return
    for key, entry in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
        yield from _paths(entry, (*path, key))


def _leaf(space: gymnasium.Space[Any], key: tuple[Any, ...] = ()) -> _Leaf | None:
    """The leaf for `space`, or None if its kind is not supported."""
    if isinstance(space, spaces.Box):
        if space.dtype.kind != "f":
            limits = np.iinfo(np.uint8 if space.dtype == np.bool_ else space.dtype)
            unbounded = bool((space.low == limits.min).all() and (space.high == limits.max).all())
            bounds = (space.low, space.high)
            return _Leaf(key, space, space, space.dtype, space.shape, bounds=bounds, unbounded=unbounded)
        converted = space
        if space.dtype != np.float32:
            with np.errstate(over="ignore"):
                low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            converted = spaces.Box(low, high, space.shape, np.float32)
        return _Leaf(key, space, converted, np.dtype(np.float32), space.shape)
    if isinstance(space, spaces.Discrete):
        first, size = int(space.start), int(space.n)
        interval = (first, first + size - 1)
        return _Leaf(key, space, spaces.Discrete(size), np.dtype(np.int64), (), first or None, interval)
    if isinstance(space, spaces.MultiDiscrete):
        begin = space.start.astype(np.int64) if np.any(space.start) else None
        bounds = (space.start, space.start + space.nvec - 1)
        return _Leaf(
            key, space, spaces.MultiDiscrete(space.nvec), np.dtype(np.int64), tuple(space.shape), begin, bounds
        )
    if isinstance(space, spaces.MultiBinary):
        return _Leaf(key, space, space, np.dtype(np.int8), tuple(space.shape), bounds=(0, 1))
    return None


class Observations:
    """Checks and converts the observations of one environment id; raises EnvError for a space that is not supported.

    Nested Dict and Tuple spaces become one flat Dict, whose keys join theirs by dots: ``arm.camera``, ``sensors.0``.
    `mask` is the entry that masks actions, converted to an :class:`anybatch.config.masks.ActionMask`.
    """

    def __init__(self, space: gymnasium.Space[Any], env_id: str, mask: MaskEntry | None = None) -> None:
        self._env_id = env_id
        self._mask = mask
        self._is_dict = isinstance(space, spaces.Dict | spaces.Tuple)
        self._leaves: dict[str, _Leaf] = {}  # by name, which is the path as text
        for path, entry in _paths(space):
            key = ".".join(map(str, path)) if self._is_dict else "None"
            leaf = _leaf(entry, path) if mask is None or path != (mask.key,) else _MaskLeaf.of(entry, mask)
            if leaf is None:
                where = f" has an entry '{key}' that" if self._is_dict else ""
                hint = "; wrap the environment so that it leaves this entry out or encodes it" if self._is_dict else ""
                raise EnvError(
                    f"The observation space of {env_id}{where} is a {type(entry).__name__}, "
                    f"but anybatch supports {_OBSERVATIONS}{hint}."
                )
            if 0 in leaf.shape:
                where = f" has an entry '{key}' of the" if self._is_dict else " has the"
                raise EnvError(f"The observation space of {env_id}{where} shape {leaf.shape}: leave out empty entries.")
            if key in self._leaves:
                raise EnvError(f"The observation space of {env_id} has two keys that read '{key}'; rename one of them.")
            self._leaves[key] = leaf
        self.space: gymnasium.Space[Any] = (
            spaces.Dict({name: leaf.space for name, leaf in self._leaves.items()})
            if self._is_dict
            else self._leaves["None"].space
        )
        single = None if self._is_dict else self._leaves["None"]
        self._as_is = (single.dtype, single.shape) if single is not None and single.takes_any else None

    def empty(self, count: int) -> Observation:
        """Uninitialised arrays for `count` observations."""
        return self._pack({name: np.empty((count, *leaf.shape), leaf.dtype) for name, leaf in self._leaves.items()})

    def put(self, into: Observation, index: int, raw: Any, env_index: int | None = None) -> None:
        """Write the single observation `raw` of environment `env_index` (default: `index`) to row `index` of `into`."""
        if self._as_is is not None and type(raw) is np.ndarray and (raw.dtype, raw.shape) == self._as_is:
            into[index] = raw  # type: ignore[index]  # saves a microsecond
            return
        for name, leaf in self._leaves.items():
            array = into[name] if isinstance(into, dict) else into
            try:
                array[index] = leaf.convert(self._entry(raw, leaf), (), copy=False)
            except UnfitError as error:
                raise self._error(error, name, index if env_index is None else env_index) from error

    def batch(self, raw: Any, count: int, copy: bool, env_index: np.ndarray | None = None) -> Observation:
        """Check and convert a batch that arrived as one array; with `copy` the result owns its memory.

        `env_index` maps rows to environments.
        """
        arrays = {}
        for name, leaf in self._leaves.items():
            try:
                arrays[name] = leaf.convert(self._entry(raw, leaf), (count,), copy)
            except UnfitError as error:
                row = error.row if error.row is None or env_index is None else int(env_index[error.row])
                raise self._error(error, name, row) from error
        return self._pack(arrays)

    def one_or_batch(self, raw: Any) -> tuple[Observation, bool]:
        """A single observation, or a batch of them, as a batch (B, ...) of its own memory; and whether it was one."""
        # a mask may be a tuple of arrays, and so does not show it, unless there is nothing else
        name, leaf = min(self._leaves.items(), key=lambda item: isinstance(item[1], _MaskLeaf))
        try:
            dimensions = _dimensions(self._entry(raw, leaf))
        except UnfitError as error:
            raise self._error(error, name, None) from error
        shape = leaf.native.shape or ()
        if dimensions < len(shape):
            given = np.shape(self._entry(raw, leaf))
            stacked = given == shape[1:] and len(shape) in (3, 4)  # of images
            hint = f"; stack the last {shape[0]}, oldest first (env.frame_stack)" if stacked else ""
            entry = f", entry '{name}'," if self._is_dict else ""
            raise EnvError(
                f"The observation of {self._env_id}{entry} has shape {given}, but its space has {shape}{hint}."
            )
        one = dimensions == len(shape)
        if one:
            batch = self.empty(1)
            self.put(batch, 0, raw)
        else:
            batch = self.batch(raw, len(self._entry(raw, leaf)) if dimensions else 1, copy=True)
        self.check_finite(batch)
        self.check_masks(batch)
        return batch, one

    def check_masks(self, observation: Observation) -> None:
        """Raise EnvError if a mask of observations to act on leaves nothing to choose."""
        if self._mask is None:
            return
        assert isinstance(observation, dict)
        starts = np.cumsum((0, *self._mask.sizes[:-1]))
        legal = np.logical_or.reduceat(observation[str(self._mask.key)], starts, axis=1)
        if not legal.all():
            row, part = (int(i) for i in np.argwhere(~legal)[0])
            of_part = f" in part {part} of the action" if len(starts) > 1 else ""
            raise EnvError(
                f"The action mask of environment {row} of {self._env_id} allows nothing{of_part}: at least one choice "
                "must be legal, unless the episode has ended."
            )

    def check_finite(self, observation: Observation, env_index: np.ndarray | None = None) -> None:
        """Raise EnvError if a row holds NaN or infinity; `env_index` maps rows to environments."""
        for name, leaf in self._leaves.items():
            array = observation[name] if isinstance(observation, dict) else observation
            if leaf.dtype.kind == "f" and not np.isfinite(array).all():
                index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
                row = index[0] if env_index is None else int(env_index[index[0]])
                where = f" at {list(index[1:])}" if leaf.shape else ""
                raise self._error(UnfitError(f"is not finite: it is {array[index]}{where}"), name, row)

    def _error(self, error: UnfitError, name: str, env_index: int | None) -> EnvError:
        who = "The batch of observations" if env_index is None else f"The observation of environment {env_index}"
        entry = f", entry '{name}'," if self._is_dict else ""
        return EnvError(f"{who} of {self._env_id}{entry} {error}.")

    def _entry(self, raw: Any, leaf: _Leaf) -> Any:
        if not self._is_dict:
            return raw
        try:
            for key in leaf.path:
                raw = raw[key]
            return raw
        except (KeyError, TypeError, IndexError) as error:
            raise UnfitError("is missing") from error

    def _pack(self, arrays: dict[str, np.ndarray]) -> Observation:
        return arrays if self._is_dict else arrays["None"]


class Actions:
    """Turns anybatch's actions into those of one environment id; raises EnvError for a space that is not supported."""

    def __init__(self, space: gymnasium.Space[Any], env_id: str) -> None:
        self.env_id = env_id
        leaf = _leaf(space)
        if leaf is None or (isinstance(space, spaces.Box) and space.dtype.kind not in "fiu"):
            description = " ".join(str(space).split())  # arrays print on several lines
            raise EnvError(f"The action space of {env_id} is {description}, but anybatch supports {_ACTIONS}.")
        if not np.prod(space.shape or (1,)):
            raise EnvError(f"The action space of {env_id} has the shape {space.shape}: there is no action to choose.")
        self.space = leaf.space
        self._leaf = leaf
        self._native_dtype = np.dtype(space.dtype)

    def native(self, action: np.ndarray, count: int) -> np.ndarray:
        """`action` (N, ...) in the environment's dtype and numbering."""
        if action.shape != (count, *self._leaf.shape):
            raise EnvError(f"{self.env_id} takes actions of shape {(count, *self._leaf.shape)}, not {action.shape}.")
        array = action if self._leaf.start is None else action + self._leaf.start
        array = array.astype(self._native_dtype, copy=False)
        box = self._leaf.native
        if isinstance(box, spaces.Box) and self._native_dtype != np.float32:
            array = np.clip(array, box.low, box.high)  # a float32 bound can be just outside the float64 one
        return array


def same_observations(space: gymnasium.Space[Any], other: gymnasium.Space[Any]) -> bool:
    """Whether observations of two spaces are alike to a network: bounds of floats may differ."""
    if isinstance(space, spaces.Dict) and isinstance(other, spaces.Dict):
        pairs = [(space[key], other[key]) for key in space.spaces if key in other.spaces]
        return len(pairs) == len(space.spaces) == len(other.spaces) and all(same_observations(x, y) for x, y in pairs)
    if isinstance(space, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return len(space) == len(other) and all(map(same_observations, space, other))
    if isinstance(space, spaces.Box) and isinstance(other, spaces.Box) and space.dtype.kind == "f":
        return space.shape == other.shape and space.dtype == other.dtype
    return bool(space == other)


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
    """The observation of environment 0 as a frame (H, W, 3) uint8; raises EnvError if it holds no image.

    Of a stack of frames it is the last one.
    """
    for array in [] if observation is None else _arrays(observation).values():
        if array.dtype != np.uint8 or array.ndim not in (4, 5):
            continue
        frame = array[0] if array.ndim == 4 else array[0, -1]
        if frame.shape[-1] not in (1, 3):
            frame = frame[-1][..., None] if frame.shape[0] != 3 else frame.transpose(1, 2, 0)
        if frame.shape[-1] in (1, 3):
            return np.array(np.broadcast_to(frame, (*frame.shape[:2], 3)))
    raise EnvError(f"{env_id} cannot be rendered: it renders no frames, and its observation is not an image.")


def _arrays(observation: Observation) -> dict[Any, np.ndarray]:
    return observation if isinstance(observation, dict) else {None: observation}
