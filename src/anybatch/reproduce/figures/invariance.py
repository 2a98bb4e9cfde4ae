"""Figures 2 and 3: all batch sizes with all adjustments and without each of them, and the gap by environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anybatch.config.io import override
from anybatch.reproduce import style
from anybatch.reproduce.finals import batch_gap, final_returns
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import difference_with_error
from anybatch.reproduce.suites.ladder import ABLATIONS, ladder, ladder_tasks, ppg_tasks, without_ewma
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import interval, markdown, means_by_task

KL_REFERENCE = 1 / 256
"""Factor of the KL coefficient in the reference run, which shows too weak a penalty."""


def runs(suite: Suite) -> list[RunGroup]:
    """All adjustments and ablation (d) at every batch size, the others where they differ, and the KL reference."""
    smaller, tasks = suite.ablated, ladder_tasks(suite)
    groups = ladder(suite, "all", suite.divisors, tasks)
    for variant in ABLATIONS[:3]:
        groups += ladder(suite, variant, smaller, tasks)
    groups += ladder(suite, "no-ewma", (1, *smaller), tasks)
    if suite.stacked:  # the paper did not run this one
        groups += ladder(suite, "no-policy-iterations", smaller, ppg_tasks(suite))
    for task, config in suite.invariance.items():
        weak = override(without_ewma(config), {"kl_coefficient": config.policy.kl_coefficient * KL_REFERENCE})
        groups.append(RunGroup("kl-256", task, 1, weak))
    return groups


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw mean curves, the gap by environment, and curves by environment."""
    content = []
    for variant in results.variants():
        tasks = ppg_tasks(suite) if variant == "no-policy-iterations" else ladder_tasks(suite)
        if tasks and variant != "kl-256":
            content.append(style.Panel(style.LABELS[variant], tasks, _lines(suite, results, variant, tasks[0])))
    return [
        style.draw_panels(folder / "invariance.png", suite, results, content),
        draw_gaps(suite, results, folder / "invariance-gap.png"),
        *(
            draw_by_environment(suite, results, variant, folder / f"invariance-by-environment-{variant}.png")
            for variant in results.variants()
            if variant in ("all", *ABLATIONS)
        ),
    ]


def draw_by_environment(suite: Suite, results: Results, variant: str, path: Path) -> Path:
    """Draw a variant at every batch size, in a panel for each environment."""
    tasks = ladder_tasks(suite)
    lines = _lines(suite, results, variant, tasks[0])
    return style.draw_tasks(path, suite, results, tasks, lines, style.LABELS[variant])


def _lines(suite: Suite, results: Results, variant: str, task: str) -> list[style.Line]:
    lines = style.batch_lines(suite, results, variant, task)
    if ("kl-256", task, 1) in results:
        lines.append(style.Line("kl-256", 1, style.LABELS["kl-256"], style.COLORS["kl-256"], reference=True))
    return lines


def draw_gaps(suite: Suite, results: Results, path: Path) -> Path:
    """Draw figure 3: largest less smallest batch by environment, on a square-root scale, with standard errors."""
    tasks, smallest = ladder_tasks(suite), suite.divisors[-1]
    variants = [variant for variant in ("all", *ABLATIONS) if (variant, tasks[0], smallest) in results]
    gaps = {}
    for variant in variants:
        gap, error = difference_with_error(*(final_returns(suite, results, variant, c, tasks) for c in (1, smallest)))
        ends = signed_root(np.stack([gap - error, gap + error]))
        gaps[style.LABELS[variant]] = signed_root(gap), ends, style.COLORS[variant]
    label = f"return at {suite.batch_label(1)}\n− at {suite.batch_label(smallest)}"
    with figure(path, width=6.6, height=3.2, label=label) as axes:
        style.draw_bars(axes[0], [suite.labels[task] for task in tasks], gaps)
        ticks = np.array([-0.25, -0.05, 0.0, 0.05, 0.25, 0.5, 1.0])
        axes[0].set_yticks(signed_root(ticks), [f"{x:g}" for x in ticks])
        style.legend(axes, columns=2)
    return path


def signed_root(values: Any) -> Any:
    """Square root of the absolute value, with the sign kept."""
    return np.sign(values) * np.sqrt(np.abs(values))


def summary(suite: Suite, results: Results) -> list[str]:
    """Gaps between the batch sizes by environment and on average, and final returns."""
    tasks, (default, smallest) = ladder_tasks(suite), (suite.batch_label(c) for c in (1, suite.divisors[-1]))
    labels = [suite.labels[task] for task in tasks]
    rows = []
    for variant in (v for v in results.variants() if v not in ("kl-256", "no-policy-iterations")):
        by_task, mean, bounds = batch_gap(suite, results, variant, tasks)
        rows.append([style.LABELS[variant], *(f"{x:+.3f}" for x in (*by_task, mean)), interval(*bounds)])
    ends = [
        [suite.batch_label(divisor), *means_by_task(final_returns(suite, results, "all", divisor, tasks))]
        for divisor in suite.divisors
    ]
    weak = means_by_task(final_returns(suite, results, "kl-256", 1, tasks))
    ends.append([f"{default}, {style.LABELS['kl-256']}", *weak])
    by_task, mean, _ = batch_gap(suite, results, "all", tasks)
    worst = int(np.abs(by_task).argmax())
    paragraphs = [
        f"With all adjustments the final normalised returns with {default} and with {smallest} differ by {mean:+.3f} "
        f"on average over tasks, and by at most {abs(by_task[worst]):.3f} on one of them ({labels[worst]}).",
        markdown([f"{default} − {smallest}", *labels, "mean", "95% interval"], rows),
        markdown(["final return, all adjustments", *labels, "mean"], ends),
    ]
    phased = ppg_tasks(suite)
    if phased and ("no-policy-iterations", phased[0], suite.divisors[-1]) in results:
        pair = (final_returns(suite, results, x, suite.divisors[-1], phased) for x in ("all", "no-policy-iterations"))
        adjusted, constant = (returns.mean() for returns in pair)
        paragraphs.append(
            f"Ablation (e), which is not in the paper: PPG-EWMA with {smallest} ends at {constant:.3f} if the number "
            f"of iterations in a policy phase, N_π, is not adjusted, and at {adjusted:.3f} if it is."
        )
    return paragraphs


FIGURE = Figure(
    name="invariance",
    paper="figures 2 and 3",
    about="all batch sizes with all adjustments, and without each of them",
    tasks=ladder_tasks,
    draw=draw,
    summary=summary,
    runs=runs,
    aliases=tuple(f"figure{number}" for number in (2, 3, 10, 11, 12, 14, 15)),
)
