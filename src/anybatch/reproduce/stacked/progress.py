"""What R runs show while they train: some rows of each, in progress.csv's columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from anybatch.reproduce.stacked.rollouts import Episodes

Columns = dict[str, np.ndarray]
"""Column name to one number a row; NaN where there is none."""

WINDOWS = {"mean_episode_return": 100, "mean_episode_return_400": 400}
"""Episodes that each mean return covers."""


class ProgressTable:
    """Collects rows of R runs, evenly spaced, with the last iteration among them.

    ``episode_return_sum`` and ``episodes`` count from the start, so that the mean return of all episodes between two
    rows follows from their differences.
    """

    def __init__(self, runs: int, iterations: int, rows: int | None) -> None:
        """At most about ``rows`` rows of ``iterations`` iterations; None keeps all."""
        self._runs = runs
        self._every = 1 if rows is None else max(1, math.ceil(iterations / rows))
        self._iterations = iterations
        self._rows: list[dict[str, np.ndarray]] = []
        self._kept = [0] * runs

    def wanted(self, iteration: int) -> bool:
        """Whether an iteration, counted from 1, gets a row."""
        return iteration % self._every == 0 or iteration == self._iterations

    def append(
        self,
        counters: Mapping[str, int],
        episodes: Episodes,
        statistics: Mapping[str, Tensor],
        alive: Tensor,
    ) -> None:
        """Add a row.

        Args:
            counters: what the runs have in common.
            episodes: the ended episodes so far.
            statistics: (R,) further columns.
            alive: (R,) bool, runs that get this row.
        """
        row: dict[str, np.ndarray] = {name: np.full(self._runs, count) for name, count in counters.items()}
        for name, window in WINDOWS.items():
            row[name] = np.array([_mean(list(recent)[-window:]) for recent in episodes.recent_returns])
        shortest = min(WINDOWS.values())
        row["mean_episode_length"] = np.array([_mean(list(recent)[-shortest:]) for recent in episodes.recent_lengths])
        row["episodes"] = episodes.count.copy()
        row["episode_return_sum"] = episodes.total.copy()
        row |= {name: value.double().numpy() for name, value in statistics.items()}
        self._rows.append(row)
        for run in torch.nonzero(alive).flatten().tolist():
            self._kept[run] = len(self._rows)

    def columns(self, run: int) -> Columns:
        """The rows of one run, up to its last."""
        rows = self._rows[: self._kept[run]]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([row[name][run] if name in row else math.nan for row in rows]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
