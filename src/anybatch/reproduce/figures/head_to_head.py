"""Figure 4: PPO, PPO-EWMA, PPG and PPG-EWMA at the default batch size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.reproduce.finals import direct, final, p_text
from anybatch.reproduce.plots import BLUE, VERMILION
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import band, bonferroni_threshold, bootstrap_interval, probability_of_improvement
from anybatch.reproduce.style import (
    ALGORITHM_COLORS,
    LABELS,
    NORMALIZED,
    hide,
    legend,
    line,
    mean_over_tasks,
    panels,
    steps_axis,
)
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown

PAIRS = (("ppo-ewma", "ppo"), ("ppg-ewma", "ppg"))


def cells(suite: Suite) -> list[Cell]:
    """Every algorithm on every task."""
    return [
        Cell(name, task, 1, config) for name, configs in suite.algorithms.items() for task, config in configs.items()
    ]


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Mean curves beside the differences by environment, and curves by environment."""
    tasks = _tasks(suite)
    with panels(folder / "head-to-head.png", 2, width=3.9, height=2.7) as axes:
        _curves(axes[0], suite, results, tasks)
        axes[0].set_ylabel(NORMALIZED)
        for k, ((ours, baseline), color) in enumerate(zip(PAIRS, (BLUE, VERMILION), strict=True)):
            a, b = (final(suite, results, name, 1, tasks) for name in (ours, baseline))
            error = np.sqrt(band(a).sem ** 2 + band(b).sem ** 2)
            place = np.arange(len(tasks)) + 0.36 * (k - 0.5)
            label = f"{LABELS[ours]} − {LABELS[baseline]}"
            axes[1].bar(place, a.mean(0) - b.mean(0), 0.34, yerr=error, color=color, label=label, error_kw={"lw": 0.8})
        axes[1].axhline(0, color="0.2", linewidth=0.8)
        rotation = 0 if len(tasks) < 7 else 60
        axes[1].set_xticks(range(len(tasks)), [suite.labels[task] for task in tasks], rotation=rotation)
        axes[1].grid(visible=False, axis="x")
        axes[1].set_ylabel("difference in final\nnormalised return")
        axes[0].legend(fontsize=8)
        axes[1].legend(fontsize=8, loc="upper left")
    path = folder / "head-to-head-by-environment.png"
    columns = min(4, len(tasks))
    with panels(path, columns, math.ceil(len(tasks) / columns)) as axes:
        for axis, task in zip(axes, tasks, strict=False):
            _curves(axis, suite, results, (task,))
            axis.set_title(suite.labels[task])
        for axis in axes[::columns]:
            axis.set_ylabel(NORMALIZED)
        hide(axes[len(tasks) :])
        legend(axes)
    return [folder / "head-to-head.png", path]


def _tasks(suite: Suite) -> tuple[str, ...]:
    return tuple(next(iter(suite.algorithms.values())))


def _curves(axis: Any, suite: Suite, results: Results, tasks: tuple[str, ...]) -> None:
    scale = steps_axis(axis, suite, tasks, [results["ppo", task, 1].env_steps for task in tasks])
    for name in suite.algorithms:
        progress, values = mean_over_tasks(suite, results, name, 1, tasks)
        line(axis, progress * scale, values, color=ALGORITHM_COLORS[name], label=LABELS[name])
    axis.set_ylim(-0.05, 1.08)


def summary(suite: Suite, results: Results) -> list[str]:
    """Whether the EWMA helps, or that it makes no difference here."""
    tasks = _tasks(suite)
    threshold = bonferroni_threshold(0.001, len(PAIRS))
    rows, sentences = [], []
    for ours, baseline in PAIRS:
        a, b = (final(suite, results, name, 1, tasks) for name in (ours, baseline))
        size, z, p = direct(suite, results, (ours, 1), (baseline, 1), tasks)
        low, high = bootstrap_interval((a, b), lambda x, y: float(x.mean() - y.mean()))
        rows.append(
            [
                f"{LABELS[ours]} over {LABELS[baseline]}",
                *(f"{x:+.3f}" for x in a.mean(0) - b.mean(0)),
                f"{size:+.3f}",
                f"{low:+.3f} to {high:+.3f}",
                f"{probability_of_improvement(a, b):.3f}",
                f"{z:.2f}",
                p_text(p),
            ]
        )
        if abs(z) > threshold:
            verdict = f"ends {'above' if z > 0 else 'below'} {LABELS[baseline]}, and the difference is significant"
        else:
            verdict = f"cannot be told apart from {LABELS[baseline]}: a null result"
        sentences.append(f"{LABELS[ours]} {verdict} ({size:+.3f}, Z = {z:.2f}).")
    head = ["difference", *(suite.labels[task] for task in tasks), "mean", "95% interval", "P(improvement)", "Z", "p"]
    return [
        " ".join(sentences) + f" (0.1% one-tailed, corrected for two comparisons: |Z| above {threshold:.2f}.)",
        markdown(head, rows),
    ]


FIGURE = Figure(
    "head-to-head", "figure 4", "PPO, PPO-EWMA, PPG and PPG-EWMA at the default batch size", cells, draw, summary
)
