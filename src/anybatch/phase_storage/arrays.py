"""Arrays of samples in memory, or in a file that is read in chunks.

Files are read with plain reads instead of a memory map, because touched pages of a map count as memory of the process,
and random reads touch all of them.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from anybatch.system.atomic_files import naming


class RamArray:
    """A fixed number of samples (count, *shape) in memory; pages are taken as samples are written."""

    def __init__(self, count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._data = torch.empty((count, *shape), dtype=dtype)

    def write(self, start: int, samples: Tensor) -> None:
        """Write ``samples`` (B, *shape), from any device, to positions ``start`` to ``start + B - 1``."""
        self._data[start : start + len(samples)] = samples.detach().to(self._data)

    def read_range(self, start: int, stop: int) -> Tensor:
        """A copy of the samples from ``start`` up to, not including, ``stop``, on the CPU."""
        return self._data[start:stop].clone()

    def read_chunks(self, chunks: Tensor, length: int) -> Tensor:
        """A copy (K * length, *shape), on the CPU, of the chunks (K,); chunk i begins at sample i * length."""
        return self._data.view(-1, length, *self._data.shape[1:])[chunks].flatten(0, 1)

    def sync(self) -> None:
        """Flush written samples to the disk, if they are in a file."""

    def close(self) -> None:
        """Close the file, if there is one; it stays."""

    def abandon(self) -> None:
        """Close the file and remove it, unless it existed before."""


class DiskArray:
    """The same as :class:`RamArray` in a file of exactly the size needed, whose space is reserved on creation.

    An existing file keeps its content. An OSError says that it cannot be written, or that the disk is full.
    """

    def __init__(self, path: Path, count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self._sample_bytes = dtype.itemsize * math.prod(shape)
        size = count * self._sample_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._created = None if path.exists() else path  # the file of an interrupted run is not removed
        self._file = open(path, "w+b" if self._created else "r+b", buffering=0)  # noqa: SIM115
        try:
            self._file.truncate(size)
            if size and hasattr(os, "posix_fallocate"):  # otherwise the disk could fill up during a phase
                os.posix_fallocate(self._file.fileno(), 0, size)
        except BaseException:
            self.abandon()
            raise

    def write(self, start: int, samples: Tensor) -> None:
        content = samples.detach().to("cpu", self._dtype).contiguous().numpy()
        left = content.reshape(-1).view(np.uint8).data
        self._file.seek(start * self._sample_bytes)
        with naming(Path(self._file.name)):
            while left:
                left = left[self._file.write(left) :]

    def read_range(self, start: int, stop: int) -> Tensor:
        return self._read([start], stop - start)

    def read_chunks(self, chunks: Tensor, length: int) -> Tensor:
        return self._read([chunk * length for chunk in chunks.tolist()], length)

    def _read(self, starts: list[int], length: int) -> Tensor:
        result = torch.empty((len(starts) * length, *self._shape), dtype=self._dtype)
        bytes_of = result.numpy().reshape(-1).view(np.uint8).data
        size = length * self._sample_bytes
        for i, start in enumerate(starts):
            self._file.seek(start * self._sample_bytes)
            left = bytes_of[i * size : (i + 1) * size]
            while left:
                count = self._file.readinto(left)
                if not count:
                    raise EOFError(f"{self._file.name} is shorter than the data written to it")
                left = left[count:]
        return result

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        self.close()
        if self._created:
            self._created.unlink(missing_ok=True)


SegmentArray: TypeAlias = RamArray | DiskArray
