"""Appendix F: how much the advantage's standard deviation jumps about without the normalisation's adjustment."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from anybatch.reproduce.figures.invariance import batch_label
from anybatch.reproduce.results import Curve, Results
from anybatch.reproduce.style import gradient, hide, legend, panels, steps_axis
from anybatch.reproduce.suites.ladder import ladder
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown


def cells(suite: Suite) -> list[Cell]:
    """Ablation (b), first seed; the default batch is that of all adjustments."""
    tasks = tuple(suite.invariance)
    found = ladder(suite, "all", (1,), tasks) + ladder(suite, "no-advantage-norm", suite.divisors[1:], tasks)
    return [replace(cell, first_seed_only=True) for cell in found]


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """A panel for each environment, on a logarithmic scale."""
    path, tasks = folder / "advantage-std.png", tuple(suite.invariance)
    columns = min(4, len(tasks))
    with panels(path, columns, math.ceil(len(tasks) / columns)) as axes:
        for axis, task in zip(axes, tasks, strict=False):
            scale = steps_axis(axis, suite, (task,), [results["all", task, 1].env_steps])
            colors = gradient(len(suite.divisors))
            for divisor, color in reversed(list(zip(suite.divisors, colors, strict=True))):
                values = _curve(results, task, divisor).values[0]
                values = values[np.isfinite(values)]
                x = np.arange(1, len(values) + 1) / len(values) * scale
                axis.plot(x, np.maximum(values, 1e-4), color=color, lw=0.7, label=batch_label(divisor))
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            axis.set_ylim(min(low, high / 12), high * 1.2)  # at least a decade, so that calm curves look calm
            axis.yaxis.set_minor_formatter("")
            axis.set_title(suite.labels[task])
        for axis in axes[::columns]:
            axis.set_ylabel("advantage std")
        hide(axes[len(tasks) :])
        legend(axes, title="batch size", columns=6)
    return [path]


def _curve(results: Results, task: str, divisor: int) -> Curve:
    return results["all" if divisor == 1 else "no-advantage-norm", task, divisor]


def oscillation(values: np.ndarray) -> float:
    """The factor between the 90th and the 10th percentile of the second half of training."""
    known = values[np.isfinite(values)]
    low, high = np.quantile(known[len(known) // 2 :], [0.1, 0.9])
    return float(high / low) if low > 0 else math.inf


def summary(suite: Suite, results: Results) -> list[str]:
    """By what factor the estimates oscillate, by batch size."""
    rows = []
    for task in suite.invariance:
        factors = [oscillation(_curve(results, task, divisor).values[0]) for divisor in suite.divisors]
        rows.append([suite.labels[task], *("no spread at all" if math.isinf(x) else f"{x:.3g}" for x in factors)])
    return [
        "The factor by which unsmoothed estimates of the advantage's standard deviation oscillate (90th over 10th "
        "percentile in the second half of training, first seed). The paper finds that performance degrades where it is "
        "about 10 or more.",
        markdown(["oscillation", *(batch_label(divisor) for divisor in suite.divisors)], rows),
    ]


FIGURE = Figure(
    "advantage-std",
    "appendix F",
    "unsmoothed advantage standard deviations of ablation (b), first seed",
    cells,
    draw,
    summary,
    column="advantage_std",
)
