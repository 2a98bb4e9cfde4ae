"""Joining the other data-parallel workers, and noticing when one of them has died or hangs.

Workers are processes started by ``torchrun``, or by anything else that sets its environment variables. What the
workers tell each other besides gradients is small and goes through the CPU (gloo).
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
from anybatch.system.launcher import launcher_rank, started_by_launcher

_JOIN_SECONDS = 300.0  # also for what is rare and slow: checkpoints, and what is read when a run goes on
_PATIENCE_SECONDS = 16.0
_NCCL_SECONDS = 30.0  # the first exchange of gradients sets the connections up as well
_ROLL_CALL_SECONDS = 2.0
_LET_GO_SECONDS = 0.2
_VARIABLE = "ANYBATCH_WORKER_TIMEOUT"

_last_meeting = 0.0
_calls = 0


@contextlib.contextmanager
def joined_process_group() -> Iterator[None]:
    """Join the other workers, if there are any, for the length of the block; inside another such block do nothing.

    Raises:
        WorkerError: the others did not come.
    """
    if not started_by_launcher() or dist.is_initialized():
        yield
        return
    seconds = patience()
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=_JOIN_SECONDS))
        if cuda:  # a watchdog of NCCL's own ends a process whose gradients do not arrive
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            nccl = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
            nccl._set_default_timeout(timedelta(seconds=max(seconds, _NCCL_SECONDS)))
        wait_for_all()
    except WorkerError:
        raise
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"worker {launcher_rank()} of {os.environ['WORLD_SIZE']} waited {_JOIN_SECONDS:.0f} s for the others at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {_first_line(error)}"
        ) from error
    try:
        yield
        wait_for_all()
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        # gloo's threads still let go of the last tensors, for which they need the interpreter; while it shuts down they
        # would abort the program
        time.sleep(_LET_GO_SECONDS)


def local_device(name: str) -> str:
    """The device of this worker: ``auto`` and ``cuda`` become a GPU of its own where workers share a machine.

    Raises:
        ConfigError: one GPU is named for several workers of this machine, or there are fewer GPUs than workers.
    """
    if not started_by_launcher() or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return name
    here, number = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if name not in ("auto", "cuda"):
        if here > 1:
            raise ConfigError(
                f"device is {name!r}, but {here} workers of this machine need a GPU each; set device cuda, or cpu"
            )
        return name
    if here > torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs for {here} workers; "
            "start fewer with --nproc-per-node, or set device cpu"
        )
    return f"cuda:{number}"


def is_distributed() -> bool:
    """Whether more than one worker has been joined."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_(tensor: Tensor) -> None:
    """Add up a tensor of all workers in place; all get the same bits.

    Raises:
        WorkerError: another worker has died, or has not come within the time that it is given: 16 seconds
            (ANYBATCH_WORKER_TIMEOUT), or twice what this worker took since they last met if that is more.
    """
    options = dist.AllreduceOptions()
    if tensor.device.type == "cpu":
        options.timeout = timedelta(seconds=_patience())
    _guard(lambda: dist.group.WORLD.allreduce([tensor], options).wait())  # type: ignore[union-attr]


def wait_for_all() -> None:
    """Wait until every worker is here, also for a slow one: after making environments, or writing a checkpoint."""
    if is_distributed():
        _guard(lambda: dist.all_reduce(torch.zeros(1)))


def from_main(value: Any) -> Any:
    """What worker 0 has, of any kind; the others' ``value`` is not looked at."""
    box = [value]
    _guard(lambda: dist.broadcast_object_list(box, src=0, device=torch.device("cpu")))
    return box[0]


def gather_to_main(value: Any) -> list[Any] | None:
    """What every worker has, by number, on worker 0; None elsewhere."""
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    _guard(lambda: dist.gather_object(value, gathered, dst=0))
    return gathered


def _guard(collective: Callable[[], object]) -> None:
    global _last_meeting
    try:
        collective()
    except RuntimeError as error:
        raise WorkerError(_reason(error)) from error
    _last_meeting = time.monotonic()


def _patience() -> float:
    own = time.monotonic() - _last_meeting if _last_meeting else 0.0
    return max(patience(), 2 * own)


def patience() -> float:
    """Seconds that a worker waits for the others at least.

    Raises:
        ConfigError: ANYBATCH_WORKER_TIMEOUT is not a number above 0.
    """
    text = os.environ.get(_VARIABLE)
    try:
        seconds = _PATIENCE_SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(f"{_VARIABLE} is {text!r}, but must be a number of seconds above 0")
    return seconds


def _reason(error: RuntimeError) -> str:
    """Which workers do not answer: those that do say so to each other."""
    global _calls
    _calls += 1
    me, missing = dist.get_rank(), []
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"anybatch-here-{_calls}-{me}", "yes")
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        for other in range(dist.get_world_size()):
            try:
                left = max(0.1, deadline - time.monotonic())
                store.wait([f"anybatch-here-{_calls}-{other}"], timedelta(seconds=left))
            except dist.DistStoreError:
                missing.append(str(other))
        if me == 0:  # the others may still be asking, and what they ask may live in this process
            time.sleep(1.0)
    except RuntimeError:
        missing = missing or ["0 (or its machine)"]
    who = f"worker {', '.join(missing)} has died or hangs" if missing else "the connection between workers has broken"
    return f"{who} ({_first_line(error)}); go on from the last checkpoint with: anybatch resume"


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\] *|\. This .*$", "", line)[:200]  # without the place in the source of gloo
