"""Saving and restoring Gymnasium environments of this process, so that training resumes exactly.

Supports environments whose attributes are plain data: numbers, text, arrays, containers of these, and random
generators, those of spaces included. Any other attribute that could hold state makes an environment impossible to save,
and so do arrays that are views of each other. Objects that several environments share become separate ones.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from anybatch.envs.contract import user_code
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
_DRAWING = frozenset({"Surface", "Clock", "Font", "SysFont", "Window", "Renderer", "Texture", "Sound"})
"""Types of pygame that show the state and do not hold it."""
_MAPPINGS: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_AS_THEY_ARE = (complex, torch.Size, torch.device, torch.dtype)
"""Immutable types that a checkpoint can hold."""
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


class NotSavableError(Exception):
    """Raised for a value that is not plain data; the message names its type."""


class OtherStateError(EnvError):
    """Raised for a saved state of another kind of environments, such as processes instead of one: start anew."""


def save(env: gymnasium.Env[Any, Any]) -> list[Any] | None:
    """The state of `env` and its wrappers as nested lists of plain data and tensors; None if it cannot be saved.

    A layer with methods `get_state()` and `set_state(state)` is saved with these.
    """
    encoder = _Encoder()  # one for all layers, to preserve shared objects
    state, own = [], []
    try:
        for layer in _layers(env):
            parts, first = _state_of(layer), len(encoder.kept)
            state.append([type(layer).__qualname__, encoder.encode(parts)])
            own += [] if "custom" in parts else encoder.kept[first:]
        _check_views(own)
        return state
    except NotSavableError:
        return None


def load(env: gymnasium.Env[Any, Any], state: list[Any]) -> None:
    """Restore a state from :func:`save` in an equal `env`; raises EnvError if its layers differ.

    Raises UserCodeError if its `set_state()` fails.
    """
    layers = list(_layers(env))
    names = [type(layer).__qualname__ for layer in layers]
    if names != [name for name, _ in state]:
        raise EnvError(f"The saved environment has the layers {[name for name, _ in state]}, but this one has {names}.")
    decoder = _Decoder()
    for layer, (_, encoded) in zip(layers, state, strict=True):
        data = decoder.decode(encoded)
        vars(layer).update(data["attributes"])
        for name, generators in data.get("spaces", {}).items():
            parts = _parts(vars(layer).get(name))
            if len(parts) == len(generators):  # else it is made anew in each episode
                for space, generator in zip(parts, generators, strict=True):
                    space._np_random = generator
        if "custom" in data:
            with user_code(f"set_state of {type(layer).__name__}"):
                layer.set_state(data["custom"])  # type: ignore[attr-defined]


def custom_state(env: Any, env_id: str) -> dict[str, Any] | None:
    """State of an environment of many copies, from its method `get_state()`; None if it has none.

    Also None, with a warning, if it is more than plain data: a checkpoint with other objects could not be read.
    """
    get_state = getattr(env, "get_state", None)
    if not callable(get_state) or not hasattr(env, "set_state"):
        return None
    with user_code(f"get_state of {env_id}"):
        state = get_state()
    try:
        return {"encoded": _Encoder().encode(state)}
    except NotSavableError as error:
        warnings.warn(f"get_state of {env_id} is not saved, because it contains {error}", stacklevel=2)
        return None


def restore_custom_state(env: Any, state: dict[str, Any], env_id: str) -> None:
    """Pass a state of :func:`custom_state` to the method `set_state(state)`.

    Raises OtherStateError if it is a state of another kind, and EnvError if there is no such method.
    """
    if not {"encoded", "env"} & state.keys():
        raise OtherStateError(f"The saved state is that of single environments, which {env_id} does not restore.")
    if not hasattr(env, "set_state"):
        raise EnvError(f"The state of {env_id} cannot be restored: it has no set_state().")
    with user_code(f"set_state of {env_id}"):
        # older checkpoints have it as it was
        env.set_state(_Decoder().decode(state["encoded"]) if "encoded" in state else state["env"])


def states_of(state: dict[str, Any], num_envs: int) -> list[Any]:
    """The states of `num_envs` environments in ``{"envs": [...]}``.

    Raises EnvError if the number differs, and OtherStateError if it is a state of another kind.
    """
    if "envs" not in state:
        raise OtherStateError("The saved state is that of a vector environment, not of single ones.")
    states: list[Any] = state["envs"]
    if len(states) != num_envs:
        raise EnvError(f"The saved state is of {len(states)} environments, but this run has {num_envs}.")
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
    attributes, spaces = {}, {}
    for name, value in vars(layer).items():
        ignored = name in _IGNORED_NAMES or (name == "env" and isinstance(layer, gymnasium.Wrapper))
        is_drawing = type(value).__module__.split(".")[0] == "pygame" and type(value).__name__ in _DRAWING
        if not (ignored or is_drawing or isinstance(value, _CONSTANTS)):
            attributes[name] = value
        if isinstance(value, gymnasium.Space) and any(part._np_random for part in _parts(value)):
            spaces[name] = [part._np_random for part in _parts(value)]  # it has been sampled from
    return {"attributes": attributes, "spaces": spaces}


def _parts(space: Any) -> list[gymnasium.Space[Any]]:
    """A space and those inside of it, each of which may have a random generator; none of anything else."""
    if not isinstance(space, gymnasium.Space):
        return []
    inner = getattr(space, "spaces", ())
    return [space, *(part for one in (inner.values() if isinstance(inner, dict) else inner) for part in _parts(one))]


class _Encoder:
    """Encodes plain data: atoms stay, everything else becomes a list that begins with the name of its kind.

    Mutable values are numbered in order of appearance; a repeated one is encoded as a reference.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # what is numbered: an id is valid while its object lives

    def encode(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if type(value) is tuple:
            return ["tuple", [self.encode(item) for item in value]]
        if isinstance(value, np.generic):
            return ["scalar", *_raw(np.asarray(value))]
        if type(value) is bytes:
            return ["bytes", _bytes(value)]
        if type(value) is frozenset:
            return ["frozenset", [self.encode(item) for item in value]]
        if type(value) in _AS_THEY_ARE:
            return ["as it is", value]
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        self.kept.append(value)
        if type(value) is np.ndarray:
            return ["array", *_raw(value)]
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return ["tensor", value.detach().clone()]
        if type(value) in (list, deque):
            length = value.maxlen if isinstance(value, deque) else None
            return [type(value).__name__, [self.encode(item) for item in value], length]
        if type(value) is set:
            return ["set", [self.encode(item) for item in value]]
        if type(value) is bytearray:
            return ["bytearray", _bytes(value)]
        if type(value) in _MAPPINGS.values():
            return [type(value).__name__, [[self.encode(key), self.encode(item)] for key, item in value.items()]]
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
            return rest[0].numpy().tobytes()
        if kind == "frozenset":
            return frozenset(self.decode(item) for item in rest[0])
        if kind == "as it is":
            return rest[0]
        if kind == "array":
            return self._keep(_array(*rest))
        if kind == "tensor":
            return self._keep(rest[0].clone())
        if kind in ("list", "deque"):
            items: Any = self._keep([] if kind == "list" else deque(maxlen=rest[1]))
            for item in rest[0]:
                items.append(self.decode(item))
            return items
        if kind == "set":
            members = self._keep(set())
            members.update(self.decode(item) for item in rest[0])
            return members
        if kind == "bytearray":
            return self._keep(bytearray(rest[0].numpy().tobytes()))
        if kind in _MAPPINGS:
            mapping = self._keep(_MAPPINGS[kind]())
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


def _check_views(values: list[Any]) -> None:
    """Raise NotSavableError if two arrays share memory that can change, since decoded ones would be separate."""
    arrays: list[np.ndarray | torch.Tensor] = [x for x in values if type(x) is np.ndarray and x.flags.writeable]
    arrays += [x for x in values if type(x) is torch.Tensor and x.layout == torch.strided]
    placed = sorted(((*_span(array), i, array) for i, array in enumerate(arrays)), key=lambda x: x[:3])
    open_ones: list[tuple[int, Any]] = []
    for start, end, _, value in placed:
        open_ones = [(other_end, other) for other_end, other in open_ones if other_end > start]
        if start < end and any(_share(value, other) for _, other in open_ones):
            raise NotSavableError("arrays that are views of each other")
        open_ones.append((end, value))


def _share(value: Any, other: Any) -> bool:
    """Whether arrays whose memory overlaps, seen as spans, have bytes in common; yes if that takes long to tell."""
    if not (isinstance(value, np.ndarray) and isinstance(other, np.ndarray)):
        return True
    try:
        return bool(np.shares_memory(value, other, max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _span(value: np.ndarray | torch.Tensor) -> tuple[int, int]:
    """First address of an array's memory, and the one behind the last."""
    if isinstance(value, torch.Tensor):
        pointer, size = value.data_ptr(), value.element_size()
        strides: Iterator[int] = (stride * size for stride in value.stride())
    else:
        pointer, size, strides = value.__array_interface__["data"][0], value.itemsize, iter(value.strides)
    if 0 in value.shape:
        return pointer, pointer
    reach = [(length - 1) * stride for length, stride in zip(value.shape, strides, strict=True)]
    return pointer + sum(x for x in reach if x < 0), pointer + sum(x for x in reach if x > 0) + size


def _bytes(value: bytes | bytearray) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(value, np.uint8).copy())


def _raw(array: np.ndarray) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names:
        raise NotSavableError(f"an array of {array.dtype}")
    return [array.dtype.str, list(array.shape), torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())]


def _array(dtype: str, shape: list[int], data: torch.Tensor) -> np.ndarray:
    return np.frombuffer(data.numpy().tobytes(), dtype).reshape(shape).copy()
