"""Minibatches of R runs, each shuffled by its own generator as :mod:`anybatch.minibatches` does for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.config.chunks import time_chunks
from anybatch.minibatches import deal
from anybatch.reproduce.stacked.networks import Vectors


@dataclass(frozen=True)
class StackedBatch:
    """An iteration's data of R runs, (R, N, T, ...), or a minibatch of it, (R, B, ...)."""

    vectors: Vectors
    action: Tensor
    behavior_logp: Tensor
    behavior_params: Tensor
    advantage: Tensor
    value_target: Tensor


def shuffled(batch: StackedBatch, minibatches: int, generators: Sequence[torch.Generator]) -> Iterator[StackedBatch]:
    """Deal the samples of each run out to equal minibatches, in an order of its own.

    Args:
        batch: (R, N, T, ...) data.
        minibatches: their number M; N*T/M samples of each run in each.
        generators: CPU generators of the random orders, one for each run.

    Yields:
        M minibatches.
    """
    runs, num_envs, steps = batch.advantage.shape
    chunks = time_chunks(num_envs, steps, minibatches)
    pieces, length = num_envs * chunks, steps // chunks
    index = dealt(pieces, minibatches, generators).flatten()

    def take(tensor: Tensor) -> Tensor:
        """All minibatches (M, R, B, ...), in one pass over the data."""
        rows = tensor.reshape(runs * pieces, length, *tensor.shape[3:])
        return rows[index].view(minibatches, runs, -1, *tensor.shape[3:])

    vectors = [take(part) for part in batch.vectors]
    names = ("action", "behavior_logp", "behavior_params", "advantage", "value_target")
    taken = [take(getattr(batch, name)) for name in names]
    for m in range(minibatches):
        yield StackedBatch(tuple(part[m] for part in vectors), *(tensor[m] for tensor in taken))


def dealt(pieces: int, minibatches: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Which pieces go into which minibatch, counted through all runs: piece p of run r is r*pieces + p.

    Args:
        pieces: of each run, a multiple of ``minibatches``.
        minibatches: M.
        generators: one for each of the R runs.

    Returns:
        (M, R, pieces/M) numbers.
    """
    orders = torch.stack([torch.cat(deal(pieces, minibatches, generator)) for generator in generators])
    orders += pieces * torch.arange(len(generators)).unsqueeze(1)
    return orders.view(len(generators), minibatches, -1).transpose(0, 1).contiguous()
