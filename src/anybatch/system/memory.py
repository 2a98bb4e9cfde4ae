"""Free memory of this machine, and the C library's treatment of freed memory."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_MADV_HUGEPAGE = 14
_HUGE = 3 << 29  # bytes: more than the activations of a minibatch, less than glibc would return at once


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks instead of returning them to the kernel, which would zero each page again.

    Large activations are allocated and freed in every gradient step; by default each is a new mapping whose pages
    fault in one by one. The kept memory uses huge pages if the kernel has any, which need fewer page table entries.
    Call it when training starts, never on import.

    Returns:
        Whether it took effect; False where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
        kept = all(libc.mallopt(name, value) == 1 for name, value in settings)
    except (OSError, AttributeError):
        return False
    if kept:
        _prefer_huge_pages()
    return kept


@functools.cache
def _prefer_huge_pages() -> None:
    """Ask once per process for huge pages in the next part of the heap, before it is touched."""
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = libc.malloc(_HUGE)  # reserves addresses only; writing takes memory
    if address:
        page = os.sysconf("SC_PAGE_SIZE")
        start = -(-address // page) * page
        libc.madvise(start, (address + _HUGE - start) // page * page, _MADV_HUGEPAGE)
        libc.free(address)


def free_memory() -> int:
    """Bytes of main memory that this process can still use without swapping; all memory if not on Linux."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
    return min(total, _available_on_linux(), _left_in_container())


def _available_on_linux() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize


def _left_in_container() -> int:
    """Bytes left under a container's limit (cgroup version 2); the file cache counts as free."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        words = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = next(int(value) for name, value in words if name == "inactive_file")
        return max(0, limit - used + cache)
    except (OSError, ValueError, StopIteration):  # no such limit: the file is missing or says "max"
        return sys.maxsize
