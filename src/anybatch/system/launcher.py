"""Environment variables that a launcher sets for its processes; read without loading PyTorch."""

from __future__ import annotations

import os
import signal


def started_by_launcher() -> bool:
    """Whether this process was started as one of several data-parallel workers."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launcher_rank() -> int:
    """Return the worker's number given by its launcher, also before it has joined the others; 0 if it is alone."""
    return int(os.environ["RANK"]) if started_by_launcher() else 0


def end_with_launcher() -> None:
    """Have torchrun's death stop this process, as SIGTERM does; killed, torchrun leaves its workers behind."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from anybatch.system.processes import end_with_parent

        end_with_parent(signal.SIGTERM)


def ray_address() -> str | None:
    """Address of the Ray cluster to join, from RAY_ADDRESS."""
    return os.environ.get("RAY_ADDRESS")
