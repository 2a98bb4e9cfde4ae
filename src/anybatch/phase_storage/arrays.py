"""Arrays of samples in memory, or in a file that is read piece by piece.

Files are read with plain reads, not through a memory map: pages of a map count as the process's own memory once they
were touched, and random reads touch all of them.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class SegmentArray(Protocol):
    """A fixed number of samples (count, *shape), written and read in runs of consecutive ones."""

    def write(self, start: int, samples: Tensor) -> None:
        """Put ``samples`` (B, *shape), from any device, at positions ``start`` to ``start + B - 1``."""

    def read_range(self, start: int, stop: int) -> Tensor:
        """A copy of the samples from ``start`` up to, not including, ``stop``, on the CPU."""

    def read_chunks(self, chunks: Tensor, length: int) -> Tensor:
        """A copy (K * length, *shape), on the CPU, of the chunks (K,); chunk i begins at sample i * length."""

    def sync(self) -> None:
        """Force what was written to the disk."""

    def close(self) -> None:
        """Give back what was opened."""

    def abandon(self) -> None:
        """The same, and remove what was made for it."""


class RamArray:
    """In memory, which grows as samples are written."""

    def __init__(self, count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """``count`` samples of ``shape``."""
        self._data = torch.empty((count, *shape), dtype=dtype)

    def write(self, start: int, samples: Tensor) -> None:
        """See :class:`SegmentArray`."""
        self._data[start : start + len(samples)] = samples.detach().to(self._data)

    def read_range(self, start: int, stop: int) -> Tensor:
        """See :class:`SegmentArray`."""
        return self._data[start:stop].clone()

    def read_chunks(self, chunks: Tensor, length: int) -> Tensor:
        """See :class:`SegmentArray`."""
        return self._data.view(-1, length, *self._data.shape[1:])[chunks].flatten(0, 1)

    def sync(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def abandon(self) -> None:
        """Nothing to do."""


class DiskArray:
    """In a file of exactly the size needed, whose space is reserved when it is made."""

    def __init__(self, path: Path, count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Open the file at ``path``, with the content that it has, or make it.

        Raises:
            OSError: it cannot be written, or the disk is full.
        """
        self._dtype, self._shape = dtype, shape
        self._sample_bytes = dtype.itemsize * math.prod(shape)
        size = count * self._sample_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._made = None if path.exists() else path  # what an interrupted run has left is not ours to remove
        self._file = open(path, "w+b" if self._made else "r+b", buffering=0)  # noqa: SIM115
        try:
            self._file.truncate(size)
            if size and hasattr(os, "posix_fallocate"):  # else the disk could fill up in the middle of a phase
                os.posix_fallocate(self._file.fileno(), 0, size)
        except BaseException:
            self.abandon()
            raise

    def write(self, start: int, samples: Tensor) -> None:
        """See :class:`SegmentArray`."""
        content = samples.detach().to("cpu", self._dtype).contiguous().numpy()
        left = content.reshape(-1).view(np.uint8).data
        self._file.seek(start * self._sample_bytes)
        while left:
            left = left[self._file.write(left) :]

    def read_range(self, start: int, stop: int) -> Tensor:
        """See :class:`SegmentArray`."""
        return self._read([start], stop - start)

    def read_chunks(self, chunks: Tensor, length: int) -> Tensor:
        """See :class:`SegmentArray`."""
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
                    raise EOFError(f"{self._file.name} is shorter than what was written to it")
                left = left[count:]
        return result

    def sync(self) -> None:
        """See :class:`SegmentArray`."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def abandon(self) -> None:
        """Close the file, and remove it unless it was there before."""
        self.close()
        if self._made:
            self._made.unlink(missing_ok=True)
