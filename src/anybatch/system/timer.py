"""Seconds that each phase of an iteration takes, as columns of progress.csv."""

from __future__ import annotations

import time


class PhaseTimer:
    """Splits the time of an iteration among its phases."""

    def __init__(self, phases: tuple[str, ...]) -> None:
        """``phases``: names, each of which gets a column ``seconds_NAME`` in every row."""
        self._columns = dict.fromkeys((f"seconds_{phase}" for phase in phases), 0.0)
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Start an iteration."""
        self._columns = dict.fromkeys(self._columns, 0.0)
        self._start = time.perf_counter()

    def end(self, phase: str) -> None:
        """Assign the time since the end of the phase before to ``phase``."""
        now = time.perf_counter()
        self._columns[f"seconds_{phase}"] += now - self._start
        self._start = now

    def columns(self) -> dict[str, float]:
        """Seconds of this iteration by column."""
        return dict(self._columns)
