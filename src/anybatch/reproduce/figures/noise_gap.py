"""Beyond the paper: the gap between batch sizes against the default batch in units of the noise scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anybatch.config.io import override
from anybatch.reproduce.comparisons import MEAN, TASK_MARGIN, Comparison, all_adjustments, different
from anybatch.reproduce.figures.scaling_up import NOISE
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.style import gradient
from anybatch.reproduce.suites.ladder import ladder_tasks
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = 0.045
"""Distance of two labels, as a fraction of the axis."""


def tasks_of(suite: Suite) -> tuple[str, ...]:
    """Tasks of suites whose curves are evaluations, so that a gap is not a lag."""
    return ladder_tasks(suite) if suite.evaluations else ()


def runs(suite: Suite) -> list[RunGroup]:
    """Runs at the default batch that estimate the noise scale."""
    return [
        RunGroup(NOISE, task, 1, override(config, {"log.noise_scale": True}), single=True)
        for task, config in suite.invariance.items()
    ]


def noise_scale(results: Results, task: str) -> float:
    """Smallest noise scale of Adam's updates during training, in samples, in the mean over seeds.

    Where a policy has stopped improving there is only noise, and the noise scale says nothing about how it learned.
    """
    return float(np.fmin.reduce(results[NOISE, task, 1].values, axis=1).mean())


def ratio(suite: Suite, results: Results, task: str) -> float:
    """Samples of a gradient step at the default batch, in units of the noise scale of Adam's updates."""
    return suite.invariance[task].optimization_batch / noise_scale(results, task)


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw the size of the gap in area of every task and batch size."""
    path = folder / "noise-gap.png"
    gaps = [one for one in all_adjustments(suite, results) if one.measure == "area" and one.task != MEAN]
    colors = dict(zip(suite.divisors, gradient(len(suite.divisors)), strict=True))
    with figure(path, width=6.4, height=3.6, label=f"difference in area\nfrom {suite.batch_label(1)}") as (axis,):
        for divisor in suite.divisors[1:]:
            chosen = [one for one in gaps if one.divisor == divisor]
            x = [ratio(suite, results, one.task) for one in chosen]
            sizes = [one.difference.size for one in chosen]
            ends = np.abs(np.array([one.difference.interval() for one in chosen]).T - sizes)
            label, color = suite.batch_label(divisor), colors[divisor]
            axis.errorbar(x, sizes, ends, fmt="o", ms=4, lw=1, color=color, label=label)
        axis.axhspan(-TASK_MARGIN, TASK_MARGIN, color="0.9", zorder=0)
        axis.set_xscale("log", subs=(2, 5))
        axis.set_xlabel("samples of a gradient step at the default batch / noise scale")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
        places = {suite.labels[task]: ratio(suite, results, task) for task in tasks_of(suite)}
        _label(axis, {label: place for label, place in places.items() if math.isfinite(place)})
    return [path]


def _label(axis: Axes, places: dict[str, float]) -> None:
    """Write labels above the axis, at least a line apart, each with a line to its place on it."""
    ends = np.log(axis.get_xlim())
    above = 0.0
    for label, place in sorted(places.items(), key=lambda item: item[1]):
        fraction = (math.log(place) - ends[0]) / (ends[1] - ends[0])
        above = max(fraction, above + _LINE)
        line = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        axis.annotate(
            label,
            (fraction, 1),
            (above, 1.08),
            xycoords="axes fraction",
            textcoords="axes fraction",
            arrowprops=line,
            rotation=60,
            fontsize=7,
        )


def summary(suite: Suite, results: Results) -> list[str]:
    """Noise scales, and every gap that is significant or beyond the margin, with the conditions that bear on it."""
    family = [one for one in all_adjustments(suite, results) if one.task != MEAN]
    failed = [
        (one, flag)
        for one, flag in zip(family, different(family), strict=True)
        if flag or abs(one.difference.size) > TASK_MARGIN
    ]
    scales = [
        [
            suite.labels[task],
            f"{suite.invariance[task].optimization_batch:,.0f}",
            f"{noise_scale(results, task):,.0f}",
            f"{ratio(suite, results, task):.2g}",
        ]
        for task in tasks_of(suite)
    ]
    rows = [_failure(suite, results, one, flag) for one, flag in failed]
    text = f"Where invariance fails: {len(failed)} of {len(family)} differences from {suite.batch_label(1)} are "
    text += f"significant or above {TASK_MARGIN}."
    header = ["task", "batch", "measure", "difference", "significant", "batch / noise scale"]
    return [
        "Noise scale of Adam's updates, the smallest during training: the number of samples from which a larger batch "
        "stops saving gradient steps. "
        "The square root rule for the step size assumes a gradient step of far fewer samples.",
        markdown(["task", "samples of a gradient step", "noise scale", "quotient"], scales),
        text,
        *([markdown(header, rows)] if rows else []),
    ]


def _failure(suite: Suite, results: Results, one: Comparison, significant: bool) -> list[str]:
    return [
        suite.labels[one.task],
        suite.batch_label(one.divisor),
        one.measure,
        f"{one.difference.size:+.3f}",
        "yes" if significant else "no",
        f"{ratio(suite, results, one.task):.2g}",
    ]


FIGURE = Figure(
    name="noise-gap",
    paper="beyond the paper",
    about="the gap between batch sizes against the default batch over the noise scale",
    tasks=tasks_of,
    draw=draw,
    summary=summary,
    runs=runs,
    reads=("invariance",),
)
