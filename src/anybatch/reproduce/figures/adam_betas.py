"""Appendix D: Adam's decay rates raised to the power 1/c as well."""

from __future__ import annotations

from pathlib import Path

from anybatch.reproduce.figures.invariance import batch_label
from anybatch.reproduce.finals import final, p_text
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import bonferroni_threshold, van_elteren
from anybatch.reproduce.style import (
    LABELS,
    NORMALIZED,
    gradient,
    legend,
    line,
    mean_over_tasks,
    panels,
    steps_axis,
)
from anybatch.reproduce.suites.ladder import ladder
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown

VARIANTS = ("beta2", "both-betas")


def cells(suite: Suite) -> list[Cell]:
    """Both variants at every smaller batch."""
    return [cell for variant in VARIANTS for cell in ladder(suite, variant, suite.divisors[1:], suite.betas)]


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """A row for each task: no further adjustment, beta2, both."""
    path, variants = folder / "adam-betas.png", ("all", *VARIANTS)
    with panels(path, len(variants), len(suite.betas)) as axes:
        for row, task in enumerate(suite.betas):
            for column, variant in enumerate(variants):
                axis = axes[row * len(variants) + column]
                scale = steps_axis(axis, suite, (task,), [results["all", task, 1].env_steps])
                for divisor, color in zip(suite.divisors, gradient(len(suite.divisors)), strict=True):
                    source = variant if divisor > 1 else "all"
                    progress, values = mean_over_tasks(suite, results, source, divisor, (task,))
                    line(axis, progress * scale, values, color=color, label=batch_label(divisor))
                axis.set_ylim(-0.05, 1.08)
                if row == 0:
                    axis.set_title("no further adjustment" if variant == "all" else LABELS[variant])
                if row < len(suite.betas) - 1:
                    axis.set_xlabel("")
            axes[row * len(variants)].set_ylabel(f"{suite.labels[task]}\n{NORMALIZED}")
        legend(axes, title="batch size", columns=6)
    return [path]


def summary(suite: Suite, results: Results) -> list[str]:
    """Final returns at the smallest batch; two-tailed, as either direction would count."""
    smallest, tasks = suite.divisors[-1], suite.betas
    threshold = bonferroni_threshold(0.001 / 2, len(VARIANTS))
    plain = final(suite, results, "all", smallest, tasks)
    rows = [[LABELS["all"], *(f"{x:.3f}" for x in plain.mean(0)), f"{plain.mean():.3f}", "", ""]]
    told_apart = []
    for variant in VARIANTS:
        values = final(suite, results, variant, smallest, tasks)
        z, p = van_elteren(values, plain)
        two_tailed = 2 * min(p, 1 - p)
        rows.append(
            [
                LABELS[variant],
                *(f"{x:.3f}" for x in values.mean(0)),
                f"{values.mean():.3f}",
                f"{z:.2f}",
                p_text(two_tailed),
            ]
        )
        if abs(z) > threshold:
            told_apart.append(f"{LABELS[variant]} ({'higher' if z > 0 else 'lower'}, Z = {z:.2f})")
    verdict = (
        f"At the smallest batch these are told apart from leaving Adam's decay rates alone: {', '.join(told_apart)}."
        if told_apart
        else "Neither is told apart from leaving Adam's decay rates alone at the smallest batch: a null result."
    )
    return [
        f"{verdict} (Two-tailed, 0.1% corrected for two: |Z| above {threshold:.2f}.)",
        markdown(
            [f"final return at {batch_label(smallest)}", *(suite.labels[task] for task in tasks), "mean", "Z", "p"],
            rows,
        ),
    ]


FIGURE = Figure(
    "adam-betas",
    "appendix D",
    "Adam's beta2, or beta1 and beta2, adjusted as well",
    cells,
    draw,
    summary,
    reads=("invariance",),
)
