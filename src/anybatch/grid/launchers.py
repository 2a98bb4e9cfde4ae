"""Launchers of a grid: processes on this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from anybatch.errors import AnybatchError, ConfigError, install_command, no_ray_cluster
from anybatch.grid.job import LOG, Outcome
from anybatch.system.exit_codes import FAILED
from anybatch.system.processes import KILLED, ChildProcess, visible_gpus

_STOP_FILE, _STOP_POLL_SECONDS = "stop", 0.5


def make_launcher(name: str, processes: int | None, address: str | None) -> LocalLauncher | RayLauncher:
    """Create the launcher ``local`` or ``ray``."""
    if name == "local":
        return LocalLauncher(processes or os.cpu_count() or 1)
    if name == "ray":
        return RayLauncher(processes, address)
    raise ConfigError(f"launcher is {name!r}, but must be local, ray or print")


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "anybatch", *arguments]


class LocalLauncher:
    """Processes on this machine; several GPUs are assigned to the runs in turn."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._gpus = visible_gpus() if processes > 1 else []

    def start(self, outcome: Outcome, slot: int) -> ChildProcess:
        """Start a job; ``slot`` is below ``processes`` and unique among the jobs that run."""
        threads = max(1, (os.cpu_count() or 1) // self.processes)
        return ChildProcess(
            _command(outcome.command),
            outcome.folder / LOG,
            detached=True,
            defaults={"OMP_NUM_THREADS": str(threads)},
            variables={"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {},
        )

    def close(self) -> None: ...


class RayLauncher:
    """Tasks of a Ray cluster; each runs the same command as a local process."""

    def __init__(self, processes: int | None, address: str | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise AnybatchError(f"the launcher ray needs Ray: {install_command('ray')}") from error
        self._ray = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            try:
                ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:  # ValueError: it is no address
                raise AnybatchError(no_ray_cluster(address, error)) from error
        resources = ray.cluster_resources()
        self._gpus_per_run = 1 if resources.get("GPU") else 0
        self.processes = processes or max(1, int(resources.get("GPU") or resources.get("CPU", 1)))

    def start(self, outcome: Outcome, slot: int) -> RayTask:
        """Start a job; Ray finds its place."""
        task = self._ray.remote(_train_in_task).options(num_cpus=1, num_gpus=self._gpus_per_run, max_retries=0)
        stop = outcome.folder / _STOP_FILE
        stop.unlink(missing_ok=True)
        result = task.remote(outcome.command, str(outcome.folder / LOG), str(stop), os.getcwd())
        return RayTask(self._ray, result, stop)

    def close(self) -> None:
        if self._started_ray:
            self._ray.shutdown()


class RayTask:
    """A run in progress, with the interface of :class:`~anybatch.system.processes.ChildProcess`."""

    def __init__(self, ray: Any, result: Any, stop: Path) -> None:
        self._ray = ray
        self._result = result
        self._stop = stop

    def exit_code(self) -> int | None:
        if not self._ray.wait([self._result], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._result))
        except self._ray.exceptions.RayTaskError as error:  # such as a machine without anybatch, or without the folder
            with contextlib.suppress(OSError), open(self._stop.parent / LOG, "a") as log:
                log.write(f"{error}\n")
            return FAILED
        except self._ray.exceptions.RayError:  # the machine or the worker process died
            return KILLED

    def stop(self) -> None:
        self._stop.touch()  # cancelling the task would not wait for the checkpoint

    def kill(self) -> None:
        self._ray.cancel(self._result, force=True)


def _train_in_task(arguments: list[str], log: str, stop: str, folder: str) -> int:
    """Body of a Ray task: run the command, and stop it when the file ``stop`` appears."""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    process = ChildProcess(_command(arguments), Path(log), cwd=folder if Path(folder).is_dir() else None)
    stopped = False
    while process.exit_code() is None:
        if not stopped and Path(stop).exists():
            stopped = True
            process.stop()
        time.sleep(_STOP_POLL_SECONDS)
    return int(process.exit_code() or 0)
