"""Data-parallel workers: collectives, and joining and leaving the process group."""

from __future__ import annotations

from anybatch.distributed.collectives import is_main, moments, rank, share_of, shares, world_size
from anybatch.distributed.process_group import is_distributed, join, local_device

__all__ = [
    "is_distributed",
    "is_main",
    "join",
    "local_device",
    "moments",
    "rank",
    "share_of",
    "shares",
    "world_size",
]
