"""Global random generators, which belong to the caller of a training, and during a training to that."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
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


@contextlib.contextmanager
def separate_random_states(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of PyTorch, NumPy and Python for a block, and put them back when it ends."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
