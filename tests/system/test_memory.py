"""What the C library does with freed memory, in a process of its own, since it lasts."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")

PROGRAM = """
import mmap, resource, sys
from pathlib import Path
import torch
from anybatch.system.memory import keep_freed_memory

SIZE = 64 << 20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def huge():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))  # KiB

def allocate():
    torch.ones(SIZE, dtype=torch.uint8)

if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
    control = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    control.madvise(mmap.MADV_HUGEPAGE)
    before = huge()
    for start in range(0, SIZE, 4096):
        control[start] = 1
    print(huge() - before)
before = huge() if sys.argv[1] == "keep" else 0
allocate()
print((huge() if sys.argv[1] == "keep" else 0) - before)
before = faults()
for _ in range(10):
    allocate()
print(faults() - before)
"""


def run(mode: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@glibc
def test_freed_memory_is_kept() -> None:
    *_, by_default = run("default")
    *_, kept = run("keep")
    if by_default < 10_000:
        pytest.skip("the kernel gives huge pages to everybody")
    assert kept < 1000  # by default ten times 16,384 pages


@glibc
def test_in_huge_pages() -> None:
    available, used, _ = run("keep")
    if available < 32 << 10:
        pytest.skip("the kernel gives no huge pages here")
    assert used >= 32 << 10  # KiB, of 64 MiB
