"""Final returns of cells, as the tests take them, and sentences about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Array, Effect, bootstrap_interval, difference_of_differences, van_elteren
from anybatch.reproduce.style import normalized_curve
from anybatch.reproduce.suites.suite import Suite

LEVEL = 0.001
"""The paper's level of significance, before Bonferroni's correction."""


def final(suite: Suite, results: Results, variant: str, x: int, tasks: Sequence[str]) -> Array:
    """(seeds, tasks) normalised returns at the end of training."""
    columns = []
    for task in tasks:
        values = normalized_curve(suite, results, (variant, task, x)).values
        columns.append(np.nan_to_num(values[:, -suite.final_points :].mean(1)))
    return np.stack(columns, axis=1)


def effect(suite: Suite, results: Results, variant: str, divisor: int, tasks: Sequence[str]) -> Effect:
    """How much more an ablation loses at a smaller batch than all adjustments do: a cell of appendix E's table.

    Ablations that change nothing at the default batch size share its runs.
    """
    at_default = variant if (variant, tasks[0], 1) in results else "all"
    return difference_of_differences(
        final(suite, results, at_default, 1, tasks),
        final(suite, results, variant, divisor, tasks),
        final(suite, results, "all", 1, tasks),
        final(suite, results, "all", divisor, tasks),
    )


def direct(
    suite: Suite, results: Results, first: tuple[str, int], second: tuple[str, int], tasks: Sequence[str]
) -> Effect:
    """How much higher one cell ends than another, with its one-tailed van Elteren test."""
    a, b = final(suite, results, *first, tasks), final(suite, results, *second, tasks)
    return Effect(float(a.mean() - b.mean()), *van_elteren(a, b))


def gap(suite: Suite, results: Results, variant: str, tasks: Sequence[str]) -> tuple[Array, float, tuple[float, float]]:
    """Largest less smallest batch: by task (tasks,), in the mean, and the latter's 95% bootstrap interval."""
    at_default = variant if (variant, tasks[0], 1) in results else "all"
    large = final(suite, results, at_default, 1, tasks)
    small = final(suite, results, variant, suite.divisors[-1], tasks)
    interval = bootstrap_interval((large, small), lambda a, b: float(a.mean() - b.mean()))
    return large.mean(0) - small.mean(0), float(large.mean() - small.mean()), interval


def p_text(p: float) -> str:
    """A probability in print: 0.023, 4.1e-07."""
    return f"{p:.1e}" if p < 0.001 else f"{p:.3f}"
