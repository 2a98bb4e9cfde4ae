"""Figure 1: PPO under artificial staleness, with three choices of the old policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybatch.config.io import override
from anybatch.reproduce import style
from anybatch.reproduce.finals import difference, final_returns, threshold
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import markdown, p_value

OBJECTIVES: dict[str, dict[str, Any]] = {
    "recent": {"proximal": "recent", "importance": "proximal", "allow_stale_coupled": True},
    "decoupled": {"proximal": "recent", "importance": "behavior"},
    "behavior": {"proximal": "behavior", "importance": "behavior", "allow_stale_coupled": True},
}
"""Panels (a), (b) and (c): pi_recent for both, pi_recent as proximal and pi_behav for importance, pi_behav for both."""


def runs(suite: Suite) -> list[RunGroup]:
    """Every delay with every objective; without delay the three are the same run."""
    groups = []
    for task, config in suite.staleness.items():
        for objective, changes in OBJECTIVES.items():
            for delay in suite.delays:
                source = {"rollout.source.kind": "delayed", "rollout.source.delay": delay} if delay else {}
                chosen = changes if delay else OBJECTIVES["decoupled"]
                groups.append(RunGroup(objective, task, delay, override(config, {**chosen, **source})))
    return groups


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw mean curves with the final returns beside them, and curves by environment."""
    path, tasks = folder / "staleness.png", FIGURE.tasks(suite)
    with figure(path, 4, columns=2, label=style.NORMALIZED) as axes:
        for axis, objective in zip(axes, OBJECTIVES, strict=False):
            panel = style.Panel(style.LABELS[objective], tasks, _lines(suite, objective))
            style.draw_panel(axis, suite, results, panel)
        _draw_final_returns(axes[3], suite, results, tasks)
        style.legend(axes[:3], title="delay")
    paths = [path]
    for objective in OBJECTIVES:
        picture, title = folder / f"staleness-by-environment-{objective}.png", f"{style.LABELS[objective]}; delay"
        paths.append(style.draw_tasks(picture, suite, results, tasks, _lines(suite, objective), title))
    return paths


def _lines(suite: Suite, objective: str) -> list[style.Line]:
    labels = [f"{delay} iteration{'' if delay == 1 else 's'}" for delay in suite.delays]
    colors = style.gradient(len(suite.delays))
    return [style.Line(objective, *line) for line in zip(suite.delays, labels, colors, strict=True)]


def _draw_final_returns(axis: Any, suite: Suite, results: Results, tasks: Sequence[str]) -> None:
    for objective in OBJECTIVES:
        ends = [final_returns(suite, results, objective, delay, tasks).mean(1) for delay in suite.delays]
        style.draw_ends(axis, range(len(ends)), ends, objective)
        place = {"xy": (len(ends) - 1, ends[-1].mean()), "xytext": (6, -3), "textcoords": "offset points"}
        axis.annotate(style.LABELS[objective][:3], **place, color=style.COLORS[objective])
    axis.set_xticks(range(len(suite.delays)), [str(delay) for delay in suite.delays])
    axis.set_xlabel("delay (iterations)")
    axis.set_title("end of training")
    axis.set_ylim(-0.05, 1.08)


def summary(suite: Suite, results: Results) -> list[str]:
    """Final returns by delay, and tests of the decoupled objective at the largest delay."""
    tasks, largest = FIGURE.tasks(suite), suite.delays[-1]
    rows = []
    for label, chosen in (*((suite.labels[task], (task,)) for task in tasks), ("mean", tasks)):
        for objective in OBJECTIVES:
            ends = (final_returns(suite, results, objective, delay, chosen).mean() for delay in suite.delays)
            rows.append([f"{label}, {style.LABELS[objective]}", *(f"{x:.3f}" for x in ends)])
    sentences = []
    for other in ("recent", "behavior"):
        size, z, p = difference(suite, results, ("decoupled", largest), (other, largest), tasks)
        sentences.append(f"{size:+.3f} compared with {style.LABELS[other]} (Z = {z:.2f}, p = {p_value(p)})")
    return [
        f"Final return of the decoupled objective at the largest delay, {largest} iterations: "
        f"{' and '.join(sentences)}. A difference is significant (p < 0.001 after Bonferroni's correction for two "
        f"comparisons) if Z is above {threshold(2):.2f}.",
        markdown(["final return at delay", *map(str, suite.delays)], rows),
    ]


FIGURE = Figure(
    name="staleness",
    paper="figure 1",
    about="PPO on stale data: three objectives at every delay",
    tasks=lambda suite: tuple(suite.staleness),
    draw=draw,
    summary=summary,
    runs=runs,
    aliases=("figure1", "figure7", "figure8", "figure9"),
)
