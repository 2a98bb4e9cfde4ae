"""Saving and restoring Gymnasium environments of this process, so that training resumes exactly.

Supports environments whose attributes are plain data: numbers, text, arrays, containers of these, and random
generators. Any other attribute that could hold state makes an environment impossible to save.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from anybatch.errors import EnvError

_ATOMS = (type(None), bool, int, float, str)
# Equal in a new environment, so neither saved nor restored.
_CONSTANTS = (
    gymnasium.Space,
    EnvSpec,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    np.ufunc,
)
_IGNORED_NAMES = frozenset({"metadata", "_metadata", "_saved_kwargs", "render_mode"})
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


class NotSavableError(Exception):
    """Raised for a value that is not plain data; the message names its type."""


def save(env: gymnasium.Env[Any, Any]) -> list[Any] | None:
    """The state of `env` and its wrappers as nested lists of plain data and tensors; None if it cannot be saved.

    A layer with methods `get_state()` and `set_state(state)` is saved with these.
    """
    encoder = _Encoder()  # one for all layers, to preserve shared objects
    try:
        return [[type(layer).__qualname__, encoder.encode(_state_of(layer))] for layer in _layers(env)]
    except NotSavableError:
        return None


def load(env: gymnasium.Env[Any, Any], state: list[Any]) -> None:
    """Restore a state from :func:`save` in an equal `env`; raises EnvError if its layers differ."""
    layers = list(_layers(env))
    names = [type(layer).__qualname__ for layer in layers]
    if names != [name for name, _ in state]:
        raise EnvError(f"The saved environment has the layers {[name for name, _ in state]}, and this one {names}.")
    decoder = _Decoder()
    for layer, (_, encoded) in zip(layers, state, strict=True):
        data = decoder.decode(encoded)
        vars(layer).update(data["attributes"])
        if "custom" in data:
            layer.set_state(data["custom"])  # type: ignore[attr-defined]


def states_of(state: dict[str, Any], num_envs: int) -> list[Any]:
    """The states of `num_envs` environments in ``{"envs": [...]}``; raises EnvError if the number differs."""
    states: list[Any] = state["envs"]
    if len(states) != num_envs:
        raise EnvError(
            f"The saved state is of {len(states)} environments, and there are {num_envs} now: env.num_envs must stay "
            "the same."
        )
    return states


def _layers(env: gymnasium.Env[Any, Any]) -> Iterator[gymnasium.Env[Any, Any]]:
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def _state_of(layer: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    if callable(getattr(layer, "get_state", None)) and callable(getattr(layer, "set_state", None)):
        # Such methods often omit Gymnasium's generator.
        rng = {name: vars(layer)[name] for name in ("_np_random", "_np_random_seed") if name in vars(layer)}
        return {"attributes": rng, "custom": layer.get_state()}  # type: ignore[attr-defined]
    attributes = {}
    for name, value in vars(layer).items():
        ignored = name in _IGNORED_NAMES or (name == "env" and isinstance(layer, gymnasium.Wrapper))
        is_drawing = type(value).__module__.split(".")[0] == "pygame"
        if not (ignored or is_drawing or isinstance(value, _CONSTANTS)):
            attributes[name] = value
    return {"attributes": attributes}


class _Encoder:
    """Encodes plain data: atoms stay, everything else becomes a list that begins with the name of its kind.

    Mutable values are numbered in order of appearance; a repeated one is encoded as a reference.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is valid while its object lives

    def encode(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if type(value) is tuple:
            return ["tuple", [self.encode(item) for item in value]]
        if isinstance(value, np.generic):
            return ["scalar", *_raw(np.asarray(value))]
        if type(value) is bytes:
            return ["bytes", torch.tensor(list(value), dtype=torch.uint8)]
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if type(value) is np.ndarray:
            return ["array", *_raw(value)]
        if type(value) is torch.Tensor:
            return ["tensor", value.detach().clone()]
        if type(value) in (list, deque):
            length = value.maxlen if isinstance(value, deque) else None
            return [type(value).__name__, [self.encode(item) for item in value], length]
        if type(value) is dict:
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in _GENERATORS:
            return ["generator", type(value.bit_generator).__name__, self.encode(value.bit_generator.state)]
        raise NotSavableError(f"{type(value).__module__}.{type(value).__qualname__}")


class _Decoder:
    """Reverses :class:`_Encoder`, numbering values in the same order."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def decode(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        kind, *rest = value
        if kind == "again":
            return self._values[rest[0]]
        if kind == "tuple":
            return tuple(self.decode(item) for item in rest[0])
        if kind == "scalar":
            return _array(*rest)[()]
        if kind == "bytes":
            return bytes(rest[0].tolist())
        if kind == "array":
            return self._keep(_array(*rest))
        if kind == "tensor":
            return self._keep(rest[0].clone())
        if kind in ("list", "deque"):
            items: Any = self._keep([] if kind == "list" else deque(maxlen=rest[1]))
            for item in rest[0]:
                items.append(self.decode(item))
            return items
        if kind == "dict":
            mapping = self._keep({})
            for key, item in rest[0]:
                # Keys first, in the order of encoding.
                decoded_key = self.decode(key)
                mapping[decoded_key] = self.decode(item)
            return mapping
        if kind == "generator" and rest[0] in _GENERATORS:
            bits = getattr(np.random, rest[0])()
            generator = self._keep(np.random.Generator(bits))
            bits.state = self.decode(rest[1])
            return generator
        raise EnvError(f"The saved environment holds a {kind!r}, which this version of anybatch does not support.")

    def _keep(self, value: Any) -> Any:
        self._values.append(value)
        return value


def _raw(array: np.ndarray) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names:
        raise NotSavableError(f"an array of {array.dtype}")
    return [array.dtype.str, list(array.shape), torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())]


def _array(dtype: str, shape: list[int], data: torch.Tensor) -> np.ndarray:
    return np.frombuffer(data.numpy().tobytes(), dtype).reshape(shape).copy()
