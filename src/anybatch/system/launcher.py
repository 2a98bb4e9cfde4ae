"""What ``torchrun``, or whatever else started this process, says about it; without loading PyTorch."""

from __future__ import annotations

import os


def started_by_launcher() -> bool:
    """Whether this process was started as one of several data-parallel workers."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launcher_rank() -> int:
    """This worker's number as its launcher gave it, whether or not it has joined the others yet; 0 if it is alone."""
    return int(os.environ["RANK"]) if started_by_launcher() else 0
