"""Normalised learning curves of single runs of the ladder's tasks."""

from __future__ import annotations

import numpy as np

from anybatch.reproduce.results import curve_points
from anybatch.reproduce.stacked import RunResult
from anybatch.reproduce.statistics import Array, normalized
from anybatch.reproduce.suites.ladder_tasks import TASKS


def normalized_curve(task: str, result: RunResult, points: int) -> Array:
    """The evaluations of a run (points,), normalised; 0 after a divergence."""
    curve = curve_points(result.columns, result.config, "eval_return", points, diverged=result.diverged)
    return np.nan_to_num(normalized(curve, TASKS[task].low, TASKS[task].high))
