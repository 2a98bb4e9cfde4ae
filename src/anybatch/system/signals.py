"""Stop requests: Ctrl-C and SIGTERM end a run at the next good moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

HUNG_THREADS = "anybatch-"
"""What the names of the threads begin with that environments are stepped in."""


class Interrupted(BaseException):
    """The run was asked to stop; like KeyboardInterrupt it passes through ``except Exception``."""


class Interrupts:
    """Turns signals into a request that the training loop honours at the end of its iteration.

    An iteration that would take longer than ``patience`` seconds is abandoned instead: :meth:`check`, called between
    environment steps and between gradient steps, then raises :class:`Interrupted`, and the run goes on later from its
    last checkpoint. A second signal abandons it at once. A step that hangs never comes to its check: within
    :meth:`interruptible` the signal handler raises instead, which ends whatever waits in Python.
    """

    def __init__(self, patience: float = 4.0, *, echo: float = 0.0) -> None:
        """Nothing is requested yet.

        Args:
            patience: seconds that a running iteration is given to end.
            echo: seconds in which further signals are taken for the first one; torchrun passes signals on that the
                terminal has sent to its workers already.
        """
        self.patience = patience
        self.echo = echo
        self.call_interrupted = False
        """Whether a call within :meth:`interruptible` was abandoned; its object must not be used again."""
        self._deadline: float | None = None
        self._interruptible = False
        self._alarm: threading.Timer | None = None
        self._first_signal: float | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether the run has been asked to stop."""
        return self._deadline is not None

    @property
    def overdue(self) -> bool:
        """Whether a stop was requested and the iteration has had its time."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def request(self) -> None:
        """Ask the run to stop, as a signal would."""
        now = time.monotonic()
        self._deadline = now if self.requested else now + self.patience

    def check(self) -> None:
        """Raise :class:`Interrupted` if a stop was requested and the iteration has had its time."""
        if self.overdue:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While this lasts, a signal raises :class:`Interrupted` in the middle of a call once patience has run out."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def __enter__(self) -> Interrupts:
        """Catch SIGINT and SIGTERM (in the main thread; elsewhere only :meth:`request` counts)."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm.join()
            self._alarm = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_signal is None or now - self._first_signal >= self.echo:
            self._first_signal = now if self._first_signal is None else self._first_signal
            self.request()
        if self._alarm is None and hasattr(signal, "pthread_kill"):
            # once more when patience has run out, since nothing else gets at a call that waits
            self._alarm = threading.Timer(
                self.patience, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
            )
            self._alarm.daemon = True
            self._alarm.start()
        if self._interruptible and self.overdue:
            self.call_interrupted = True
            raise Interrupted


@contextmanager
def ignoring_sigint() -> Iterator[None]:
    """Ignore SIGINT in the main thread; processes started meanwhile inherit this.

    A terminal sends Ctrl-C to all processes, and the main one decides when the others end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def exit_beside_hung_threads(code: int) -> None:
    """End the program at once if a thread was left behind in an environment that hangs; else return.

    Such a thread cannot be ended, and native code in it (EnvPool's) makes the interpreter abort while it shuts down.
    The processes of environments end as well.
    """
    if any(thread.name.startswith(HUNG_THREADS) for thread in threading.enumerate()):
        for process in multiprocessing.active_children():
            process.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
