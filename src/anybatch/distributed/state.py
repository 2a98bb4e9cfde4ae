"""Saved state of a run's parts, and its redistribution over another number of data-parallel workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

State: TypeAlias = dict[str, Any]
"""Tensors and plain values, nested in dictionaries and lists."""


@dataclass(frozen=True)
class Slot:
    """Position of a data-parallel worker among the others."""

    rank: int
    """Number of the worker."""
    envs: slice
    """Its environments among those of all workers."""


class Stateful(Protocol):
    """A part of a run that a checkpoint keeps.

    All workers hold its state with the same bits, except for the entries named by ``worker_keys``, which belong to one
    worker: its environments, its data, its random numbers. A checkpoint keeps the former once and the latter of every
    worker. When the number of workers changes, their entries are merged and split again.
    """

    worker_keys: frozenset[str]

    def state_dict(self) -> State:
        """State of this worker, all entries."""

    def load_state_dict(self, state: State) -> list[str] | None:
        """Restore :meth:`state_dict`; returns a sentence for each thing that could not be restored."""

    def merge(self, workers: Sequence[State]) -> State:
        """The worker entries of all workers as one state over all environments."""

    def split(self, merged: State, slot: Slot) -> State:
        """The entries of one worker, from :meth:`merge`."""


class Replicated:
    """State that all workers hold with the same bits: weights, optimisers, moments."""

    worker_keys: frozenset[str] = frozenset()

    def __init__(self, part: Any) -> None:
        """``part`` has ``state_dict`` and ``load_state_dict``."""
        self._part = part

    def state_dict(self) -> State:
        return cast(State, self._part.state_dict())

    def load_state_dict(self, state: State) -> None:
        self._part.load_state_dict(state)

    def merge(self, workers: Sequence[State]) -> State:
        return {}

    def split(self, merged: State, slot: Slot) -> State:
        return {}


class Generator(Protocol):
    """One or several random generators, with the state methods of torch.Generator."""

    def get_state(self) -> Tensor: ...

    def set_state(self, state: Tensor, /) -> Any: ...


class RandomState:
    """Random generators of one worker; a worker that the checkpoint does not know keeps its fresh ones."""

    worker_keys: frozenset[str] = frozenset({"generator"})

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def state_dict(self) -> State:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        self._generator.set_state(state["generator"])

    def merge(self, workers: Sequence[State]) -> State:
        return {"generators": [worker["generator"] for worker in workers]}

    def split(self, merged: State, slot: Slot) -> State:
        return {"generator": of_rank(merged["generators"], slot.rank, self._generator.get_state())}


class GlobalRandomState:
    """PyTorch's global generators on the CPU and, for a run on a GPU, on that GPU."""

    worker_keys: frozenset[str] = frozenset({"cpu", "cuda"})

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> State:
        state: State = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: State) -> list[str]:
        torch.set_rng_state(state["cpu"])
        on_gpu = self._device.type == "cuda"
        if on_gpu != ("cuda" in state):
            return [
                "the run continues on another kind of device (CPU or GPU): actions are drawn with different random "
                "numbers, and rounding differs"
            ]
        if on_gpu:
            torch.cuda.set_rng_state(state["cuda"], self._device)
        return []

    def merge(self, workers: Sequence[State]) -> State:
        return {"workers": list(workers)}

    def split(self, merged: State, slot: Slot) -> State:
        return cast(State, of_rank(merged["workers"], slot.rank, self.state_dict()))


def of_rank(values: Sequence[Any], rank: int, fresh: Any) -> Any:
    """The value of a worker that the checkpoint knows; ``fresh`` for a new one."""
    return values[rank] if rank < len(values) else fresh


def concatenate(trees: Sequence[Any]) -> Any:
    """Tensors (N, ...) of all workers as one, throughout nested dictionaries; other values are those of the first."""
    if isinstance(trees[0], dict):
        return {name: concatenate([tree[name] for tree in trees]) for name in trees[0]}
    return torch.cat(list(trees)) if isinstance(trees[0], Tensor) else trees[0]


def rows(tree: Any, envs: slice) -> Any:
    """A copy of some rows of every tensor (N, ...) in nested dictionaries and lists; other values stay."""
    return _map(lambda tensor: tensor[envs].clone(), tree)


def on_cpu(state: Any) -> Any:
    """The same state with its tensors in main memory."""
    return _map(Tensor.cpu, state)


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_map(function, value) for value in tree]
    return function(tree) if isinstance(tree, Tensor) else tree


def replicated_tensors(part: Stateful) -> list[Tensor]:
    """All tensors in the entries that every worker holds with the same bits, in order."""
    return _tensors([value for key, value in part.state_dict().items() if key not in part.worker_keys])


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for value in values for tensor in _tensors(value)]
