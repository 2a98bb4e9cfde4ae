"""Stop requests: Ctrl-C and SIGTERM end a run at the next good moment."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType


class Interrupted(BaseException):
    """The run was asked to stop; like KeyboardInterrupt it passes through ``except Exception``."""


class Interrupts:
    """Turns signals into a request that the training loop honours at the end of its iteration.

    An iteration that would take longer than ``patience`` seconds is abandoned instead: :meth:`check`, called between
    environment steps and between gradient steps, then raises :class:`Interrupted`, and the run goes on later from its
    last checkpoint. A second signal abandons it at once.
    """

    def __init__(self, patience: float = 4.0) -> None:
        """``patience``: seconds that a running iteration is given to end."""
        self.patience = patience
        self._deadline: float | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether the run has been asked to stop."""
        return self._deadline is not None

    def request(self) -> None:
        """Ask the run to stop, as a signal would."""
        now = time.monotonic()
        self._deadline = now if self.requested else now + self.patience

    def check(self) -> None:
        """Raise :class:`Interrupted` if a stop was requested and the iteration has had its time."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise Interrupted

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
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request()
