"""Progress of long work on standard error: a bar in a terminal, occasional lines in notebooks and files."""

from __future__ import annotations

import sys
import time
from typing import Any

_FIRST_SECONDS, _MOST_SECONDS = 5.0, 600.0  # between lines; each pause is twice the one before


class Display:
    """Shows how much is done, how fast, the time so far and the time left; also a context manager."""

    def __init__(self, total: int, unit: str, *, done: int = 0) -> None:
        """Begin.

        Args:
            total: of what is to be done.
            unit: of what, in the plural, such as "steps".
            done: how many were done before.
        """
        self._total, self._unit, self._start, self._done = total, unit, done, done
        self._began = time.monotonic()
        self._pause, self._next = _FIRST_SECONDS, self._began + _FIRST_SECONDS
        self._lines = 0
        self._text = ""
        self._bar: Any = _bar() if sys.stderr.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("starting", total=total, completed=done)
            self._bar.start()

    def update(self, done: int, text: str = "") -> None:
        """Show that ``done`` are done, with a text about them."""
        self._done, self._text = done, f"{text}  " if text else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, self._total), description=self._description())
        elif time.monotonic() >= self._next:
            self._print(self._description())

    def note(self, text: str) -> None:
        """Show the current activity while the number does not grow; the next :meth:`update` replaces it."""
        text = f"{self._description()}  {text}" if self._done > self._start else text
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif time.monotonic() >= self._next:
            self._print(text)

    def close(self) -> None:
        """Stop the bar and release the terminal; or end the lines with one about all of it, if there were any."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._lines:
            self._print(self._description())
            self._lines = 0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _description(self) -> str:
        # rich estimates the rate over the last 30 seconds, and one update can take longer
        rate = (self._done - self._start) / max(time.monotonic() - self._began, 1e-9)
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        left = _clock(max(self._total - self._done, 0) / rate) if rate > 0 else "-"
        return f"{speed} {self._unit}/s  {self._text}ETA {left}"

    def _print(self, description: str) -> None:
        now = time.monotonic()
        self._pause = min(2 * self._pause, _MOST_SECONDS)
        self._next, self._lines = now + self._pause, self._lines + 1
        share = min(1.0, self._done / self._total) if self._total else 1.0
        line = f"{share:.0%} of {self._total:,} {self._unit}  {description}  elapsed {_clock(now - self._began)}"
        print(line, file=sys.stderr, flush=True)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=2,
    )


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
