"""Figures 2 and 3: all batch sizes with all adjustments, without each of them, and the gap by environment."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.config.io import override
from anybatch.reproduce.finals import final, gap
from anybatch.reproduce.plots import BLACK, PALETTE
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import band
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
from anybatch.reproduce.suites.ladder import ABLATIONS, ladder, tasks_with_phases, without_ewma
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown

KL_REFERENCE = 1 / 256
"""What the KL coefficient is multiplied with for the reference of too weak a penalty."""


def cells(suite: Suite) -> list[Cell]:
    """All adjustments and ablation (d) at every batch size; the others where they differ; the KL reference."""
    smaller, tasks = suite.divisors[1:], tuple(suite.invariance)
    found = ladder(suite, "all", suite.divisors, tasks)
    for variant in ABLATIONS[:3]:
        found += ladder(suite, variant, smaller, tasks)
    found += ladder(suite, "no-ewma", suite.divisors, tasks)
    if suite.stacked:  # the paper did not run this one
        found += ladder(suite, "no-policy-iterations", smaller, tasks_with_phases(suite))
    for task, config in suite.invariance.items():
        weak = override(without_ewma(config), {"kl_coefficient": config.policy.kl_coefficient * KL_REFERENCE})
        found.append(Cell("kl-256", task, 1, weak))
    return found


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Mean curves, the gap by environment, and curves by environment."""
    return [
        draw_means(suite, results, folder / "invariance.png"),
        draw_gaps(suite, results, folder / "invariance-gap.png"),
        *(
            draw_tasks(suite, results, variant, folder / f"invariance-by-environment-{variant}.png")
            for variant in results.variants()
            if variant in ("all", *ABLATIONS)
        ),
    ]


def draw_means(suite: Suite, results: Results, path: Path) -> Path:
    """Figure 2: a panel for each variant, averaged over environments."""
    variants = [v for v in results.variants() if v != "kl-256"]
    columns = 3
    with panels(path, columns, math.ceil(len(variants) / columns)) as axes:
        for axis, variant in zip(axes, variants, strict=False):
            tasks = tasks_with_phases(suite) if variant == "no-policy-iterations" else tuple(suite.invariance)
            _ladder_panel(axis, suite, results, variant, tasks)
            axis.set_title(LABELS[variant])
        for axis in axes[::columns]:
            axis.set_ylabel(NORMALIZED)
        hide(axes[len(variants) :])
        legend(axes, title="batch size", columns=6)
    return path


def draw_tasks(suite: Suite, results: Results, variant: str, path: Path) -> Path:
    """A variant split across environments."""
    columns = min(4, len(suite.invariance))
    with panels(path, columns, math.ceil(len(suite.invariance) / columns)) as axes:
        for axis, task in zip(axes, suite.invariance, strict=False):
            _ladder_panel(axis, suite, results, variant, (task,))
            axis.set_title(suite.labels[task])
        for axis in axes[::columns]:
            axis.set_ylabel(NORMALIZED)
        hide(axes[len(suite.invariance) :])
        legend(axes, title=f"{LABELS[variant]}: batch size", columns=6)
    return path


def _ladder_panel(axis: Any, suite: Suite, results: Results, variant: str, tasks: tuple[str, ...]) -> None:
    scale = steps_axis(axis, suite, tasks, [results["all", task, 1].env_steps for task in tasks])
    for divisor, color in zip(suite.divisors, gradient(len(suite.divisors)), strict=True):
        source = variant if (variant, tasks[0], divisor) in results else "all"
        progress, values = mean_over_tasks(suite, results, source, divisor, tasks)
        line(axis, progress * scale, values, color=color, label=batch_label(divisor))
    if ("kl-256", tasks[0], 1) in results:
        progress, values = mean_over_tasks(suite, results, "kl-256", 1, tasks)
        axis.plot(progress * scale, values.mean(0), ":", color=BLACK, label=LABELS["kl-256"])
    axis.set_ylim(-0.05, 1.08)


def batch_label(divisor: int) -> str:
    """A batch size in the words of appendix E."""
    return "default" if divisor == 1 else f"default / {divisor}"


def draw_gaps(suite: Suite, results: Results, path: Path) -> Path:
    """Figure 3: largest less smallest batch by environment, on a square-root scale, with standard errors."""
    variants = [v for v in ("all", *ABLATIONS) if (v, next(iter(suite.invariance)), suite.divisors[-1]) in results]
    tasks = tuple(suite.invariance)
    with panels(path, 1, 1, width=2.2 * 2.6, height=2.6) as axes:
        axis = axes[0]
        for k, (variant, color) in enumerate(zip(variants, (BLACK, *PALETTE), strict=False)):
            at_default = variant if (variant, tasks[0], 1) in results else "all"
            large, small = (
                final(suite, results, v, c, tasks) for v, c in ((at_default, 1), (variant, suite.divisors[-1]))
            )
            difference = large.mean(0) - small.mean(0)
            error = np.sqrt(band(large).sem ** 2 + band(small).sem ** 2)
            place = np.arange(len(tasks)) + (k - (len(variants) - 1) / 2) * 0.16
            axis.bar(place, signed_root(difference), 0.15, color=color, label=LABELS[variant])
            ends = signed_root(difference - error), signed_root(difference + error)
            axis.vlines(place, *ends, color="0.35", linewidth=0.8)
        ticks = np.array([-0.25, -0.05, 0.0, 0.05, 0.25, 0.5, 1.0])
        axis.set_yticks(signed_root(ticks), [f"{x:g}" for x in ticks])
        axis.axhline(0, color="0.2", linewidth=0.8)
        axis.set_xticks(range(len(tasks)), [suite.labels[task] for task in tasks], rotation=0 if len(tasks) < 7 else 60)
        axis.grid(visible=False, axis="x")
        axis.set_ylabel("largest − smallest batch\n(square-root scale)")
        legend(axes, columns=3)
    return path


def signed_root(values: Any) -> Any:
    """The square root that keeps the sign."""
    return np.sign(values) * np.sqrt(np.abs(values))


def summary(suite: Suite, results: Results) -> list[str]:
    """The gaps, by environment and in the mean."""
    tasks = tuple(suite.invariance)
    rows = []
    for variant in (v for v in results.variants() if v not in ("kl-256", "no-policy-iterations")):
        by_task, mean, (low, high) = gap(suite, results, variant, tasks)
        rows.append([LABELS[variant], *(f"{x:+.3f}" for x in by_task), f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}"])
    by_task, mean, _ = gap(suite, results, "all", tasks)
    worst = int(np.abs(by_task).argmax())
    found = [
        "With all adjustments the final normalised return at the default batch size and at "
        f"1/{suite.divisors[-1]} of it differs by {mean:+.3f} in the mean over environments and by at most "
        f"{abs(by_task[worst]):.3f} in one ({suite.labels[tasks[worst]]}).",
        markdown(["largest − smallest batch", *(suite.labels[task] for task in tasks), "mean", "95% interval"], rows),
        _levels(suite, results, tasks),
    ]
    phases = tasks_with_phases(suite)
    if phases and ("no-policy-iterations", phases[0], suite.divisors[-1]) in results:
        with_rule, without = (
            final(suite, results, variant, suite.divisors[-1], phases).mean()
            for variant in ("all", "no-policy-iterations")
        )
        found.append(
            f"Ablation (e), which the paper left out: with $N_\\pi$ not adjusted PPG-EWMA ends at {without:.3f} at the "
            f"smallest batch, with it at {with_rule:.3f}."
        )
    return found


def _levels(suite: Suite, results: Results, tasks: tuple[str, ...]) -> str:
    rows = []
    for divisor in suite.divisors:
        values = final(suite, results, "all", divisor, tasks)
        rows.append([batch_label(divisor), *(f"{x:.3f}" for x in values.mean(0)), f"{values.mean():.3f}"])
    weak = final(suite, results, "kl-256", 1, tasks)
    rows.append(["default, KL penalty / 256", *(f"{x:.3f}" for x in weak.mean(0)), f"{weak.mean():.3f}"])
    return markdown(["final return, all adjustments", *(suite.labels[task] for task in tasks), "mean"], rows)


FIGURE = Figure(
    "invariance",
    "figures 2 and 3",
    "all batch sizes with all adjustments, and without each of them",
    cells,
    draw,
    summary,
)
