"""How a grid is doing: one live table in a terminal, one line for each change elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anybatch.grid.job import last_row
from anybatch.grid.runner import Display, Outcome

_REFRESH_SECONDS = 1.0
_MOST_ROWS = 30


def make_display(outcomes: Sequence[Outcome], *, quiet: bool) -> Display:
    """A live table if standard error is a terminal, else lines; nothing if ``quiet``."""
    if quiet:
        return Silent()
    return Live() if sys.stderr.isatty() else Lines(outcomes)


class Silent:
    """Shows nothing."""

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing."""

    def close(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing."""


class Lines:
    """One line whenever a run begins or ends."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        """Tell what there is to do."""
        self._shown = {id(outcome): outcome.status for outcome in outcomes}
        print(_summary(outcomes), file=sys.stderr, flush=True)

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Print what has changed."""
        for outcome in outcomes:
            if self._shown[id(outcome)] != outcome.status:
                self._shown[id(outcome)] = outcome.status
                text = "starts again" if outcome.status == "waiting" else outcome.status
                why = f": {outcome.error}" if outcome.error and outcome.status in ("waiting", "failed") else ""
                print(f"{outcome.job.label}: {text}{why}", file=sys.stderr, flush=True)

    def close(self, outcomes: Sequence[Outcome]) -> None:
        """Print the failures and the counts."""
        self.update(outcomes)
        _close(outcomes)


class Live:
    """A table that is drawn over itself: what runs, then what failed, waits and is done, as far as it fits."""

    def __init__(self) -> None:
        """Begin to draw."""
        from rich.console import Console
        from rich.live import Live as RichLive

        self._live: Any = RichLive(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._live.start()
        self._drawn = -math.inf
        self._began: dict[int, tuple[float, float]] = {}

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Draw again, once a second."""
        if time.monotonic() - self._drawn >= _REFRESH_SECONDS:
            self._drawn = time.monotonic()
            self._live.update(self._table(outcomes), refresh=True)

    def close(self, outcomes: Sequence[Outcome]) -> None:
        """Leave the failures and the counts."""
        self._live.stop()
        _close(outcomes)

    def _table(self, outcomes: Sequence[Outcome]) -> Any:
        from rich.table import Table

        order = ("running", "failed", "interrupted", "waiting", "done")
        ranked = sorted(outcomes, key=lambda outcome: order.index(outcome.status))
        table = Table(title=_summary(outcomes), title_justify="left")
        for column in ("run", "status", "done", "steps/s", "return", "left"):
            table.add_column(column, justify="left" if column in ("run", "status") else "right")
        for outcome in ranked[:_MOST_ROWS]:
            table.add_row(*self._cells(outcome))
        if len(ranked) > _MOST_ROWS:
            table.add_row(f"... and {len(ranked) - _MOST_ROWS} more")
        return table

    def _cells(self, outcome: Outcome) -> list[str]:
        row = last_row(outcome.folder)
        steps, total = row.get("env_steps", 0.0), outcome.job.config.total_env_steps
        score = row.get("mean_episode_return", math.nan)
        rate, left = "", ""
        if outcome.status == "running":
            since, before = self._began.setdefault(id(outcome), (time.monotonic(), steps))
            speed = (steps - before) / max(time.monotonic() - since, 1e-9)
            rate = f"{speed:,.0f}" if speed else ""
            left = _clock((total - steps) / speed) if speed else ""
        again = f" ({outcome.starts})" if outcome.starts > 1 else ""
        shown = "" if math.isnan(score) else f"{score:.2f}"
        return [outcome.job.label, outcome.status + again, f"{min(1.0, steps / total):.0%}", rate, shown, left]


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    return f"{len(outcomes)} runs: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def _close(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        table = Table(title="failed runs", title_justify="left")
        for column in ("run", "starts", "why", "log"):
            table.add_column(column, overflow="fold")
        for outcome in failed:
            table.add_row(outcome.job.label, str(outcome.starts), outcome.error, str(outcome.folder / "log.txt"))
        console.print(table, markup=False)
    console.print(_summary(outcomes), markup=False, highlight=False)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
