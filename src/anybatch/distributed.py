"""Data-parallel workers: one process each. Alone, every function here is the identity."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def is_distributed() -> bool:
    """Whether a process group with more than one worker has been joined."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """Number of workers."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This worker's number, from 0."""
    return dist.get_rank() if is_distributed() else 0


def is_main() -> bool:
    """Whether this worker is the one that writes."""
    return rank() == 0


def mean_gradients_(parameters: Iterable[Parameter]) -> None:
    """Average gradients over all workers in place, in one flat all-reduce."""
    if not is_distributed():
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size()
    for gradient, piece in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


def moments(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population variance and count of the values of all workers, float64 scalars on the CPU.

    Args:
        values: this worker's values, any shape, at least one.
    """
    values = values.detach().double()
    count = torch.tensor(float(values.numel()), dtype=torch.float64)
    mean, var = values.mean().cpu(), values.var(correction=0).cpu()
    if not is_distributed():
        return mean, var, count
    totals = torch.stack([count, count * mean])
    dist.all_reduce(totals)
    total, global_mean = totals[0], totals[1] / totals[0]
    squares = count * (var + (mean - global_mean).square())
    dist.all_reduce(squares)
    return global_mean, squares / total, total
