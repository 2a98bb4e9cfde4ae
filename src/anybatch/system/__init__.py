"""The operating system: signals, memory, processes, atomic files, and the variables that a launcher sets."""

from __future__ import annotations

from anybatch.system.atomic_files import replacing, write_bytes, write_text
from anybatch.system.launcher import launcher_rank, started_by_launcher
from anybatch.system.memory import free_memory, keep_freed_memory
from anybatch.system.processes import ChildProcess
from anybatch.system.signals import Interrupted, Interrupts

__all__ = [
    "ChildProcess",
    "Interrupted",
    "Interrupts",
    "free_memory",
    "keep_freed_memory",
    "launcher_rank",
    "replacing",
    "started_by_launcher",
    "write_bytes",
    "write_text",
]
