"""Figure 1: PPO under artificial staleness, with three ways to choose the old policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from anybatch.config.io import override
from anybatch.reproduce.finals import direct, final, p_text
from anybatch.reproduce.plots import BLUE, GREEN, VERMILION
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import band, bonferroni_threshold
from anybatch.reproduce.style import (
    LABELS,
    NORMALIZED,
    gradient,
    hide,
    legend,
    line,
    mean_over_tasks,
    panels,
    steps_axis,
)
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown

OBJECTIVES: dict[str, dict[str, Any]] = {
    "recent": {"proximal": "recent", "importance": "proximal", "allow_stale_coupled": True},
    "decoupled": {"proximal": "recent", "importance": "behavior"},
    "behavior": {"proximal": "behavior", "importance": "behavior", "allow_stale_coupled": True},
}
"""Panels (a), (b) and (c): pi_recent for both, pi_recent as proximal and pi_behav for importance, pi_behav for both."""

COLORS = {"recent": VERMILION, "decoupled": BLUE, "behavior": GREEN}


def cells(suite: Suite) -> list[Cell]:
    """Every delay with every objective; without delay the three are the same."""
    found = []
    for task, config in suite.staleness.items():
        for objective, changes in OBJECTIVES.items():
            for delay in suite.delays:
                source = {"rollout.source.kind": "delayed", "rollout.source.delay": delay} if delay else {}
                chosen = changes if delay else OBJECTIVES["decoupled"]
                found.append(Cell(objective, task, delay, override(config, {**chosen, **source})))
    return found


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Mean curves with the final returns beside them, and curves by environment."""
    paths = [folder / "staleness.png"]
    tasks = tuple(suite.staleness)
    with panels(paths[0], 4) as axes:
        for axis, objective in zip(axes, OBJECTIVES, strict=False):
            _panel(axis, suite, results, objective, tasks)
            axis.set_title(LABELS[objective])
        axes[0].set_ylabel(NORMALIZED)
        for objective in OBJECTIVES:
            ends = [band(final(suite, results, objective, delay, tasks).mean(1)) for delay in suite.delays]
            means, deviations = [float(b.mean) for b in ends], [float(b.std) for b in ends]
            axes[3].errorbar(
                range(len(ends)), means, deviations, fmt="o-", color=COLORS[objective], ms=3, capsize=2, lw=1.2
            )
            axes[3].annotate(
                LABELS[objective][:3], (len(ends) - 1, means[-1]), xytext=(5, -3), textcoords="offset points",
                fontsize=8, color=COLORS[objective],
            )  # fmt: skip
        axes[3].set_xticks(range(len(suite.delays)), [str(delay) for delay in suite.delays])
        axes[3].set_xlabel("delay (iterations)")
        axes[3].set_title("final")
        axes[3].set_ylim(-0.05, 1.08)
        legend(axes[:3], title="delay in iterations", columns=8)
    for objective in OBJECTIVES:
        path = folder / f"staleness-by-environment-{objective}.png"
        columns = min(4, len(tasks))
        with panels(path, columns, math.ceil(len(tasks) / columns)) as axes:
            for axis, task in zip(axes, tasks, strict=False):
                _panel(axis, suite, results, objective, (task,))
                axis.set_title(suite.labels[task])
            for axis in axes[::columns]:
                axis.set_ylabel(NORMALIZED)
            hide(axes[len(tasks) :])
            legend(axes, title=f"{LABELS[objective]}: delay", columns=8)
        paths.append(path)
    return paths


def _panel(axis: Any, suite: Suite, results: Results, objective: str, tasks: tuple[str, ...]) -> None:
    scale = steps_axis(axis, suite, tasks, [results[objective, task, 0].env_steps for task in tasks])
    for delay, color in zip(suite.delays, gradient(len(suite.delays)), strict=True):
        progress, values = mean_over_tasks(suite, results, objective, delay, tasks)
        line(axis, progress * scale, values, color=color, label=str(delay))
    axis.set_ylim(-0.05, 1.08)


def summary(suite: Suite, results: Results) -> list[str]:
    """Final returns by delay, and the tests of the decoupled objective at the largest delay."""
    tasks, largest = tuple(suite.staleness), suite.delays[-1]
    rows = []
    for task in (*tasks, ""):
        for objective in OBJECTIVES:
            chosen = (task,) if task else tasks
            ends = [final(suite, results, objective, delay, chosen).mean() for delay in suite.delays]
            rows.append([f"{suite.labels[task] if task else 'mean'}, {LABELS[objective]}", *(f"{x:.3f}" for x in ends)])
    sentences = []
    for other in ("recent", "behavior"):
        size, z, p = direct(suite, results, ("decoupled", largest), (other, largest), tasks)
        sentences.append(f"above {LABELS[other]} by {size:+.3f} (Z = {z:.2f}, p = {p_text(p)})")
    return [
        f"At the largest delay, {largest} iterations, the decoupled objective ends {' and '.join(sentences)}; for 0.1% "
        f"after Bonferroni's correction for two comparisons Z has to exceed {bonferroni_threshold(0.001, 2):.2f}.",
        markdown(["final return at delay", *map(str, suite.delays)], rows),
    ]


FIGURE = Figure("staleness", "figure 1", "delay times three objectives: PPO on stale data", cells, draw, summary)
