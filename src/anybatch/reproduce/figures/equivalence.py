"""Beyond the paper: equivalence of all batch sizes, and difference of the ablations, as tests that can fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from anybatch.reproduce.comparisons import (
    DIFFERENCE_LEVEL,
    EQUIVALENCE_LEVEL,
    MEAN,
    MEAN_MARGIN,
    TASK_MARGIN,
    Comparison,
    ablations,
    all_adjustments,
    different,
    equivalent,
    measures,
    next_larger,
    select,
)
from anybatch.reproduce.finals import final_returns, normalized_curves
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import time_to
from anybatch.reproduce.style import LABELS, gradient, legend
from anybatch.reproduce.suites.ladder import ladder_tasks
from anybatch.reproduce.suites.suite import Figure, Suite
from anybatch.reproduce.tables import markdown

MARGINS = (0.01, 0.02, 0.03, 0.05, 0.1)
"""Margins of the sensitivity table."""
NAMES = {"area": "area", "final": "final return"}
"""The measures in words."""
_REACHED = 0.5  # of the default's final return


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw differences from the default batch with 90% intervals, by task, and the margins of equivalence."""
    path, tasks = folder / "equivalence.png", (*ladder_tasks(suite), MEAN)
    compared = all_adjustments(suite, results)
    colors = dict(zip(suite.divisors, gradient(len(suite.divisors)), strict=True))
    shown = measures(suite)
    with figure(path, len(shown), width=4.2, height=1.0 + 0.36 * len(tasks)) as axes:
        for axis, measure in zip(axes, shown, strict=True):
            for row, task in enumerate(tasks):
                margin = MEAN_MARGIN if task == MEAN else TASK_MARGIN
                axis.fill_betweenx([row - 0.45, row + 0.45], -margin, margin, color="0.9", linewidth=0)
                for k, divisor in enumerate(suite.divisors[1:]):
                    ((one, _),) = select(compared, compared, task=task, measure=measure, divisor=divisor)
                    low, high = one.difference.interval()
                    y = row + 0.22 * (k - (len(suite.divisors) - 2) / 2)
                    label = f"{suite.batch_label(divisor)} − {suite.batch_label(1)}" if row == 0 else None
                    axis.plot([low, high], [y, y], color=colors[divisor], lw=1.4)
                    axis.plot([one.difference.size], [y], "o", ms=4, color=colors[divisor], label=label)
            axis.axvline(0, color="0.2", linewidth=0.8)
            names = ["mean over tasks" if task == MEAN else suite.labels[task] for task in tasks]
            axis.set_yticks(range(len(tasks)), names if axis is axes[0] else [""] * len(tasks))
            axis.invert_yaxis()
            axis.set_xlabel(f"difference in {NAMES[measure]}")
        legend(axes)
    return [path]


def verdicts(family: Sequence[Comparison]) -> list[str]:
    """For each comparison: equivalent, different, both (a small difference that is certain), or undecided."""
    words = {(True, False): "equivalent", (False, True): "different", (True, True): "equivalent, different"}
    pairs = zip(equivalent(family), different(family), strict=True)
    return [words.get(pair, "undecided") for pair in pairs]


def summary(suite: Suite, results: Results) -> list[str]:
    """Equivalence in the mean and by task, ablations, times, and the same tests with other margins."""
    compared, ablated = all_adjustments(suite, results), ablations(suite, results)
    mean = [one for one in compared if one.task == MEAN]
    by_task = [one for one in compared if one.task != MEAN]
    return [
        f"Differences from {suite.batch_label(1)} in normalised return. Area: mean height of the learning curve. "
        f"Equivalent: the difference is within ±{MEAN_MARGIN} in the mean over tasks, or ±{TASK_MARGIN} on a task, by "
        f"two one-sided Welch tests at {EQUIVALENCE_LEVEL:.0%}. Different: two-sided Welch test at "
        f"{DIFFERENCE_LEVEL:.1%}. Both with Holm's correction within a table. Undecided: too few seeds to show either. "
        "Intervals are of 90%. Ablation (d) is compared with the default batch without EWMA.",
        _mean_table(suite, mean, f"− {suite.batch_label(1)}"),
        "Each batch size less the next larger one. A lag of the default batch alone shows only in the first row.",
        _mean_table(suite, next_larger(suite, results), "− the next larger"),
        _task_table(suite, by_task),
        *([_ablation_table(suite, ablated)] if ablated else []),
        f"Equivalence with other margins: in the mean over tasks (of {len(measures(suite))} measures), then the number "
        "of tasks. An ablation that is not worse than the rules would pass as they do.",
        _margin_table(suite, compared, ablated),
        f"Thousand environment steps until the mean curve reaches {_REACHED:g} of the final return of "
        f"{suite.batch_label(1)}.",
        _time_table(suite, results),
    ]


def with_interval(one: Comparison) -> str:
    """The size of a difference with its interval of 90%."""
    if not one.difference.decides:
        return f"{one.difference.size:+.3f} (one seed)"
    low, high = one.difference.interval()
    return f"{one.difference.size:+.3f} ({low:+.3f} to {high:+.3f})"


def _mean_table(suite: Suite, family: Sequence[Comparison], reference: str) -> str:
    words, rows = verdicts(family), []
    for divisor in suite.divisors[1:]:
        cells = [(with_interval(one), word) for one, word in select(family, words, divisor=divisor)]
        rows.append([suite.batch_label(divisor), *(text for pair in cells for text in pair)])
    header = [text for measure in measures(suite) for text in (NAMES[measure], "verdict")]
    return markdown([f"mean over tasks, {reference}", *header], rows)


def _task_table(suite: Suite, family: Sequence[Comparison]) -> str:
    words, rows = verdicts(family), []
    for task in ladder_tasks(suite):
        for measure in measures(suite):
            cells = [
                f"{one.difference.size:+.3f} {word}" for one, word in select(family, words, task=task, measure=measure)
            ]
            rows.append([f"{suite.labels[task]}, {NAMES[measure]}", *cells])
    return markdown(["all adjustments", *(suite.batch_label(c) for c in suite.divisors[1:])], rows)


def _ablation_table(suite: Suite, family: Sequence[Comparison]) -> str:
    flags, rows = different(family), []
    for variant, divisor in dict.fromkeys((one.variant, one.divisor) for one in family):
        chosen = list(select(family, flags, variant=variant, divisor=divisor))
        cells = [with_interval(one) for one, _ in chosen if one.task == MEAN]
        rows.append([f"{LABELS[variant]}, {suite.batch_label(divisor)}", *cells, signs(suite, chosen)])
    header = [f"mean {NAMES[measure]}" for measure in measures(suite)]
    return markdown(["ablation", *header, "different on"], rows)


def signs(suite: Suite, chosen: Sequence[tuple[Comparison, bool]]) -> str:
    """Tasks with a difference in either measure, and the mean over tasks, with the sign."""
    found: dict[str, str] = {}
    for one, flag in chosen:
        if flag:
            label = "the mean" if one.task == MEAN else suite.labels[one.task]
            found.setdefault(label, "lower" if one.difference.size < 0 else "higher")
    return ", ".join(f"{label} ({word})" for label, word in found.items()) or "none"


def _margin_table(suite: Suite, compared: Sequence[Comparison], ablated: Sequence[Comparison]) -> str:
    cells: dict[str, list[str]] = {}
    for margin in MARGINS:
        for family in (compared, ablated):
            means, tasks = ([one for one in family if (one.task == MEAN) == mean] for mean in (True, False))
            in_mean, on_task = equivalent(means, margin), equivalent(tasks, margin)
            for variant, divisor in dict.fromkeys((one.variant, one.divisor) for one in family):
                mean = [flag for _, flag in select(means, in_mean, variant=variant, divisor=divisor)]
                task = [flag for _, flag in select(tasks, on_task, variant=variant, divisor=divisor)]
                both = [all(pair) for pair in zip(*np.array_split(task, len(measures(suite))), strict=True)]
                row = cells.setdefault(f"{LABELS[variant]}, {suite.batch_label(divisor)}", [])
                row.append(f"{sum(mean)}; {sum(both)} of {len(both)}")
    rows = [[name, *row] for name, row in cells.items()]
    return markdown(["margin", *(f"±{margin:g}" for margin in MARGINS)], rows)


def _time_table(suite: Suite, results: Results) -> str:
    rows = []
    for task in ladder_tasks(suite):
        level = _REACHED * float(final_returns(suite, results, "all", 1, (task,)).mean())
        length = results["all", task, 1].env_steps / 1000
        cells = []
        for divisor in suite.divisors:
            curve = np.nan_to_num(normalized_curves(suite, results, ("all", task, divisor)).mean(0))
            time = time_to(curve, level) * length
            # nothing is known before the first point
            cells.append("never" if np.isnan(time) else f"{'≤ ' if curve[0] >= level else ''}{time:.0f}")
        rows.append([suite.labels[task], *cells])
    return markdown(["thousand steps", *(suite.batch_label(c) for c in suite.divisors)], rows)


FIGURE = Figure(
    name="equivalence",
    paper="beyond the paper",
    about="tests of equivalence of all batch sizes, and of difference of the ablations",
    tasks=ladder_tasks,
    draw=draw,
    summary=summary,
    reads=("invariance",),
    reads_if_trained=("linear-step",),
    has_table=False,
)
