"""Appendix C: Adam's step size divided by c instead of by its square root."""

from __future__ import annotations

from pathlib import Path

from anybatch.reproduce.figures.invariance import draw_by_environment
from anybatch.reproduce.finals import ablation_effect, final_returns, threshold
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import van_elteren
from anybatch.reproduce.style import Panel, batch_lines, draw_panels
from anybatch.reproduce.suites.ladder import ladder, ladder_tasks
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import markdown, p_value


def runs(suite: Suite) -> list[RunGroup]:
    """Every smaller batch with ablations; the default one and the square-root rule are figure 2's."""
    return ladder(suite, "linear-step", suite.ablated, ladder_tasks(suite))


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw both rules side by side, and the linear one by environment."""
    tasks = ladder_tasks(suite)
    content = [
        Panel(title, tasks, batch_lines(suite, results, variant, tasks[0]))
        for variant, title in (("all", "step size / √c (all adjustments)"), ("linear-step", "step size / c (linear)"))
    ]
    return [
        draw_panels(folder / "linear-step.png", suite, results, content),
        draw_by_environment(suite, results, "linear-step", folder / "linear-step-by-environment.png"),
    ]


def summary(suite: Suite, results: Results) -> list[str]:
    """Effects on the final return and on the mean return over all of training."""
    tasks, smaller = ladder_tasks(suite), suite.ablated
    rows = []
    for divisor in smaller:
        size, z, p = ablation_effect(suite, results, "linear-step", divisor, tasks)
        sqrt, linear = (
            final_returns(suite, results, name, divisor, tasks, points=suite.points) for name in ("all", "linear-step")
        )
        test = van_elteren(sqrt, linear)
        effect = [f"{size:+.3f}", f"{z:.2f}", p_value(p)]
        areas = [f"{sqrt.mean():.3f}", f"{linear.mean():.3f}", f"{test.z:.2f}", p_value(test.p)]
        rows.append([suite.batch_label(divisor), *effect, *areas])
    header = ["batch", "effect on final", "Z", "p", "area, square root", "area, linear", "Z", "p"]
    return [
        "The linear rule compared with the square-root rule. Effect on the final return: the additional loss from "
        f"{suite.batch_label(1)} to the smaller batch, as in appendix E. Area: the normalised return averaged over all "
        f"of training. Z above {threshold(2 * len(smaller)):.2f} is significant (p < 0.001 after the correction "
        f"for {2 * len(smaller)} hypotheses).",
        markdown(header, rows),
    ]


FIGURE = Figure(
    name="linear-step",
    paper="appendix C",
    about="a linear instead of a square-root adjustment of Adam's step size",
    tasks=ladder_tasks,
    draw=draw,
    summary=summary,
    runs=runs,
    reads=("invariance",),
    aliases=("figure5", "figure16"),
)
