"""Final returns of groups of runs, and the comparisons that figures and claims make with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from anybatch.errors import AnybatchError
from anybatch.reproduce.results import Key, Results
from anybatch.reproduce.statistics import (
    Array,
    Effect,
    bonferroni_threshold,
    bootstrap_interval,
    difference_of_differences,
    largest_z,
    normalized,
    van_elteren,
)
from anybatch.reproduce.suites.suite import Suite

LEVEL = 0.001
"""The paper's level of significance, before Bonferroni's correction."""


def threshold(hypotheses: int, *, two_tailed: bool = False) -> float:
    """The Z above which one of several comparisons is significant at 0.1% after Bonferroni's correction."""
    return bonferroni_threshold(LEVEL / 2 if two_tailed else LEVEL, hypotheses)


def normalized_curves(suite: Suite, results: Results, key: Key) -> Array:
    """(seeds, points) normalised returns of a group, which are 0 after a divergence."""
    curve = results[key]
    values = normalized(curve.values, *suite.ranges[key[1]])
    return np.where(np.isnan(values) & np.array(curve.diverged)[:, None], 0.0, values)


def final_returns(
    suite: Suite, results: Results, variant: str, x: int, tasks: Sequence[str], *, points: int | None = None
) -> Array:
    """(seeds, tasks) normalised returns averaged over the last ``points`` of the curves; None takes the suite's."""
    last = slice(-(points or suite.final_points), None)
    curves = (normalized_curves(suite, results, (results.source(variant, task, x), task, x)) for task in tasks)
    ends = [np.nan_to_num(values[:, last].mean(1)) for values in curves]
    if len(set(map(len, ends))) > 1:
        raise AnybatchError(f"{variant} at {x} has more seeds on some tasks than on others: run its figure again")
    return np.stack(ends, axis=1)


def ablation_effect(suite: Suite, results: Results, variant: str, divisor: int, tasks: Sequence[str]) -> Effect:
    """Additional loss of an ablation at a smaller batch, compared with all adjustments (appendix E)."""
    ends = [final_returns(suite, results, name, c, tasks) for name in (variant, "all") for c in (1, divisor)]
    if len(ends[0]) != len(ends[1]) or len(ends[2]) != len(ends[3]):
        raise AnybatchError(
            f"{variant} has {len(ends[1])} seeds and all adjustments have {len(ends[3])}: run both figures with the "
            "same --seeds"
        )
    return difference_of_differences(*ends)


def difference(
    suite: Suite, results: Results, first: tuple[str, int], second: tuple[str, int], tasks: Sequence[str]
) -> Effect:
    """Difference in final return between two variants, with the one-tailed test of the first being better."""
    a, b = final_returns(suite, results, *first, tasks), final_returns(suite, results, *second, tasks)
    return Effect(float(a.mean() - b.mean()), *van_elteren(a, b))


def reachable_z(results: Results, first: Key, second: Key, tasks: Sequence[str]) -> float:
    """The Z that so many seeds of two groups, on so many tasks like theirs, can reach at most."""
    return largest_z(len(results[first].seeds), len(results[second].seeds), len(tasks))


def mean_interval(a: Array, b: Array) -> tuple[float, float]:
    """95% bootstrap interval of the mean of ``a`` less that of ``b``, (seeds, tasks); NaN where one has one seed."""
    if min(len(a), len(b)) == 1:
        return math.nan, math.nan
    return bootstrap_interval((a, b), lambda x, y: float(x.mean() - y.mean()))


def batch_gap(
    suite: Suite, results: Results, variant: str, tasks: Sequence[str]
) -> tuple[Array, float, tuple[float, float]]:
    """Final return at the largest less that at the smallest batch.

    Returns:
        (tasks,) gaps by task, the mean gap, and its 95% bootstrap interval.
    """
    large, small = (final_returns(suite, results, variant, c, tasks) for c in (1, suite.divisors[-1]))
    return large.mean(0) - small.mean(0), float(large.mean() - small.mean()), mean_interval(large, small)
