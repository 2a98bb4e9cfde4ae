"""Child processes: starting them with environment variables, stopping them, and ending them with this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

KILLED = -int(signal.SIGKILL) if hasattr(signal, "SIGKILL") else -9
"""Exit code of a process that was killed."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM) -> None:
    """Have this process sent a signal when its parent dies, however that happens; on Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))


class ChildProcess:
    """A command with its output appended to a log file.

    On Linux it does not outlive this process, even if this process is killed.

    Args:
        command: program and arguments.
        log: the log file.
        detached: run in a separate session, so that a Ctrl-C in the terminal does not reach the command, and let it
            save its work (SIGTERM) when this process dies; otherwise it is then killed.
        defaults: environment variables for those that are not set.
        variables: environment variables that replace those that are set.
        cwd: working directory.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        detached: bool = False,
        defaults: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        self._detached = detached

        def prepare() -> None:
            end_with_parent(signal.SIGTERM if detached else signal.SIGKILL)

        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**(defaults or {}), **os.environ, **(variables or {})},
                cwd=cwd,
                start_new_session=detached,
                preexec_fn=prepare if _LIBC is not None else None,
            )

    def exit_code(self) -> int | None:
        """Exit code, or minus the signal that ended the process; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask the process to end (SIGTERM)."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End the process at once; a detached one with all its children."""
        with contextlib.suppress(ProcessLookupError):
            if self._detached:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()


def visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs to distribute processes over; empty if there is nothing to choose."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    devices = list(Path("/proc/driver/nvidia/gpus").glob("*")) if sys.platform == "linux" else []
    return [str(number) for number in range(len(devices))] if len(devices) > 1 else []
