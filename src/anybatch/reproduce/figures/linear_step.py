"""Appendix C: Adam's step size divided by c instead of by its square root."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anybatch.reproduce.figures.invariance import batch_label, draw_tasks
from anybatch.reproduce.finals import effect, p_text
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Array, bonferroni_threshold, van_elteren
from anybatch.reproduce.style import (
    NORMALIZED,
    gradient,
    legend,
    line,
    mean_over_tasks,
    normalized_curve,
    panels,
    steps_axis,
)
from anybatch.reproduce.suites.ladder import ladder
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown


def cells(suite: Suite) -> list[Cell]:
    """Every smaller batch; the default one and the square-root rule are figure 2's."""
    return ladder(suite, "linear-step", suite.divisors[1:], suite.invariance)


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Both rules side by side, and the linear one by environment."""
    path, tasks = folder / "linear-step.png", tuple(suite.invariance)
    with panels(path, 2, width=3.2, height=2.4) as axes:
        for axis, variant in zip(axes, ("all", "linear-step"), strict=True):
            scale = steps_axis(axis, suite, tasks, [results["all", task, 1].env_steps for task in tasks])
            for divisor, color in zip(suite.divisors, gradient(len(suite.divisors)), strict=True):
                source = variant if divisor > 1 else "all"
                progress, values = mean_over_tasks(suite, results, source, divisor, tasks)
                line(axis, progress * scale, values, color=color, label=batch_label(divisor))
            axis.set_ylim(-0.05, 1.08)
        axes[0].set_title(r"$\alpha/\sqrt{c}$ (all adjustments)")
        axes[1].set_title(r"$\alpha/c$ (linear)")
        axes[0].set_ylabel(NORMALIZED)
        legend(axes, title="batch size", columns=6)
    return [path, draw_tasks(suite, results, "linear-step", folder / "linear-step-by-environment.png")]


def summary(suite: Suite, results: Results) -> list[str]:
    """Effects on the final return and on the mean return over all of training."""
    tasks, smaller = tuple(suite.invariance), suite.divisors[1:]
    threshold = bonferroni_threshold(0.001, len(smaller))
    rows = []
    for divisor in smaller:
        size, z, p = effect(suite, results, "linear-step", divisor, tasks)
        areas = [area(suite, results, variant, divisor, tasks) for variant in ("all", "linear-step")]
        test = van_elteren(*areas)
        rows.append(
            [
                f"default vs {batch_label(divisor)}",
                f"{size:+.3f}",
                f"{z:.2f}",
                p_text(p),
                f"{areas[0].mean():.3f}",
                f"{areas[1].mean():.3f}",
                f"{test.z:.2f}",
                p_text(test.p),
            ]
        )
    head = ["batch", "effect on final", "Z", "p", "area, sqrt", "area, linear", "Z", "p"]
    return [
        "The linear rule against the square-root rule: difference of differences in final normalised return as in "
        "appendix E, and the area under the curve (the mean over training) at each batch size. Z above "
        f"{threshold:.2f} is significant at 0.1% after the correction for {len(smaller)} hypotheses.",
        markdown(head, rows),
    ]


def area(suite: Suite, results: Results, variant: str, divisor: int, tasks: tuple[str, ...]) -> Array:
    """(seeds, tasks) normalised returns averaged over all of training."""
    curves = [normalized_curve(suite, results, (variant, task, divisor)).values for task in tasks]
    return np.stack([np.nan_to_num(values.mean(1)) for values in curves], axis=1)


FIGURE = Figure(
    "linear-step",
    "appendix C",
    "a linear instead of a square-root adjustment of Adam's step size",
    cells,
    draw,
    summary,
    reads=("invariance",),
)
