"""PyTorch's global random generators, which belong to the caller of a training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

seeding = threading.RLock()
"""Held while the global generator is seeded and drawn from, as for initial weights: all threads have the same one."""

_users = 0
_kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None


@contextlib.contextmanager
def callers_random_state() -> Iterator[None]:
    """Put the global generators back when the block ends; of overlapping blocks in several threads, when the last ends.

    Training seeds them, for random layers such as dropout, and restores them from checkpoints.
    """
    global _users, _kept
    with seeding:
        if _users == 0:
            on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            _kept = torch.get_rng_state(), on_gpus
        _users += 1
    try:
        yield
    finally:
        with seeding:
            _users -= 1
            if _users == 0 and _kept is not None:
                torch.set_rng_state(_kept[0])
                if _kept[1]:
                    torch.cuda.set_rng_state_all(_kept[1])
