"""The operating system: signals, memory, processes, atomic files, and the variables that a launcher sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anybatch._lazy import lazy_attributes

if TYPE_CHECKING:
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

__getattr__ = lazy_attributes(  # so that a command handles signals before it loads more
    __name__,
    {
        "ChildProcess": "processes",
        "Interrupted": "signals",
        "Interrupts": "signals",
        "free_memory": "memory",
        "keep_freed_memory": "memory",
        "launcher_rank": "launcher",
        "replacing": "atomic_files",
        "started_by_launcher": "launcher",
        "write_bytes": "atomic_files",
        "write_text": "atomic_files",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
