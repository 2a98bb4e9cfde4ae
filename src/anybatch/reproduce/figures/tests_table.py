"""Appendix E: effect sizes of the ablations, with van Elteren's test and Bonferroni's correction."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from anybatch.reproduce.finals import ablation_effect, threshold
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Effect
from anybatch.reproduce.style import LABELS, draw_bars, gradient
from anybatch.reproduce.suites.ladder import ABLATIONS, ladder_tasks, ppg_tasks
from anybatch.reproduce.suites.suite import Figure, Suite
from anybatch.reproduce.tables import markdown


def effect_table(suite: Suite, results: Results) -> tuple[dict[str, dict[int, Effect]], int, float]:
    """Effects of the ablations by variant and divisor, their number, and the Z that makes one significant.

    Every ablation at every smaller batch: the paper's four, ablation (e) and the linear rule.
    """
    smaller = suite.ablated
    effects: dict[str, dict[int, Effect]] = {}
    for variant in (*ABLATIONS, "no-policy-iterations", "linear-step"):
        tasks = ppg_tasks(suite) if variant == "no-policy-iterations" else ladder_tasks(suite)
        if tasks and (variant, tasks[0], smaller[-1]) in results:
            effects[variant] = {c: ablation_effect(suite, results, variant, c, tasks) for c in smaller}
    hypotheses = len(effects) * len(smaller)
    return effects, hypotheses, threshold(hypotheses)


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw the Z-scores as bars, with the threshold."""
    effects, _, needed = effect_table(suite, results)
    path, names = folder / "tests.png", [textwrap.fill(LABELS[variant], 14) for variant in effects]
    scores = {
        suite.batch_label(divisor): (np.array([x[divisor].z for x in effects.values()]), None, color)
        for divisor, color in zip(suite.divisors, gradient(len(suite.divisors)), strict=True)
        if divisor in suite.ablated
    }
    with figure(path, width=7.6, height=3.2, label=f"Z: loss compared\nwith {suite.batch_label(1)}") as (axis,):
        draw_bars(axis, names, scores)
        axis.axhline(needed, color="0.2", linestyle="--", linewidth=1)
        place = (1.01, needed)
        axis.annotate("p = 0.001,\ncorrected", place, xycoords=("axes fraction", "data"), va="center", fontsize=9)
        axis.tick_params("x", labelsize=9)
        axis.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    return [path]


def summary(suite: Suite, results: Results) -> list[str]:
    """The table: effect sizes with Z in brackets, bold where significant."""
    effects, hypotheses, needed = effect_table(suite, results)
    rows = []
    for divisor in suite.ablated:
        cells = []
        for size, z, _ in (by_divisor[divisor] for by_divisor in effects.values()):
            cells.append(f"**{size:.3f}** ({z:.2f})" if z > needed else f"{size:.3f} ({z:.2f})")
        rows.append([suite.batch_label(divisor), *cells])
    significant = [LABELS[v] for v, by_divisor in effects.items() if any(e.z > needed for e in by_divisor.values())]
    others = [LABELS[v] for v in effects if LABELS[v] not in significant]
    verdict = f"Significantly worse than all adjustments (p < 0.001): {', '.join(significant) or 'none'}."
    if others:
        verdict += f" Not significantly worse: {', '.join(others)}."
    return [
        f"{verdict} The effect size is a difference of differences in final normalised return: how much more an "
        f"ablation loses from {suite.batch_label(1)} to the smaller batch than all adjustments do. Z is in brackets; "
        f"bold: Z above {needed:.2f}, which is a one-tailed p below 0.001/{hypotheses}.",
        markdown([f"{suite.batch_label(1)} vs", *(LABELS[variant] for variant in effects)], rows),
    ]


FIGURE = Figure(
    name="tests",
    paper="appendix E",
    about="effect sizes and Z-scores of the ablations",
    tasks=ladder_tasks,
    draw=draw,
    summary=summary,
    reads=("invariance", "linear-step"),
    has_table=False,
    aliases=("table5",),
)
