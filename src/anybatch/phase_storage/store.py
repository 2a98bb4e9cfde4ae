"""The segments of a policy phase, kept in memory or in files until the auxiliary phase has trained on them.

A segment is the data of one iteration: N trajectories of T observations with their value targets. A phase has N_pi
segments, at the paper's scale 2.1 million observations or 25.8 GB. Samples are ordered by segment, environment and
time, so that a trajectory or a chunk of one is a contiguous read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybatch.distributed.collectives import is_main, local_world_size, rank, world_size
from anybatch.distributed.state import Slot, State
from anybatch.errors import ConfigError
from anybatch.minibatches import FlatRecord
from anybatch.observations import Observation
from anybatch.phase_storage.arrays import DiskArray, RamArray, SegmentArray
from anybatch.phase_storage.layout import (
    IN_CHECKPOINT,
    SegmentLayout,
    choose_storage,
    free_disk,
    gigabytes,
    stored_bytes,
)
from anybatch.system.memory import free_memory


@dataclass(frozen=True)
class AuxiliaryMinibatch(FlatRecord):
    """B samples of a phase."""

    observation: Observation
    """(B, ...), or such a tensor for every key."""
    value_target: Tensor
    """(B,) targets of the policy phase."""
    old_params: Tensor
    """(B, P) raw distribution parameters of the policy at the start of the auxiliary phase."""

    def to(self, device: torch.device) -> AuxiliaryMinibatch:
        """Copy the samples to a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> AuxiliaryMinibatch:
        """Copy the samples to page-locked memory, from which a GPU copies asynchronously."""
        return self.map(torch.Tensor.pin_memory)


class SegmentStore:
    """Keeps the segments of one phase of one worker, in memory or in files of a folder."""

    def __init__(self, layout: SegmentLayout, requested: str, folder: Path | None) -> None:
        """Choose memory or disk; nothing is allocated yet.

        Args:
            layout: contents and size.
            requested: ram, disk or auto; a ConfigError says that the segments do not fit.
            folder: of the files; None allows memory only.
        """
        self.layout = layout
        self.folder = folder
        self.need = layout.total_bytes * local_world_size()
        disk, reserved = (0, 0) if folder is None else (free_disk(folder), stored_bytes(folder))
        self.kind = choose_storage(requested, self.need, free_ram=free_memory(), free_disk=disk, reserved=reserved)
        self.count = 0
        """Segments kept."""
        self._first = 0  # number of the phase's first segment, counted from the start of the run
        self._discarded = False
        self._other_files = False  # the files belong to a phase of another layout

    @property
    def full(self) -> bool:
        """Whether the phase is complete."""
        return self.count == self.layout.segments

    @property
    def samples(self) -> int:
        """Samples kept."""
        return self.count * self.layout.segment_samples

    def describe(self) -> str:
        """Describe the location and size of the segments to the user."""
        if self.kind == "disk":
            return f"{gigabytes(self.need)} of observations: on disk in {self.folder}"
        lost = ", so a resumed run has to collect them again (aux.storage disk avoids this)"
        return f"{gigabytes(self.need)} of observations: in memory{'' if self._in_checkpoint else lost}"

    def open(self) -> None:
        """Allocate the memory or the files; a ConfigError says that the disk is full or cannot be written.

        Files of another layout are resized, so a resumed run calls this after :meth:`load_state_dict`.
        """
        _ = self._arrays

    def append(self, observation: Observation, value_target: Tensor) -> None:
        """Add a segment: observations (N, T, ...) and value targets (N, T)."""
        if self.full:
            raise RuntimeError("the phase is complete; call clear() before the next segment")
        start = self.samples
        self._number.write(self.count, torch.zeros(1, dtype=torch.int64))  # until the segment is complete
        for name, tensor in {**self.layout.entries(observation), "value_target": value_target}.items():
            self._arrays[name].write(start, tensor.flatten(0, 1))
        self._number.write(self.count, torch.tensor([self._first + self.count + 1]))
        self.count += 1
        self._discarded = False

    def observation(self, samples: slice) -> Observation:
        """The observations (B, ...) of consecutive samples, on the CPU."""
        return self._pack(lambda name: self._arrays[name].read_range(samples.start, samples.stop))

    def write_old_params(self, start: int, params: Tensor) -> None:
        """Write the old policy's parameters (B, P) for the samples from ``start`` on."""
        self._arrays["old_params"].write(start, params)

    def minibatch(self, chunks: Tensor, length: int) -> AuxiliaryMinibatch:
        """Read chunks (K,) of trajectories as one minibatch, on the CPU.

        Chunk i is the samples i*length to (i+1)*length - 1; ``length`` divides T.
        """
        read = {name: array.read_chunks(chunks, length) for name, array in self._arrays.items()}
        return AuxiliaryMinibatch(self._pack(read.__getitem__), read["value_target"], read["old_params"])

    def clear(self) -> None:
        """Forget all segments; their space is reused."""
        self._first += self.count
        self.count = 0

    def discard(self) -> None:
        """Remove the files at the end of a run."""
        if self.kind == "disk":
            self._discarded = self._discarded or self.count > 0
            self.clear()
            self.close()
        _remove_files(self.folder)  # also files from before a run changed to memory

    def close(self) -> None:
        """Close the files and keep them for a resumed run."""
        for name in ("_arrays", "_number"):
            opened = self.__dict__.pop(name, {})
            for array in opened.values() if isinstance(opened, dict) else [opened]:
                array.close()

    def state_dict(self, *, old_params: bool) -> dict[str, Any]:
        """The segments, or the numbers of those in the files that belong to the checkpoint.

        ``old_params``: whether the old policy's parameters are needed as well. Files are forced to the disk first.
        """
        state: dict[str, Any] = {"count": self.count, "first": self._first, "discarded": self._discarded}
        state["layout"] = self.layout.of_segment()
        if self.kind == "disk" and self.count:
            for array in (*self._arrays.values(), self._number):
                array.sync()
        elif self.kind == "ram" and self._in_checkpoint and self.count:
            state["arrays"] = {
                name: array.read_range(0, self.samples)
                for name, array in self._arrays.items()
                if old_params or name != "old_params"
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what :meth:`state_dict` gave; False, and nothing kept, if the segments are not there any more."""
        self._first, self.count, self._discarded = state["first"], state["count"], state["discarded"]
        layout = state.get("layout")  # none in older checkpoints, and after a change of the number of workers
        self._other_files = state["discarded"] if layout is None else layout != self.layout.of_segment()
        if not self.count:
            return not self._discarded
        arrays = state.get("arrays")
        fits = not self._other_files and self.count <= self.layout.segments
        if fits and arrays is not None:
            fits = all(len(tensor) == self.samples for tensor in arrays.values())
        if not fits or (arrays is None and not self._files_are_intact()):
            self.clear()
            return False
        for name, tensor in (arrays or {}).items():
            self._arrays[name].write(0, tensor)
        if arrays is not None:
            self._number.write(0, self._numbers())
        return True

    def merge(self, workers: Sequence[State]) -> State:
        """The segments (segment, environment, time) of all workers, if the checkpoint has them."""
        first = workers[0]
        count = first["count"]
        if not count:
            return first
        if not all("arrays" in worker for worker in workers):  # in files of the former workers
            return {"count": 0, "first": first["first"] + count, "discarded": True}

        def join(name: str) -> Tensor:
            arrays = [worker["arrays"][name] for worker in workers]
            return torch.cat([x.view(count, -1, self.layout.steps, *x.shape[1:]) for x in arrays], dim=1)

        return {**first, "arrays": {name: join(name) for name in first["arrays"]}}

    def split(self, merged: State, slot: Slot) -> State:
        """State of one worker, from :meth:`merge`."""
        if "arrays" not in merged:
            return merged
        arrays = {name: x[:, slot.envs] for name, x in merged["arrays"].items()}
        if "layout" in merged:
            envs = next(iter(arrays.values())).shape[1]
            merged = {**merged, "layout": {**merged["layout"], "num_envs": envs}}
        return {**merged, "arrays": {name: x.flatten(0, 2) for name, x in arrays.items()}}

    @property
    def _in_checkpoint(self) -> bool:
        # it has the segments of all workers
        return self.layout.total_bytes * world_size() <= IN_CHECKPOINT

    def _files_are_intact(self) -> bool:
        if self.kind != "disk":
            return False
        return torch.equal(self._number.read_range(0, self.count), self._numbers())

    def _numbers(self) -> Tensor:
        """The numbers of the segments kept."""
        return torch.arange(self._first, self._first + self.count) + 1

    def _pack(self, read: Callable[[str], Tensor]) -> Observation:
        keys = self.layout.keys
        if keys is None:
            return read("observation0")
        return {key: read(f"observation{i}") for i, key in enumerate(keys)}

    @cached_property
    def _arrays(self) -> dict[str, SegmentArray]:
        count = self.layout.segments * self.layout.segment_samples
        number, arrays = self._number, dict[str, SegmentArray]()  # the number first: it invalidates the old content
        try:
            for name, entry in self.layout.arrays.items():
                arrays[name] = self._array(name, count, *entry)
        except ConfigError:  # there was disk space for some of them
            for array in (number, *arrays.values()):
                array.abandon()
            del self._number
            raise
        return arrays

    @cached_property
    def _number(self) -> SegmentArray:
        """Number, from 1, of the segment in each position, or 0; written after the segment's data."""
        number = self._array("number", self.layout.segments, torch.int64, ())
        if self._other_files:  # which get another size: an older checkpoint must not take them for its own
            number.write(0, torch.zeros(self.layout.segments, dtype=torch.int64))
        return number

    def _array(self, name: str, count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> SegmentArray:
        if self.kind == "ram" or self.folder is None:
            return RamArray(count, dtype, shape)
        try:
            return DiskArray(self.folder / f"worker{rank()}-{name}.segments", count, dtype, shape)
        except OSError as error:
            raise ConfigError(
                f"aux.storage is disk, but {gigabytes(self.need)} cannot be reserved in {str(self.folder)!r}: "
                f"{error.strerror or error}; free some space, set aux.storage ram, or choose another disk with --out"
            ) from error


def _remove_files(folder: Path | None) -> None:
    if folder is not None and folder.is_dir():
        for path in folder.glob("worker*.segments"):
            number = int(path.name.removeprefix("worker").split("-")[0])
            if number == rank() or (is_main() and number >= world_size()):  # an earlier start may have had more workers
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another worker's files remain
            folder.rmdir()
