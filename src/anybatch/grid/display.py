"""Progress of a grid: a live table in a terminal, one line per change elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from anybatch.grid.job import LOG, UNSUCCESSFUL, Outcome
from anybatch.grid.run_folder import last_row

_REFRESH_SECONDS = 1.0
_MAX_ROWS = 30
_ORDER = ("running", "failed", "diverged", "interrupted", "waiting", "done")


class Display:
    """A view of a grid's progress; this one shows nothing."""

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Show the current state; called several times a second."""

    def close(self, outcomes: Sequence[Outcome]) -> None:
        """Show the final state."""


def make_display(outcomes: Sequence[Outcome], *, quiet: bool) -> Display:
    """A live table if standard error is a terminal, otherwise lines; nothing if ``quiet``."""
    if quiet:
        return Display()
    return _LiveTable() if sys.stderr.isatty() else _StatusLines(outcomes)


class _StatusLines(Display):
    """One line whenever a run starts or ends."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._printed = {id(outcome): outcome.status for outcome in outcomes}
        print(_summary(outcomes), file=sys.stderr, flush=True)

    def update(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if self._printed[id(outcome)] != outcome.status:
                self._printed[id(outcome)] = outcome.status
                text = "restarting" if outcome.status == "waiting" else outcome.status
                reason = f": {outcome.error}" if outcome.error and outcome.status in ("waiting", *UNSUCCESSFUL) else ""
                print(f"{outcome.job.label}: {text}{reason}", file=sys.stderr, flush=True)

    def close(self, outcomes: Sequence[Outcome]) -> None:
        self.update(outcomes)
        _print_result(outcomes)


class _LiveTable(Display):
    """A table that is redrawn in place: running jobs first, then failed, interrupted, waiting and finished ones."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live: Any = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._live.start()
        self._drawn = -math.inf
        self._started_at: dict[tuple[int, int], tuple[float, float]] = {}

    def update(self, outcomes: Sequence[Outcome]) -> None:
        if time.monotonic() - self._drawn >= _REFRESH_SECONDS:
            self._drawn = time.monotonic()
            self._live.update(self._table(outcomes), refresh=True)

    def close(self, outcomes: Sequence[Outcome]) -> None:
        self._live.stop()
        _print_result(outcomes)

    def _table(self, outcomes: Sequence[Outcome]) -> Any:
        ranked = sorted(outcomes, key=lambda outcome: _ORDER.index(outcome.status))
        rows = [self._cells(outcome) for outcome in ranked[:_MAX_ROWS]]
        if len(ranked) > _MAX_ROWS:
            rows.append([f"... and {len(ranked) - _MAX_ROWS} more"])
        return _rich_table(_summary(outcomes), ("run", "status", "done", "steps/s", "return", "left"), rows)

    def _cells(self, outcome: Outcome) -> list[str]:
        row = last_row(outcome.folder)
        steps, total = row.get("env_steps", 0.0), outcome.job.config.total_env_steps
        score = row.get("mean_episode_return", math.nan)
        rate = left = ""
        if outcome.status == "running":
            key = id(outcome), outcome.starts
            start_time, start_steps = self._started_at.setdefault(key, (time.monotonic(), steps))
            speed = (steps - start_steps) / max(time.monotonic() - start_time, 1e-9)
            if speed > 0:
                rate, left = f"{speed:,.0f}", str(timedelta(seconds=round((total - steps) / speed)))
        starts = f" ({outcome.starts})" if outcome.starts > 1 else ""
        shown = "" if math.isnan(score) else f"{score:.2f}"
        return [outcome.job.label, outcome.status + starts, f"{min(1.0, steps / total):.0%}", rate, shown, left]


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table whose cells are shown as they are: rich would read square brackets as markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        justify: Any = "left" if column in ("run", "status", "error", "log") else "right"
        table.add_column(column, overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    return f"{len(outcomes)} runs: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def _print_result(outcomes: Sequence[Outcome]) -> None:
    """Print the failed runs and the number of runs in each state."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())
    if failed := [outcome for outcome in outcomes if outcome.status in UNSUCCESSFUL]:
        rows = [[x.job.label, str(x.starts), x.error, str(x.folder / LOG)] for x in failed]
        console.print(_rich_table("failed runs", ("run", "starts", "error", "log"), rows))
    console.print(_summary(outcomes), markup=False, highlight=False)
