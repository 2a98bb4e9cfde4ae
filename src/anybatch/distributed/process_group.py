"""The process group of the data-parallel workers, and the detection of workers that have died or hang.

Workers are processes started by ``torchrun``, or by any other launcher that sets its environment variables. Apart from
gradients, they exchange little data, through the CPU (gloo).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.errors import ConfigError, WorkerError
from anybatch.system.launcher import end_with_launcher, launcher_rank, started_by_launcher

_JOIN_SECONDS = 300.0  # also for rare and slow operations: writing and reading checkpoints
_TIMEOUT_SECONDS = 16.0
_PATIENCE = timedelta(days=7)
_NCCL_SECONDS = 30.0  # the first exchange of gradients also sets up the connections
_ROLL_CALL_SECONDS = 2.0
_GLOO_SHUTDOWN_SECONDS = 0.2
_VARIABLE = "ANYBATCH_WORKER_TIMEOUT"

_last_collective = 0.0
_roll_calls = 0
_groups = 0


@contextlib.contextmanager
def joined_process_group() -> Iterator[None]:
    """Join the other workers, if there are any, for the duration of the block; a nested block does nothing.

    Raises:
        WorkerError: the others did not join in time.
    """
    if not started_by_launcher() or dist.is_initialized():
        yield
        return
    end_with_launcher()
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set without {' and '.join(missing)}; start the workers with torchrun"
        )
    seconds = worker_timeout()
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    began = time.monotonic()
    try:
        _join("cpu:gloo,cuda:nccl" if cuda else "gloo")
        if cuda:  # NCCL's watchdog ends a process whose gradients do not arrive
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            nccl = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
            nccl._set_default_timeout(timedelta(seconds=max(seconds, _NCCL_SECONDS)))
        wait_for_all()
    except WorkerError:
        raise
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"worker {launcher_rank()} of {os.environ['WORLD_SIZE']} waited {time.monotonic() - began:.0f} s for the "
            f"others at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {_first_line(error)}"
        ) from error
    try:
        yield
        wait_for_all()
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        # gloo's threads need the interpreter to release their last tensors, and abort a program that is shutting down
        time.sleep(_GLOO_SHUTDOWN_SECONDS)


def _join(backend: str) -> None:
    """Make the process group, under a prefix of its own: torchrun's store still has the addresses of earlier groups."""
    global _groups
    _groups += 1
    timeout = timedelta(seconds=_JOIN_SECONDS)
    store, number, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    prefixed = dist.PrefixStore(f"anybatch-group-{_groups}", store)
    dist.init_process_group(backend, store=prefixed, rank=number, world_size=size, timeout=timeout)


def local_device(name: str) -> str:
    """The device of this worker: ``auto`` and ``cuda`` become a separate GPU for each worker of a machine.

    Raises:
        ConfigError: several workers of this machine would use one GPU.
    """
    if not started_by_launcher() or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return name
    here, number = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if name not in ("auto", "cuda"):
        if here > 1:
            raise ConfigError(
                f"device is {name!r}, but {here} workers on this machine need a GPU each; set device cuda, or cpu"
            )
        return name
    if here > torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs for {here} workers; "
            "start fewer with --nproc-per-node, or set device cpu"
        )
    return f"cuda:{number}"


def is_distributed() -> bool:
    """Whether this process has joined at least one other worker."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_(tensor: Tensor) -> None:
    """Add up a tensor over all workers in place, with bitwise equal results.

    Raises:
        WorkerError: another worker has died or did not call this in time: within 16 seconds (ANYBATCH_WORKER_TIMEOUT),
            or twice this worker's time since the last collective if that is longer.
    """
    options = dist.AllreduceOptions()
    if tensor.device.type == "cpu":
        options.timeout = timedelta(seconds=_timeout())
    _guard(lambda: dist.group.WORLD.allreduce([tensor], options).wait())  # type: ignore[union-attr]


def wait_for_all() -> None:
    """Wait up to five minutes for every worker: after creating environments, or writing a checkpoint."""
    if is_distributed():
        _guard(lambda: dist.all_reduce(torch.zeros(1)))


def wait_for_main() -> None:
    """Wait for every worker, however long worker 0 takes, unless one of them dies."""
    if is_distributed():
        options = dist.AllreduceOptions()
        options.timeout = _PATIENCE
        _guard(lambda: dist.group.WORLD.allreduce([torch.zeros(1)], options).wait())  # type: ignore[union-attr]


def from_main(value: Any) -> Any:
    """Broadcast an object of any kind from worker 0; those of the others are ignored."""
    if not is_distributed():
        return value
    box = [value]
    _guard(lambda: dist.broadcast_object_list(box, src=0, device=torch.device("cpu")))
    return box[0]


def gather_to_main(value: Any) -> list[Any] | None:
    """Gather an object from every worker on worker 0, in the order of their numbers; None elsewhere."""
    if not is_distributed():
        return [value]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    _guard(lambda: dist.gather_object(value, gathered, dst=0))
    return gathered


def _guard(collective: Callable[[], object]) -> None:
    global _last_collective
    try:
        collective()
    except RuntimeError as error:
        raise WorkerError(_reason(error)) from error
    _last_collective = time.monotonic()


def _timeout() -> float:
    elapsed = time.monotonic() - _last_collective if _last_collective else 0.0
    return max(worker_timeout(), 2 * elapsed)


def worker_timeout() -> float:
    """Minimum number of seconds that a worker waits for the others.

    Raises:
        ConfigError: ANYBATCH_WORKER_TIMEOUT is not a number above 0.
    """
    text = os.environ.get(_VARIABLE)
    try:
        seconds = _TIMEOUT_SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{_VARIABLE} is {text!r}, but must be a number of seconds above 0")
    return min(seconds, _PATIENCE.total_seconds())


def _reason(error: RuntimeError) -> str:
    """Name the workers that do not answer a roll call in the store of the process group."""
    global _roll_calls
    _roll_calls += 1
    me, missing = dist.get_rank(), []
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"anybatch-here-{_roll_calls}-{me}", "yes")
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        for other in range(dist.get_world_size()):
            try:
                left = max(0.1, deadline - time.monotonic())
                store.wait([f"anybatch-here-{_roll_calls}-{other}"], timedelta(seconds=left))
            except dist.DistStoreError:
                missing.append(str(other))
        if me == 0:  # the store may be in this process, and the others may still be using it
            time.sleep(1.0)
    except RuntimeError:
        missing = missing or ["0 (or its machine)"]
    who = f"worker {', '.join(missing)} has died or hangs" if missing else "the connection between workers has broken"
    return f"{who} ({_first_line(error)}); continue from the last checkpoint with: anybatch resume"


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\] *|\. This .*$", "", line)[:200]  # without the position in gloo's source
