"""Spaces of a run's environment in its checkpoints, as plain data: a policy acts where the environment is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces

from anybatch.distributed.state import Slot, State
from anybatch.errors import CheckpointError

Spaces: TypeAlias = tuple[Space[Any], Space[Any]]
"""Observation space and action space of a single environment, as it has them."""


class SavedSpaces:
    """Part of a checkpoint; restoring it checks that the environment still has the same spaces."""

    worker_keys: frozenset[str] = frozenset()

    def __init__(self, native: Spaces, env_id: str) -> None:
        self._native = native
        self._env_id = env_id

    def state_dict(self) -> State:
        return {"observation": to_plain(self._native[0]), "action": to_plain(self._native[1])}

    def load_state_dict(self, state: State) -> None:
        """Raise CheckpointError if the spaces of the checkpoint are others."""
        if sentence := difference(restore_spaces(state), self._native, self._env_id):
            raise CheckpointError(sentence)

    def merge(self, workers: Sequence[State]) -> State:
        return {}

    def split(self, merged: State, slot: Slot) -> State:
        return {}


def restore_spaces(state: Mapping[str, Any]) -> Spaces:
    """The spaces that :meth:`SavedSpaces.state_dict` describes.

    Raises:
        CheckpointError: it describes none.
    """
    try:
        return from_plain(state["observation"]), from_plain(state["action"])
    except Exception as error:  # anything can be in a file
        raise CheckpointError("the checkpoint does not describe the spaces of its environment") from error


def difference(trained: Spaces, present: Spaces, env_id: str) -> str | None:
    """A sentence about spaces in which a trained policy cannot act as it was trained; None if there are none.

    The bounds of observations in floats may differ: networks do not depend on them.
    """
    for name, before, now in zip(("observation", "action"), trained, present, strict=True):
        bounds = name == "action"
        if _essence(before, bounds) != _essence(now, bounds):
            return f"the policy was trained with the {name} space {_words(before)}, and {env_id} has {_words(now)}"
    return None


def to_plain(space: Space[Any]) -> dict[str, Any]:
    """A space as numbers, texts, lists and dictionaries."""
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "entries": {key: to_plain(entry) for key, entry in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "entries": [to_plain(entry) for entry in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "kind": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.shape[0] if len(space.shape) == 1 else list(space.shape)}
    assert isinstance(space, spaces.Box)  # an environment with another space cannot be made
    bounds = {"low": _short(space.low), "high": _short(space.high)}
    return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}


def from_plain(data: Mapping[str, Any]) -> Space[Any]:
    """The space that :func:`to_plain` turned into ``data``."""
    kind = data["kind"]
    if kind == "Dict":
        return spaces.Dict([(key, from_plain(entry)) for key, entry in data["entries"].items()])
    if kind == "Tuple":
        return spaces.Tuple([from_plain(entry) for entry in data["entries"]])
    if kind == "Discrete":
        # the first versions of Gymnasium that are supported know int64 alone
        dtype = {} if data["dtype"] == "int64" else {"dtype": np.dtype(data["dtype"])}
        return spaces.Discrete(data["n"], start=data["start"], **dtype)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(data["nvec"]), np.dtype(data["dtype"]), start=np.array(data["start"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    if kind != "Box":
        raise ValueError(kind)
    shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
    low, high = (np.broadcast_to(np.array(data[name], dtype), shape) for name in ("low", "high"))
    return spaces.Box(low, high, shape, dtype.type)


def _short(bound: np.ndarray) -> Any:
    """A bound as nested lists, or as one number where it is the same everywhere."""
    values = bound.astype(np.float64) if bound.dtype.kind == "f" else bound
    same = values.size and (values == values.flat[0]).all()
    return values.flat[0].item() if same else values.tolist()


def _essence(space: Space[Any], bounds: bool) -> dict[Any, Any]:
    """The part of a space that a trained policy depends on; bounds of a Box of floats only if they are asked for."""
    if isinstance(space, spaces.Dict):
        return {key: _essence(entry, bounds) for key, entry in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {index: _essence(entry, bounds) for index, entry in enumerate(space.spaces)}
    data = to_plain(space)
    if not isinstance(space, spaces.Box):
        return {**data, "dtype": None}
    if np.dtype(data["dtype"]).kind != "f":
        return data
    if not bounds:
        return {"kind": "Box", "shape": data["shape"], "dtype": "float"}
    # policies act in float32, in which 0.4 is the same number whatever the dtype of the space
    with np.errstate(over="ignore"):  # bounds beyond float32 are no bounds
        rounded = {name: np.asarray(data[name], np.float32).tolist() for name in ("low", "high")}
    return {**data, **rounded, "dtype": "float"}


def _words(space: Space[Any]) -> str:
    text = " ".join(str(space).split())  # arrays print on several lines
    return text if len(text) <= 200 else f"{text[:200]}..."
