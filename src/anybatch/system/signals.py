"""Stop requests: Ctrl-C and SIGTERM end a run at the next suitable point."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeAlias

from anybatch.errors import Interrupted
from anybatch.system.exit_codes import INTERRUPTED

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None

HUNG_THREADS = "anybatch-"
"""Prefix of the names of threads that step environments."""


class Interrupts:
    """Turns signals into a request to stop, which the training loop checks at the end of each iteration.

    An iteration that takes longer than another ``patience`` seconds is abandoned: :meth:`check`, called between
    environment steps and between gradient steps, raises :class:`Interrupted`, and the run can be resumed from its last
    checkpoint. A second signal abandons the iteration at once. If a step hangs, no check is reached; within
    :meth:`interruptible` the signal handler itself raises, which ends any wait in Python. Code that swallows the
    exception, or hangs outside Python, can only be ended together with the process.
    """

    active: Interrupts | None = None
    """The object that handles the signals of this process at present."""

    def __init__(self, patience: float = 2.0, *, echo: float = 0.0) -> None:
        """Begin without a request.

        Args:
            patience: seconds that a running iteration has to end.
            echo: seconds during which further signals count as repetitions of the first; torchrun forwards signals
                that the terminal has already sent to its workers.
        """
        self.patience = patience
        self.echo = echo
        self.call_interrupted = False
        """Whether a call within :meth:`interruptible` was abandoned; its object must not be used again."""
        self._deadline: float | None = None
        self._section = 0  # number of the interruptible call that is running; 0 for none
        self._sections = 0
        self._watcher: threading.Thread | None = None
        self._left = threading.Event()
        self._outer: Interrupts | None = None
        self._first_signal: float | None = None
        self._previous: dict[int, _Handler] = {}

    @property
    def requested(self) -> bool:
        """Whether the run has been asked to stop."""
        return self._deadline is not None

    @property
    def overdue(self) -> bool:
        """Whether a stop was requested more than ``patience`` seconds ago."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def request(self) -> None:
        """Ask the run to stop, as a signal would."""
        now = time.monotonic()
        self._deadline = now if self.requested else now + self.patience

    def check(self) -> None:
        """Raise :class:`Interrupted` if a stop was requested more than ``patience`` seconds ago."""
        if self.overdue:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this context a signal raises :class:`Interrupted` inside a call once the patience has run out."""
        outer, self._sections = self._section, self._sections + 1
        self._section = self._sections
        try:
            yield
        finally:
            self._section = outer

    def __enter__(self) -> Interrupts:
        """Catch SIGINT and SIGTERM (in the main thread; elsewhere only :meth:`request` counts)."""
        if threading.current_thread() is threading.main_thread():
            self._outer, Interrupts.active = Interrupts.active, self
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # of nohup, or a process in the background
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers."""
        if self._watcher is not None:
            self._left.set()
            self._watcher.join()
            self._watcher = None
        if Interrupts.active is self:
            Interrupts.active = self._outer
        for number, handler in self._previous.items():
            _restore(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_signal is None or now - self._first_signal >= self.echo:
            self._first_signal = now if self._first_signal is None else self._first_signal
            self.request()
        if self._watcher is None and hasattr(signal, "pthread_kill"):
            self._left.clear()
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        if self._section and self.overdue:
            self.call_interrupted = True
            raise Interrupted

    def _watch(self) -> None:
        """Signal again when the patience has run out, the only way to end a waiting call; then end the process."""
        signalled = 0
        while not self._left.wait(self.patience):
            if signalled and signalled == self._section:
                print("anybatch: a call of the environment cannot be interrupted, so the process ends", file=sys.stderr)
                exit_now(INTERRUPTED)
            signalled = self._section
            signal.pthread_kill(threading.main_thread().ident or 0, next(iter(self._previous)))  # one that is caught


def interruptible() -> AbstractContextManager[None]:
    """:meth:`Interrupts.interruptible` of the object that handles this process's signals, in the main thread."""
    if Interrupts.active is None or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return Interrupts.active.interruptible()


@contextmanager
def separate_calls() -> Iterator[None]:
    """Forget a call that was abandoned in this block, whose objects end with it, such as those of an evaluation."""
    active = Interrupts.active if threading.current_thread() is threading.main_thread() else None
    before = active is not None and active.call_interrupted
    try:
        yield
    finally:
        if active is not None:
            active.call_interrupted = before


def check_interrupt() -> None:
    """:meth:`Interrupts.check` of the object that handles this process's signals, in the main thread."""
    if Interrupts.active is not None and threading.current_thread() is threading.main_thread():
        Interrupts.active.check()


def describe_exit(code: int) -> str:
    """Describe the exit code of a child process: "was killed by SIGKILL (is memory short?)"."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (" (is memory short?)" if name == "SIGKILL" else "")


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
        _restore(signal.SIGINT, previous)


def _restore(number: int, handler: _Handler) -> None:
    """Set a signal's handler of before; one that no Python code has set is None, and cannot be set again."""
    signal.signal(number, signal.SIG_DFL if handler is None else handler)


def exit_beside_hung_threads(code: int) -> None:
    """End the program at once if a thread hangs in an environment; otherwise return.

    Such a thread cannot be ended, and native code in it (EnvPool's) would make the interpreter abort at shutdown.
    The environments' processes are killed as well.
    """
    if any(thread.name.startswith(HUNG_THREADS) for thread in threading.enumerate()):
        exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End the program without cleaning up, and its child processes of :mod:`multiprocessing`."""
    for process in multiprocessing.active_children():
        process.kill()
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a signal handler interrupted the same flush
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
