"""What the benchmarks share: facts about the machine, peak memory, lines of JSON.

Nothing here imports torch before it is needed: a child process first chooses its cores and threads.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "performance"
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine_facts() -> dict[str, Any]:
    """What a rate depends on besides the code: processor, memory, GPU, versions, and how busy the machine was."""
    import torch

    cpu = _cpu_info()
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_flags": [flag for flag in _FLAGS if flag in cpu.get("flags", "").split()],
        "cores": len(cores()),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def pin(chosen: list[int] | None) -> None:
    """Keep this process, and the threads that it starts, on these cores; None leaves it where it is."""
    if chosen is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append a record as one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def refuse_to_shrink(path: Path, lines: int) -> None:
    """Exit if a committed table has more lines than the one that the runs on this machine give."""
    if path.exists():
        read = gzip.open if path.suffix == ".gz" else open
        with read(path, "rt") as file:
            before = sum(1 for _ in file)
        if lines < before:
            raise SystemExit(f"{path} has {before:,} lines and the runs here give {lines:,}: it stays as it is")


def forget_peak_memory() -> None:
    """Give freed memory back and start a new peak (Linux; elsewhere the peak is that of the process's whole life)."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        pass


def peak_memory_mib() -> float:
    """Largest resident memory since :func:`forget_peak_memory`."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)


def _cpu_info() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
