"""Contents and size of a phase's data, and the choice between memory and disk."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch

from anybatch.errors import ConfigError
from anybatch.observations import Observation

IN_CHECKPOINT = 256_000_000
"""Bytes up to which a phase in memory is part of the checkpoints, and which ``auto`` always keeps in memory."""

_FRACTION_OF_FREE = 0.8  # the rest is for training, checkpoints and logs
StorageKind = Literal["ram", "disk"]
"""Storage of a phase's data."""


@dataclass(frozen=True)
class SegmentLayout:
    """Contents of a phase's data for this worker's environments."""

    segments: int
    """Segments of a phase, N_pi."""
    num_envs: int
    """Environments N of this worker."""
    steps: int
    """Timesteps per rollout T."""
    arrays: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Type and shape of one sample's entry, by name."""
    keys: tuple[str, ...] | None
    """Keys of a dictionary observation, in order."""

    def entries(self, observation: Observation) -> dict[str, torch.Tensor]:
        """The tensors of observations by the name of their array; the keys of a dictionary may be in any order."""
        tensors = [observation[key] for key in self.keys or ()] if isinstance(observation, dict) else [observation]
        return {f"observation{i}": tensor for i, tensor in enumerate(tensors)}

    def of_segment(self) -> dict[str, Any]:
        """The layout of one segment as plain values, for a checkpoint."""
        arrays = {name: [str(dtype), list(shape)] for name, (dtype, shape) in self.arrays.items()}
        keys = None if self.keys is None else list(self.keys)
        return {"num_envs": self.num_envs, "steps": self.steps, "arrays": arrays, "keys": keys}

    @property
    def segment_samples(self) -> int:
        """Samples of one segment, N*T."""
        return self.num_envs * self.steps

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.arrays.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of a whole phase."""
        return self.segments * self.segment_samples * self.sample_bytes


def layout_of(space: gym.Space[Any], num_params: int, *, segments: int, num_envs: int, steps: int) -> SegmentLayout:
    """Contents of a phase's data for the ``space`` of a single environment, a flat dictionary of spaces or one space.

    ``num_params`` are the raw distribution parameters P of the policy; the others are as in :class:`SegmentLayout`.
    """
    keys = tuple(space.spaces) if isinstance(space, gym.spaces.Dict) else None
    entries = [space] if keys is None else [space[key] for key in keys]  # type: ignore[index]
    arrays: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for i, entry in enumerate(entries):  # by position, because a key may hold characters that a file name cannot
        dtype = torch.from_numpy(np.empty(0, entry.dtype)).dtype
        arrays[f"observation{i}"] = dtype, tuple(entry.shape or ())
    arrays |= {"value_target": (torch.float32, ()), "old_params": (torch.float32, (num_params,))}
    return SegmentLayout(segments, num_envs, steps, arrays, keys)


def choose_storage(requested: str, need: int, *, free_ram: int, free_disk: int, reserved: int = 0) -> StorageKind:
    """Decide where a phase is kept.

    ``auto`` takes memory up to :data:`IN_CHECKPOINT` bytes. Above, it takes the disk if there is room, because the run
    can then be resumed exactly, and free memory caches the files anyway; otherwise memory.

    ``need`` are the bytes of a phase; free bytes of the disk include those of existing segments, ``reserved``.

    Raises:
        ConfigError: it does not fit.
    """
    reserved = min(need, reserved)
    on_disk = need - reserved <= _FRACTION_OF_FREE * (free_disk - reserved)
    fits = {"ram": need <= _FRACTION_OF_FREE * free_ram, "disk": on_disk}
    order: tuple[StorageKind, ...] = ("ram", "disk") if need <= IN_CHECKPOINT else ("disk", "ram")
    for kind in order:
        if fits[kind] and requested in (kind, "auto"):
            return kind
    other = next((kind for kind in order if fits[kind]), None)
    advice = (
        f"set aux.storage {other}"
        if other
        else "free some space, choose another disk with --out, or reduce env.num_envs"
    )
    raise ConfigError(
        f"aux.storage is {requested}, but an auxiliary phase stores {gigabytes(need)}, and of {gigabytes(free_ram)} "
        f"free memory and {gigabytes(free_disk)} free disk it may take {_FRACTION_OF_FREE:.0%}; {advice}"
    )


def gigabytes(count: float) -> str:
    """Format a number of bytes: 25.8 GB, 310.0 MB, 4.5 kB."""
    size, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB")) if count >= s), (1e3, "kB"))
    return f"{count / size:.1f} {unit}"


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of ``folder``, which need not exist yet; existing segments count as free."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free + stored_bytes(folder)


def stored_bytes(folder: Path) -> int:
    """Bytes of the segments in ``folder``, which need not exist."""
    return sum(path.stat().st_size for path in folder.glob("*.segments")) if folder.is_dir() else 0
