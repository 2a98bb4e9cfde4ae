"""Comparisons of smaller batches with the default one, as tests of equivalence and of difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

from anybatch.reproduce.finals import final_returns
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import MeanDifference, holm, mean_difference
from anybatch.reproduce.suites.ladder import ABLATIONS, ladder_tasks, ppg_tasks
from anybatch.reproduce.suites.suite import Suite

Measure = Literal["area", "final"]
Flag = TypeVar("Flag")
MEAN = "mean"
"""Stands for the mean over tasks among their names."""

MEAN_MARGIN, TASK_MARGIN = 0.02, 0.05
"""Largest difference in normalised return that still counts as equivalent, in the mean over tasks and on one task."""
EQUIVALENCE_LEVEL = 0.05
"""Level of the tests of equivalence."""
DIFFERENCE_LEVEL = 0.001
"""Level of the tests of difference, the paper's."""


@dataclass(frozen=True)
class Comparison:
    """The normalised return of a smaller batch less that of a larger one, of the same algorithm."""

    variant: str
    divisor: int
    measure: Measure
    task: str
    """A task, or :data:`MEAN`."""
    difference: MeanDifference

    @property
    def margin(self) -> float:
        """The margin of equivalence."""
        return MEAN_MARGIN if self.task == MEAN else TASK_MARGIN


def measures(suite: Suite) -> tuple[Measure, ...]:
    """Area under the curve and final return; the latter alone where curves lag by an amount that the batch determines.

    An area is the mean height of a normalised curve.
    """
    return ("area", "final") if suite.evaluations else ("final",)


def compare(suite: Suite, results: Results, variant: str, divisor: int, reference: int = 1) -> list[Comparison]:
    """Compare the default batch divided by ``divisor`` with that divided by ``reference``, in each measure.

    In the mean over tasks first, then on each task.

    Ablation (d) is compared with its own default batch, that of the same algorithm without EWMA; the others change
    nothing there.
    """
    tasks = tasks_of(suite, variant)
    compared = []
    for measure in measures(suite):
        for name, chosen in ((MEAN, tasks), *((task, (task,)) for task in tasks)):
            points = suite.points if measure == "area" else None
            small, large = (
                final_returns(suite, results, variant, c, chosen, points=points) for c in (divisor, reference)
            )
            compared.append(Comparison(variant, divisor, measure, name, mean_difference(small, large)))
    return compared


def tasks_of(suite: Suite, variant: str) -> tuple[str, ...]:
    """Tasks that a variant was trained on."""
    return ppg_tasks(suite) if variant == "no-policy-iterations" else ladder_tasks(suite)


def all_adjustments(suite: Suite, results: Results) -> list[Comparison]:
    """Every smaller batch with all adjustments."""
    return [one for divisor in suite.divisors[1:] for one in compare(suite, results, "all", divisor)]


def next_larger(suite: Suite, results: Results) -> list[Comparison]:
    """Every batch with all adjustments less the next larger one, in the mean over tasks."""
    pairs = pairwise(suite.divisors)
    compared = [one for large, small in pairs for one in compare(suite, results, "all", small, reference=large)]
    return [one for one in compared if one.task == MEAN]


def ablations(suite: Suite, results: Results) -> list[Comparison]:
    """Every ablation at every batch size that it was trained with: the paper's four, (e), and the linear rule."""
    return [
        one
        for variant in (*ABLATIONS, "no-policy-iterations", "linear-step")
        if (tasks := tasks_of(suite, variant)) and (variant, tasks[0], suite.ablated[-1]) in results
        for divisor in suite.ablated
        for one in compare(suite, results, variant, divisor)
    ]


def equivalent(family: Sequence[Comparison], margin: float | None = None) -> list[bool]:
    """Whether each comparison shows equivalence: two one-sided tests, with Holm's correction over the family.

    ``margin`` replaces those of the comparisons.
    """
    p_values = [one.difference.p_equivalent(one.margin if margin is None else margin) for one in family]
    return [p < EQUIVALENCE_LEVEL for p in holm(p_values)]


def different(family: Sequence[Comparison]) -> list[bool]:
    """Whether each comparison shows a difference: Welch's two-sided test, with Holm's correction over the family."""
    return [p < DIFFERENCE_LEVEL for p in holm([one.difference.p_different() for one in family])]


def select(family: Sequence[Comparison], flags: Sequence[Flag], **wanted: object) -> Iterator[tuple[Comparison, Flag]]:
    """The comparisons with the given fields, with what was found for each."""
    for one, flag in zip(family, flags, strict=True):
        if all(getattr(one, name) == value for name, value in wanted.items()):
            yield one, flag
