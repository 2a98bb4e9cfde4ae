"""Appendix E: effect sizes of the ablations, with van Elteren's test and Bonferroni's correction."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

from anybatch.reproduce.figures.invariance import batch_label
from anybatch.reproduce.finals import LEVEL, effect
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Effect, bonferroni_threshold
from anybatch.reproduce.style import LABELS, gradient, panels
from anybatch.reproduce.suites.ladder import ABLATIONS, tasks_with_phases
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown


class Table(NamedTuple):
    """The cells of the table and what a Z has to exceed."""

    effects: dict[tuple[str, int], Effect]
    """By variant and divisor."""
    threshold: float
    hypotheses: int


def cells(suite: Suite) -> list[Cell]:
    """None of its own: it reads the runs of figure 2 and appendix C."""
    return []


def table(suite: Suite, results: Results) -> Table:
    """Every ablation at every smaller batch; the linear rule and ablation (e) stand beside the paper's four."""
    smallest = suite.divisors[-1]
    effects: dict[tuple[str, int], Effect] = {}
    for variant in (*ABLATIONS, "no-policy-iterations", "linear-step"):
        tasks = tasks_with_phases(suite) if variant == "no-policy-iterations" else tuple(suite.invariance)
        if tasks and (variant, tasks[0], smallest) in results:
            effects |= {(variant, c): effect(suite, results, variant, c, tasks) for c in suite.divisors[1:]}
    return Table(effects, bonferroni_threshold(LEVEL, len(effects)), len(effects))


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """The Z-scores as bars, beside the threshold."""
    effects, threshold, _ = table(suite, results)
    variants = list(dict.fromkeys(variant for variant, _ in effects))
    path = folder / "tests.png"
    colors = gradient(len(suite.divisors))[1:]
    with panels(path, 1, width=6.6, height=2.6) as axes:
        width = 0.8 / len(colors)
        for k, (divisor, color) in enumerate(zip(suite.divisors[1:], colors, strict=True)):
            places = [i + (k - (len(colors) - 1) / 2) * width for i in range(len(variants))]
            scores = [effects[variant, divisor].z for variant in variants]
            axes[0].bar(places, scores, width * 0.92, color=color, label=f"default vs {batch_label(divisor)}")
        axes[0].axhline(threshold, color="0.2", linestyle="--", linewidth=1)
        axes[0].annotate(
            "p = 0.1%,\ncorrected", (1.01, threshold), xycoords=("axes fraction", "data"), va="center", fontsize=7
        )
        axes[0].axhline(0, color="0.2", linewidth=0.8)
        names = [textwrap.fill(LABELS[variant], 14) for variant in variants]
        axes[0].set_xticks(range(len(variants)), names, fontsize=7)
        axes[0].grid(visible=False, axis="x")
        axes[0].set_ylabel("Z")
        axes[0].legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    return [path]


def summary(suite: Suite, results: Results) -> list[str]:
    """The table: effect sizes with Z in brackets, bold where significant."""
    effects, threshold, hypotheses = table(suite, results)
    variants = list(dict.fromkeys(variant for variant, _ in effects))
    rows = []
    for divisor in suite.divisors[1:]:
        row = [batch_label(divisor)]
        for variant in variants:
            size, z, _ = effects[variant, divisor]
            shown = f"{size:.3f}"
            row.append(f"{f'**{shown}**' if z > threshold else shown} ({z:.2f})")
        rows.append(row)
    found = [v for v in variants if any(effects[v, c].z > threshold for c in suite.divisors[1:])]
    missing = [v for v in variants if v not in found]
    verdict = f"Told apart from all adjustments at 0.1%: {', '.join(LABELS[v] for v in found) or 'none'}."
    if missing:
        verdict += f" Not told apart: {', '.join(LABELS[v] for v in missing)}."
    return [
        f"{verdict} Effect sizes are differences of differences in final normalised return between the ablation and "
        f"all adjustments and between batch sizes, with Z in brackets; bold: Z above {threshold:.2f}, that is "
        f"one-tailed p below 0.001/{hypotheses}.",
        markdown(["default vs", *(LABELS[variant] for variant in variants)], rows),
    ]


FIGURE = Figure(
    "tests",
    "appendix E",
    "effect sizes and Z of the ablations",
    cells,
    draw,
    summary,
    reads=("invariance", "linear-step"),
    own=False,
)
