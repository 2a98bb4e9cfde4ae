"""Figure 4: PPO, PPO-EWMA, PPG and PPG-EWMA at the default batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anybatch.reproduce import style
from anybatch.reproduce.finals import difference, final_returns, mean_interval, threshold
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import difference_with_error, probability_of_improvement
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import interval, markdown, p_value

PAIRS = (("ppo-ewma", "ppo"), ("ppg-ewma", "ppg"))
"""Algorithms with an EWMA, and the same without."""


def runs(suite: Suite) -> list[RunGroup]:
    """Every algorithm on every task."""
    return [
        RunGroup(name, task, 1, config)
        for name, configs in suite.algorithms.items()
        for task, config in configs.items()
    ]


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw mean curves beside the differences by environment, and curves by environment."""
    path, tasks = folder / "head-to-head.png", FIGURE.tasks(suite)
    lines = [style.Line(name, 1, style.LABELS[name], style.COLORS[name]) for name in suite.algorithms]
    differences = {}
    for ours, baseline in PAIRS:
        a, b = (final_returns(suite, results, name, 1, tasks) for name in (ours, baseline))
        mean, error = difference_with_error(a, b)
        label = f"{style.LABELS[ours]} − {style.LABELS[baseline]}"
        differences[label] = mean, np.stack([mean - error, mean + error]), style.COLORS[ours]
    with figure(path, 2, width=4.2, height=3.0, label=style.NORMALIZED) as (curves, bars):
        style.draw_panel(curves, suite, results, style.Panel("", tasks, lines))
        curves.legend()
        style.draw_bars(bars, [suite.labels[task] for task in tasks], differences)
        bars.set_ylabel(f"difference in final\n{style.NORMALIZED}")
        bars.legend(loc="upper left")
    return [path, style.draw_tasks(folder / "head-to-head-by-environment.png", suite, results, tasks, lines)]


def summary(suite: Suite, results: Results) -> list[str]:
    """Differences between the algorithms with and without EWMA, and their tests."""
    tasks, needed = FIGURE.tasks(suite), threshold(len(PAIRS))
    rows, sentences = [], []
    for ours, baseline in PAIRS:
        a, b = (final_returns(suite, results, name, 1, tasks) for name in (ours, baseline))
        size, z, p = difference(suite, results, (ours, 1), (baseline, 1), tasks)
        differences = (f"{x:+.3f}" for x in (*(a.mean(0) - b.mean(0)), size))
        tests = (f"{probability_of_improvement(a, b):.3f}", f"{z:.2f}", p_value(p))
        label = f"{style.LABELS[ours]} − {style.LABELS[baseline]}"
        rows.append([label, *differences, interval(*mean_interval(a, b)), *tests])
        significant = f"significantly {'better' if z > 0 else 'worse'} than"
        verdict = significant if abs(z) > needed else "not significantly different from"
        sentences.append(f"{style.LABELS[ours]} is {verdict} {style.LABELS[baseline]} ({size:+.3f}, Z = {z:.2f}).")
    header = ["difference", *(suite.labels[task] for task in tasks), "mean", "95% interval", "P(improvement)", "Z", "p"]
    return [
        f"{' '.join(sentences)} (Significant: |Z| above {needed:.2f}, which is a one-tailed p < 0.001 after the "
        "correction for two comparisons.)",
        markdown(header, rows),
    ]


FIGURE = Figure(
    name="head-to-head",
    paper="figure 4",
    about="PPO, PPO-EWMA, PPG and PPG-EWMA at the default batch size",
    tasks=lambda suite: tuple(suite.algorithms.get("ppo", ())),
    draw=draw,
    summary=summary,
    runs=runs,
    aliases=("figure4", "figure17"),
)
