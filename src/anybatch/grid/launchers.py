"""Where the runs of a grid are trained: processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from anybatch.errors import AnybatchError, ConfigError
from anybatch.grid.runner import LOG, Launcher, Outcome, Running

_STOP, _STOP_SECONDS = "stop", 0.5


def make_launcher(name: str, processes: int | None, address: str | None) -> Launcher:
    """The launcher of that name.

    Raises:
        ConfigError: there is no such launcher, or ``processes`` is below 1.
        AnybatchError: Ray is not installed.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes is {processes}, but must be at least 1")
    if name == "local":
        return Local(processes or os.cpu_count() or 1)
    if name == "ray":
        return Ray(processes, address)
    raise ConfigError(f"launcher is {name!r}, but must be local, ray or print")


def shell_command(outcome: Outcome) -> str:
    """A line for a shell that trains the run, or goes on with it."""
    return shlex.join(["anybatch", *outcome.command])


def _environment(share: int) -> dict[str, str]:
    """Environment variables of a run that shares its machine's cores with ``share - 1`` others."""
    threads = max(1, (os.cpu_count() or 1) // share)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


class Local:
    """Processes on this machine; with several GPUs the runs take turns on them."""

    def __init__(self, processes: int) -> None:
        """At most ``processes`` runs at once."""
        self.processes = processes
        self._gpus = _gpus() if processes > 1 else []

    def start(self, outcome: Outcome, slot: int) -> Running:
        """Start a job in a process group of its own, which a Ctrl-C in the terminal does not reach."""
        environment = _environment(self.processes)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        with open(outcome.folder / LOG, "ab") as log:
            command = [sys.executable, "-m", "anybatch", *outcome.command]
            return _Process(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            )

    def close(self) -> None:
        """Nothing is open."""


class _Process:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the environments' processes


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if sys.platform == "linux" else []
    return [str(number) for number in range(len(found))] if len(found) > 1 else []


class Ray:
    """Tasks of a Ray cluster, each of which runs the same command as :class:`Local` does."""

    def __init__(self, processes: int | None, address: str | None) -> None:
        """Join the cluster, or start Ray here if there is none.

        Raises:
            AnybatchError: Ray is not installed, or no cluster answers at ``address``.
        """
        try:
            import ray
        except ImportError as error:
            raise AnybatchError("the launcher ray needs Ray: pip install 'anybatch[ray]'") from error
        self._ray = ray
        self._own_cluster = not ray.is_initialized()
        if self._own_cluster:
            try:
                ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False)
            except (ConnectionError, RuntimeError) as error:
                raise AnybatchError(f"no Ray cluster answers at {address!r}: {error}") from error
        resources = ray.cluster_resources()
        self._gpu_share = 1 if resources.get("GPU") else 0
        room = resources.get("GPU") or resources.get("CPU", 1)
        self.processes = processes or max(1, int(room))

    def start(self, outcome: Outcome, slot: int) -> Running:
        """Queue a job; Ray decides where it runs, and which GPU it sees."""
        task = self._ray.remote(_train_in_task).options(num_cpus=1, num_gpus=self._gpu_share, max_retries=0)
        stop = outcome.folder / _STOP
        stop.unlink(missing_ok=True)
        result = task.remote(outcome.command, str(outcome.folder / LOG), str(stop), os.getcwd())
        return _Task(self._ray, result, stop)

    def close(self) -> None:
        """Leave the cluster, or end it if it was started here."""
        if self._own_cluster:
            self._ray.shutdown()


class _Task:
    def __init__(self, ray: Any, result: Any, stop: Path) -> None:
        self._ray = ray
        self._result = result
        self._stop = stop

    def exit_code(self) -> int | None:
        if not self._ray.wait([self._result], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._result))
        except self._ray.exceptions.RayError:  # its machine or its worker process has died
            return -signal.SIGKILL

    def stop(self) -> None:
        self._stop.touch()  # cancelling the task would not wait for the checkpoint

    def kill(self) -> None:
        self._ray.cancel(self._result, force=True)


def _train_in_task(arguments: list[str], log: str, stop: str, folder: str) -> int:
    """What a Ray task does: run the command, and stop it when the file ``stop`` appears."""
    from_here = folder if Path(folder).is_dir() else None
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "anybatch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=from_here,
            preexec_fn=_die_with_parent,
        )
        stopped = False
        while process.poll() is None:
            if not stopped and Path(stop).exists():
                stopped = True
                process.send_signal(signal.SIGTERM)
            time.sleep(_STOP_SECONDS)
        return int(process.returncode)


def _die_with_parent() -> None:
    """On Linux, have the kernel end this process when Ray ends the worker that started it."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
