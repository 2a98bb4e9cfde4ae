"""Collectives of the data-parallel workers, which are processes. With a single worker every function is the identity.

Each worker samples from its own environments and computes gradients of its own samples. Gradients, moments and
statistics are combined over all workers with equal weight for each sample, so the number of workers is not a
hyperparameter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from anybatch.distributed.process_group import from_main as from_main
from anybatch.distributed.process_group import gather_to_main as gather_to_main
from anybatch.distributed.process_group import is_distributed as is_distributed
from anybatch.distributed.process_group import joined_process_group as joined_process_group
from anybatch.distributed.process_group import local_device as local_device
from anybatch.distributed.process_group import sum_, wait_for_main
from anybatch.distributed.process_group import wait_for_all as wait_for_all
from anybatch.errors import AnybatchError, ConfigError, WorkerError
from anybatch.system.signals import Interrupted, Interrupts

T = TypeVar("T")
_DIGEST_BYTES = 32


def world_size() -> int:
    """Number of workers."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This worker's number, from 0."""
    return dist.get_rank() if is_distributed() else 0


def is_main() -> bool:
    """Whether this is worker 0, which writes the files."""
    return rank() == 0


def envs_per_worker(num_envs: int, workers: int) -> list[int]:
    """Divide environments among workers as evenly as possible; the first workers get the remainder.

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
    """Number of workers on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_distributed() else 1


def mean_gradients_(
    parameters: Iterable[Parameter], weight: float | None = None, interrupts: Interrupts | None = None
) -> None:
    """Average gradients over all workers in place, in one flat all-reduce.

    A gradient that one worker lacks counts as 0 there; one that all lack stays missing, and its optimiser skips it.
    ``weight`` is this worker's fraction of the samples of all workers; None for equal numbers of samples.

    Raises:
        Interrupted: a stop is overdue on one of the workers.
        WorkerError: a worker has died or hangs.
    """
    if not is_distributed():
        return
    trained = [x for x in parameters if x.requires_grad]
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in trained]
    flags = gradients[0].new_ones(len(trained) + 1)  # of each gradient that it is there, and last of a stop overdue
    flags[-1] = float(interrupts is not None and interrupts.overdue)
    for i, parameter in enumerate(trained):
        if parameter.grad is None:
            flags[i] = 0.0
    flat = torch.cat([*[x.reshape(-1) for x in gradients], flags])
    sum_(flat.mul_(weight or 1 / world_size()))
    *means, found = flat.split([*[x.numel() for x in gradients], len(flags)])
    for i, (parameter, gradient, mean) in enumerate(zip(trained, gradients, means, strict=True)):
        if parameter.grad is not None or float(found[i]) > 0:
            parameter.grad = gradient.copy_(mean.view_as(gradient))
    # on a GPU reading the flag would wait for queued work; iterations are short there
    if flat.device.type == "cpu" and float(flat[-1]) > 0:
        raise Interrupted


def check_interrupt_if_single_worker(interrupts: Interrupts) -> None:
    """Call :meth:`Interrupts.check` unless there are other workers, which would be left waiting."""
    if not is_distributed():
        interrupts.check()


def any_worker(flag: bool) -> bool:
    """Whether ``flag`` is set on any worker."""
    return any(row[0] for row in _rows([float(flag)])) if is_distributed() else flag


def moments(values: Tensor, *, run_axis: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population variance and count of the values of all workers, float64 scalars on the CPU.

    Args:
        values: this worker's values, any shape, at least one; workers may have different numbers of them.
        run_axis: whether the first axis is that of R stacked runs, each of which has its own moments, (R,); only
            without other workers.
    """
    return moments_of(values, run_axis=run_axis)[0]


def moments_of(*values: Tensor, run_axis: bool = False) -> list[tuple[Tensor, Tensor, Tensor]]:
    """:func:`moments` of several tensors, in one exchange."""
    local = [
        (x.mean(-1).cpu(), x.var(-1, correction=0).cpu(), torch.tensor(float(x.shape[-1]), dtype=torch.float64))
        for x in (value.detach().double().flatten(int(run_axis)) for value in values)
    ]
    if not is_distributed():
        return local
    rows = _rows([float(number) for triple in local for number in triple])
    columns = torch.tensor(rows, dtype=torch.float64).view(world_size(), len(local), 3).unbind(1)
    return [_pooled(*column.unbind(-1)) for column in columns]


def pooled_moments(mean: Tensor, var: Tensor, count: float) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the vectors of all workers, from those of each; float64 on the CPU.

    Args:
        mean: (F,) of this worker's vectors; other leading axes only without other workers.
        var: their population variances, of the same shape.
        count: their number.

    Returns:
        Mean, population variance and number of all.
    """
    if not is_distributed():
        return mean, var, torch.tensor(float(count), dtype=torch.float64)
    rows = torch.tensor(_rows([float(count), *mean.tolist(), *var.tolist()]), dtype=torch.float64)
    counts, means, variances = rows.split([1, len(mean), len(var)], dim=1)
    pooled, variance, total = _pooled(means, variances, counts)
    return pooled, variance, total.squeeze(0)


def _pooled(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the moments of W groups, each (W, ...), into those of all their values."""
    total = count.sum(0)
    pooled = (count * mean).sum(0) / total
    return pooled, (count * (var + (mean - pooled).square())).sum(0) / total, total


def mean_over_workers(values: Mapping[str, float], weight: float) -> dict[str, float]:
    """Average statistics over all workers; of a name that starts with ``max_``, take the largest.

    ``values`` has the same names in the same order on every worker; ``weight`` is this worker's fraction of the samples
    of all workers.
    """
    if not is_distributed():
        return dict(values)
    weights, *columns = zip(*_rows([weight, *values.values()]), strict=True)
    result = {}
    for name, numbers in zip(values, columns, strict=True):
        if name.startswith("max_") or len(set(numbers)) == 1:  # a number that all workers share is not rounded
            result[name] = max(numbers)
        else:
            result[name] = sum(w * x for w, x in zip(weights, numbers, strict=True)) / sum(weights)
    return result


def broadcast_(module: nn.Module) -> None:
    """Give every worker the parameters and buffers of worker 0."""
    if is_distributed():
        state = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in module.state_dict().items()}
        module.load_state_dict(from_main(state))


def broadcast_buffers_(*modules: nn.Module) -> None:
    """Give every worker the buffers of worker 0: batch normalisation, for one, has statistics of its own samples."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    if is_distributed() and buffers:
        with torch.no_grad():
            for buffer, of_main in zip(buffers, from_main([x.cpu() for x in buffers]), strict=True):
                buffer.copy_(of_main)


def check_equal(what: Mapping[str, Iterable[Tensor]], when: str) -> None:
    """Raise a WorkerError on all workers unless the named tensors are bitwise equal on them.

    ``when`` is for the error, such as "after iteration 5".
    """
    if not is_distributed():
        return
    local = [byte for tensors in what.values() for byte in _digest(tensors)]
    table = [bytes(int(byte) for byte in row) for row in _rows([float(byte) for byte in local])]
    for i, name in enumerate(what):
        digests = [row[i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES] for row in table]
        different = [str(number) for number, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise WorkerError(
                f"{when} the {name} of worker {', '.join(different)} differ from those of worker 0, so they no longer "
                "train the same network: check that all machines have the same software and hardware. Continue from "
                "the last checkpoint with: anybatch resume"
            )


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def all_gather(value: T) -> list[T]:
    """Gather a small object of any kind from every worker, in the order of their numbers."""
    return cast(list[T], from_main(gather_to_main(value)))


def on_main(function: Callable[[], T], *, patient: bool = False) -> T:
    """Call a function on worker 0 only; its result is returned, or its error raised, on all workers.

    Args:
        function: what to call.
        patient: let the others wait as long as it takes instead of five minutes.

    Raises:
        AnybatchError: the function's error.
    """
    if not is_distributed():
        return function()
    result: Any = None
    if is_main():
        try:
            result = function()
        except AnybatchError as error:
            result = error
    if patient:
        wait_for_main()
    result = from_main(result)
    if isinstance(result, AnybatchError):
        raise result
    return cast(T, result)


def _rows(numbers: Sequence[float]) -> list[list[float]]:
    """Gather K numbers from every worker, (W, K), exactly: each adds its row to zeros."""
    table = torch.zeros(world_size(), len(numbers), dtype=torch.float64)
    table[rank()] = torch.tensor(numbers, dtype=torch.float64)
    sum_(table)
    return cast(list[list[float]], table.tolist())
