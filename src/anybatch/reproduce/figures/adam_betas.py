"""Appendix D: Adam's decay rates raised to the power 1/c as well."""

from __future__ import annotations

from pathlib import Path

from anybatch.reproduce.finals import final_returns, threshold
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import largest_z, van_elteren
from anybatch.reproduce.style import LABELS, Panel, batch_lines, draw_panels
from anybatch.reproduce.suites.ladder import ladder
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import markdown, means_by_task, p_value

VARIANTS = ("beta2", "both-betas")
"""Decay rates that are adjusted."""


def runs(suite: Suite) -> list[RunGroup]:
    """Both variants at every smaller batch."""
    return [group for variant in VARIANTS for group in ladder(suite, variant, suite.divisors[1:], FIGURE.tasks(suite))]


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw a row of panels for each task: no further adjustment, β2, both; the legend names the tasks."""
    tasks = FIGURE.tasks(suite)
    content = [
        Panel(LABELS[variant], (task,), batch_lines(suite, results, variant, task))
        for task in tasks
        for variant in ("all", *VARIANTS)
    ]
    title = "; ".join(suite.labels[task] for task in tasks)
    return [draw_panels(folder / "adam-betas.png", suite, results, content, legend_title=title)]


def summary(suite: Suite, results: Results) -> list[str]:
    """Final returns at the smallest batch; tests are two-tailed, as a difference in either direction would count."""
    smallest, tasks = suite.divisors[-1], FIGURE.tasks(suite)
    needed = threshold(len(VARIANTS), two_tailed=True)
    baseline = final_returns(suite, results, "all", smallest, tasks)
    rows = [[LABELS["all"], *means_by_task(baseline), "", ""]]
    significant, few = [], []
    for variant in VARIANTS:
        values = final_returns(suite, results, variant, smallest, tasks)
        z, p = van_elteren(values, baseline)
        rows.append([LABELS[variant], *means_by_task(values), f"{z:.2f}", p_value(2 * min(p, 1 - p))])
        if abs(z) > needed:
            significant.append(f"{LABELS[variant]} ({'higher' if z > 0 else 'lower'}, Z = {z:.2f})")
        if (most := largest_z(len(values), len(baseline), len(tasks))) <= needed:
            few.append(f"So few seeds of {LABELS[variant]} cannot show a difference: |Z| is {most:.2f} at most.")
    header = [f"final return, {suite.batch_label(smallest)}", *(suite.labels[task] for task in tasks), "mean", "Z", "p"]
    return [
        "Significant differences from unadjusted decay rates at the smallest batch: "
        f"{', '.join(significant) or 'none'}. (Two-tailed p < 0.001 after the correction for two comparisons: |Z| "
        f"above {needed:.2f}.)",
        *few,
        markdown(header, rows),
    ]


FIGURE = Figure(
    name="adam-betas",
    paper="appendix D",
    about="Adam's β2, or β1 and β2, adjusted as well",
    tasks=lambda suite: tuple(task for task in suite.betas if task in suite.invariance),
    draw=draw,
    summary=summary,
    runs=runs,
    reads=("invariance",),
    aliases=("figure6",),
)
