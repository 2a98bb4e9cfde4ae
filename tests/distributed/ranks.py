"""Data-parallel workers for tests: processes on this machine that run a function together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")  # a fork of this process could not use autograd
_context.set_forkserver_preload(["torch._dynamo", "distributed.programs"])  # the optimisers load the first


class RankError(Exception):
    """What a rank raised, as text."""


def run_ranks(
    count: int, program: Callable[..., Any], *args: Any, timeout: float = 120.0, worker_timeout: float = 60.0
):
    """What `program(*args)` returned on each of `count` ranks; a RankError in place of an exception, None if killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(count):
        mine, theirs = _context.Pipe(duplex=False)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ANYBATCH_WORKER_TIMEOUT": str(worker_timeout),
        }
        process = _context.Process(target=_rank, args=(theirs, variables, program, args))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    waiting, results = dict(enumerate(pipes)), dict.fromkeys(range(count))
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline and not all(_is_stopped(processes[rank].pid) for rank in waiting):
        for pipe in wait(list(waiting.values()), 0.2):
            rank = pipes.index(pipe)
            del waiting[rank]
            with contextlib.suppress(EOFError):  # it was killed
                results[rank] = pickle.loads(pipe.recv_bytes())
    for process in processes:
        _end(process)
    return [results[rank] for rank in range(count)]


def _is_stopped(pid: int) -> bool:
    """Whether a process stands still after SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _end(process: Any) -> None:
    process.join(5)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def _rank(pipe: Any, variables: dict[str, str], program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        result = program(*args)
    except BaseException as error:
        traceback.print_exc()
        result = RankError(f"{type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(result))  # by value; torch would share memory with a process that ends
    pipe.close()
