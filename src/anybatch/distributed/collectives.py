"""Data-parallel workers: one process each, with environments of its own. Alone, every function here is the identity.

Each worker samples and differentiates its share; whatever the algorithm sees of the data (gradients, moments,
statistics) is of all shares together, every sample weighing the same. So the number of workers is no hyperparameter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from anybatch.distributed import process_group
from anybatch.distributed.process_group import is_distributed, joined_process_group, local_device, sum_, wait_for_all
from anybatch.errors import AnybatchError, ConfigError, WorkerError
from anybatch.system.signals import Interrupted, Interrupts

__all__ = [
    "all_gather",
    "any_worker",
    "broadcast_",
    "check_equal",
    "check_interrupt_if_single_worker",
    "envs_per_worker",
    "from_main",
    "gather_to_main",
    "is_distributed",
    "is_main",
    "joined_process_group",
    "local_device",
    "local_num_envs",
    "local_world_size",
    "mean_gradients_",
    "mean_over_workers",
    "moments",
    "moments_of",
    "on_main",
    "rank",
    "wait_for_all",
    "world_size",
]

T = TypeVar("T")
_DIGEST_BYTES = 32


def world_size() -> int:
    """Number of workers."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This worker's number, from 0."""
    return dist.get_rank() if is_distributed() else 0


def is_main() -> bool:
    """Whether this worker is the one that writes."""
    return rank() == 0


def envs_per_worker(num_envs: int, workers: int) -> list[int]:
    """Environments of each worker, as equal as possible; the first ones have one more where they must.

    Raises:
        ConfigError: there are fewer environments than workers.
    """
    if num_envs < workers:
        raise ConfigError(f"env.num_envs is {num_envs}, but {workers} workers need at least one environment each")
    return [num_envs // workers + (number < num_envs % workers) for number in range(workers)]


def local_num_envs(num_envs: int) -> int:
    """Environments of this worker."""
    return envs_per_worker(num_envs, world_size())[rank()]


def local_world_size() -> int:
    """Number of workers on this machine, which share its memory and disk."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_distributed() else 1


def mean_gradients_(
    parameters: Iterable[Parameter], weight: float | None = None, interrupts: Interrupts | None = None
) -> None:
    """Average gradients over all workers in place, in one flat all-reduce.

    Args:
        parameters: whose gradients; the same ones on every worker.
        weight: this worker's fraction of the samples of all workers; None for equal numbers of samples.
        interrupts: when a worker was told to stop and its time is up, all stop here together.

    Raises:
        Interrupted: one of them was.
        WorkerError: a worker has died or hangs.
    """
    if not is_distributed():
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    overdue = torch.full((1,), float(interrupts is not None and interrupts.overdue), device=gradients[0].device)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).mul_(weight or 1 / world_size())
    flat = torch.cat([flat, overdue.to(flat)])
    sum_(flat)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat[:-1].split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))
    # on a GPU the flag would hold back what is queued; steps are short there, and the iteration's end is soon
    if flat.device.type == "cpu" and float(flat[-1]) > 0:
        raise Interrupted


def check_interrupt_if_single_worker(interrupts: Interrupts) -> None:
    """:meth:`Interrupts.check` where a single worker must not leave the others waiting: only if there are none."""
    if not is_distributed():
        interrupts.check()


def any_worker(flag: bool) -> bool:
    """Whether ``flag`` is set on any worker."""
    return any(row[0] for row in _rows([float(flag)])) if is_distributed() else flag


def moments(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population variance and count of the values of all workers, float64 scalars on the CPU.

    Args:
        values: this worker's values, any shape, at least one; workers may have different numbers of them.
    """
    return moments_of(values)[0]


def moments_of(*values: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """:func:`moments` of several tensors, in one exchange."""
    own = [
        (x.mean().cpu(), x.var(correction=0).cpu(), torch.tensor(float(x.numel()), dtype=torch.float64))
        for x in (value.detach().double() for value in values)
    ]
    if not is_distributed():
        return own
    rows = _rows([float(number) for triple in own for number in triple])
    columns = torch.tensor(rows, dtype=torch.float64).view(world_size(), len(own), 3).unbind(1)
    return [_pooled(*column.unbind(-1)) for column in columns]


def _pooled(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of groups (W,) as those of all their values."""
    total = count.sum()
    pooled = (count * mean).sum() / total
    return pooled, (count * (var + (mean - pooled).square())).sum() / total, total


def mean_over_workers(values: Mapping[str, float], weight: float) -> dict[str, float]:
    """Statistics of this worker as those of all; a name that starts with ``max_`` keeps the largest.

    Args:
        values: by name, the same names in the same order on every worker.
        weight: this worker's fraction of the samples of all workers.
    """
    if not is_distributed():
        return dict(values)
    rows = _rows([weight, *values.values()])
    return {
        name: max(row[i] for row in rows)
        if name.startswith("max_")
        else _mean([row[0] for row in rows], [row[i] for row in rows])
        for i, name in enumerate(values, start=1)
    }


def _mean(weights: Sequence[float], numbers: Sequence[float]) -> float:
    if len(set(numbers)) == 1:  # not to round what is known to all, such as counts
        return numbers[0]
    return sum(w * x for w, x in zip(weights, numbers, strict=True)) / sum(weights)


def broadcast_(module: nn.Module) -> None:
    """Give every worker the parameters and buffers of worker 0."""
    if is_distributed():
        state = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in module.state_dict().items()}
        module.load_state_dict(from_main(state))


def check_equal(what: Mapping[str, Iterable[Tensor]], when: str) -> None:
    """Compare what all workers should have the same bits of.

    Args:
        what: tensors by the name that the error gives them.
        when: for the error, "after iteration 5".

    Raises:
        WorkerError: they differ, on all workers at once.
    """
    if not is_distributed():
        return
    own = [byte for tensors in what.values() for byte in _digest(tensors)]
    table = [bytes(int(byte) for byte in row) for row in _rows([float(byte) for byte in own])]
    for i, name in enumerate(what):
        digests = [row[i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES] for row in table]
        other = [str(number) for number, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise WorkerError(
                f"{when} the {name} of worker {', '.join(other)} is not that of worker 0, so they do not train the "
                "same network any more: do all machines run the same versions and hardware? Go on from the last "
                "checkpoint with: anybatch resume"
            )


def _digest(tensors: Iterable[Tensor]) -> bytes:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def all_gather(value: T) -> list[T]:
    """What every worker has, by number; small things of any kind."""
    if not is_distributed():
        return [value]
    found: list[T] = process_group.from_main(process_group.gather_to_main(value))
    return found


def gather_to_main(value: T) -> list[T] | None:
    """What every worker has, by number, on worker 0; None elsewhere."""
    return process_group.gather_to_main(value) if is_distributed() else [value]


def from_main(value: T) -> T:
    """What worker 0 has; the others' ``value`` is not looked at."""
    if not is_distributed():
        return value
    found: T = process_group.from_main(value)
    return found


def on_main(function: Callable[[], T]) -> T:
    """Call a function on worker 0 alone; its result, or its error, is that of all.

    Raises:
        AnybatchError: what the function raised there.
    """
    if not is_distributed():
        return function()
    result: tuple[T | None, AnybatchError | None] = (None, None)
    if is_main():
        try:
            result = function(), None
        except AnybatchError as error:
            result = None, error
    value, failure = from_main(result)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def _rows(numbers: Sequence[float]) -> list[list[float]]:
    """Some numbers of every worker, (W, K): each adds its row to zeros, which changes no bit."""
    table = torch.zeros(world_size(), len(numbers), dtype=torch.float64)
    table[rank()] = torch.tensor(numbers, dtype=torch.float64)
    sum_(table)
    rows: list[list[float]] = table.tolist()
    return rows
