"""Appendix F: oscillation of the advantage's standard deviation if its normalisation is not adjusted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Array
from anybatch.reproduce.style import gradient, legend, steps_axis
from anybatch.reproduce.suites.ladder import ladder, ladder_tasks
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import markdown


def runs(suite: Suite) -> list[RunGroup]:
    """Ablation (b), first seed; the default batch is that of all adjustments."""
    tasks = ladder_tasks(suite)
    groups = ladder(suite, "all", (1,), tasks) + ladder(suite, "no-advantage-norm", suite.divisors[1:], tasks)
    return [replace(group, first_seed_only=True) for group in groups]


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw a panel for each environment, on a logarithmic scale."""
    path, tasks = folder / "advantage-std.png", ladder_tasks(suite)
    with figure(path, len(tasks), label="std of the advantage") as axes:
        for axis, task in zip(axes, tasks, strict=True):
            length = steps_axis(axis, {results["all", task, 1].env_steps})
            colors = gradient(len(suite.divisors))
            for divisor, color in reversed(list(zip(suite.divisors, colors, strict=True))):
                values = estimates(results, task, divisor)
                x = np.arange(1, len(values) + 1) / len(values) * length
                axis.plot(x, np.maximum(values, 1e-4), color=color, lw=0.9, label=suite.batch_label(divisor))
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            axis.set_ylim(min(low, high / 12), high * 1.2)  # at least a decade, so that steady curves look steady
            axis.yaxis.set_minor_formatter("")
            axis.set_title(suite.labels[task])
        legend(axes)
    return [path]


def estimates(results: Results, task: str, divisor: int) -> Array:
    """Finite estimates of the first seed in the order of training."""
    values = results[results.source("no-advantage-norm", task, divisor), task, divisor].values[0]
    return values[np.isfinite(values)]


def oscillation(values: Array) -> float:
    """Ratio of the 90th to the 10th percentile in the second half of training; NaN without estimates."""
    if len(values) == 0:
        return math.nan
    low, high = np.quantile(values[len(values) // 2 :], [0.1, 0.9])
    return float(high / low) if low > 0 else math.inf


def _word(factor: float) -> str:
    if math.isnan(factor):
        return "diverged"
    return "∞, the 10th percentile is 0" if math.isinf(factor) else f"{factor:.3g}"


def summary(suite: Suite, results: Results) -> list[str]:
    """Oscillation of the estimates by batch size."""
    rows = []
    for task in suite.invariance:
        factors = [oscillation(estimates(results, task, divisor)) for divisor in suite.divisors]
        rows.append([suite.labels[task], *map(_word, factors)])
    return [
        "Oscillation of unsmoothed estimates of the advantage's standard deviation: ratio of the 90th to the 10th "
        "percentile in the second half of training, first seed. The paper finds that performance degrades where it is "
        "about 10 or more.",
        markdown(["oscillation", *(suite.batch_label(divisor) for divisor in suite.divisors)], rows),
    ]


FIGURE = Figure(
    name="advantage-std",
    paper="appendix F",
    about="unsmoothed advantage standard deviations of ablation (b), first seed",
    tasks=ladder_tasks,
    draw=draw,
    summary=summary,
    runs=runs,
    column="advantage_std",
    aliases=("figure13",),
)
