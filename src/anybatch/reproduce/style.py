"""Labels and colours of the variants, and panels of learning curves."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.reproduce import plots
from anybatch.reproduce.finals import normalized_curves
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Array, band
from anybatch.reproduce.suites.suite import Suite

_VARIANTS = {
    "all": ("all adjustments", plots.BLUE),
    "no-adam-step": ("(a) step size not adjusted", plots.VERMILION),
    "no-advantage-norm": ("(b) normalisation not adjusted", plots.GREEN),
    "no-ewma-adjustment": ("(c) EWMA not adjusted", plots.ORANGE),
    "no-ewma": ("(d) no EWMA", plots.PURPLE),
    "no-policy-iterations": ("(e) phase length not adjusted", plots.SKY),
    "linear-step": ("linear step size rule", plots.YELLOW),
    "kl-256": ("no EWMA, KL penalty 256 times weaker", plots.BLACK),
    "beta2": ("Adam's β2 also adjusted", plots.GREEN),
    "both-betas": ("Adam's β1 and β2 also adjusted", plots.ORANGE),
    "recent": ("(a) old policy = recent policy", plots.VERMILION),
    "decoupled": ("(b) decoupled objective", plots.PURPLE),
    "behavior": ("(c) old policy = behaviour policy", plots.GREEN),
    "ppo": ("PPO", plots.SKY),
    "ppo-ewma": ("PPO-EWMA", plots.BLUE),
    "ppg": ("PPG", plots.ORANGE),
    "ppg-ewma": ("PPG-EWMA", plots.VERMILION),
    "paper": ("the paper's rules", plots.BLUE),
    "fixed-minibatch": ("fixed minibatch size", plots.GREEN),
    "none": ("no adjustment", plots.VERMILION),
}
LABELS: dict[str, str] = {name: label for name, (label, _) in _VARIANTS.items()}
"""Names of the variants in figures, tables and claims."""
COLORS: dict[str, str] = {name: color for name, (_, color) in _VARIANTS.items()}
"""Colour of a variant in every figure. Batch sizes and delays are shades of :func:`gradient`."""

NORMALIZED = "normalised return"
_TITLE_WIDTH = 34  # characters


@dataclass(frozen=True)
class Line:
    """A learning curve in a panel."""

    variant: str
    x: int
    label: str
    color: Any
    reference: bool = False
    """Dotted and without a band."""


@dataclass(frozen=True)
class Panel:
    """Learning curves, each averaged over the tasks."""

    title: str
    tasks: Sequence[str]
    lines: Sequence[Line]


def gradient(count: int) -> list[Any]:
    """Colours from dark to light whose order is visible in grey print and to colour-blind readers."""
    return [plots.pyplot().get_cmap("viridis")(x) for x in np.linspace(0.0, 0.88, count)]


def batch_lines(suite: Suite, results: Results, variant: str, task: str) -> list[Line]:
    """Lines of a variant at every batch size that it was trained with."""
    colors = gradient(len(suite.divisors))
    return [
        Line(results.source(variant, task, divisor), divisor, suite.batch_label(divisor), color)
        for divisor, color in zip(suite.divisors, colors, strict=True)
        if (results.source(variant, task, divisor), task, divisor) in results
    ]


def draw_panels(
    path: Path, suite: Suite, results: Results, content: Sequence[Panel], *, columns: int = 3, legend_title: str = ""
) -> Path:
    """Draw panels of learning curves with one legend; returns ``path``."""
    with plots.figure(path, len(content), columns=columns, label=NORMALIZED) as axes:
        for axis, panel in zip(axes, content, strict=True):
            draw_panel(axis, suite, results, panel)
        legend(axes, title=legend_title)
    return path


def draw_tasks(
    path: Path, suite: Suite, results: Results, tasks: Sequence[str], lines: Sequence[Line], legend_title: str = ""
) -> Path:
    """Draw the same lines in a panel for each task; returns ``path``."""
    content = [Panel(suite.labels[task], (task,), lines) for task in tasks]
    return draw_panels(path, suite, results, content, columns=4, legend_title=legend_title)


def draw_panel(axis: Any, suite: Suite, results: Results, panel: Panel) -> None:
    """Draw the mean over tasks of each line, with a band of one standard deviation over seeds."""
    length = steps_axis(
        axis, {results[line.variant, task, line.x].env_steps for line in panel.lines for task in panel.tasks}
    )
    for line in panel.lines:
        curves = [normalized_curves(suite, results, (line.variant, task, line.x)) for task in panel.tasks]
        mean, deviation, _ = band(np.mean(curves, axis=0))
        x = np.arange(1, len(mean) + 1) / len(mean) * length
        axis.plot(x, mean, ":" if line.reference else "-", color=line.color, label=line.label)
        if not line.reference and np.isfinite(deviation).all():
            axis.fill_between(x, mean - deviation, mean + deviation, color=line.color, alpha=0.18, linewidth=0)
    axis.set_ylim(-0.05, 1.08)
    axis.set_title(textwrap.fill(panel.title, _TITLE_WIDTH))


def draw_ends(axis: Any, x: Sequence[float], values: Sequence[Array], variant: str, *, marker_size: float = 5) -> None:
    """Draw mean and standard deviation over seeds of a variant's final returns, one array (seeds,) for each x."""
    ends = [band(returns) for returns in values]
    means, deviations = [float(end.mean) for end in ends], [float(end.std) for end in ends]
    shape = {"fmt": "o-", "ms": marker_size, "capsize": 3}
    axis.errorbar(x, means, deviations, color=COLORS[variant], label=LABELS[variant], **shape)


def steps_axis(axis: Any, env_steps: set[int]) -> float:
    """Label the horizontal axis with environment steps, or with fractions if the lengths differ; returns its end."""
    length = float(max(env_steps)) if len(env_steps) == 1 else 1.0
    axis.set_xlim(0, length)
    if len(env_steps) == 1:
        plots.in_millions(axis)
    else:
        axis.set_xlabel("fraction of training")
    return length


def draw_bars(axis: Any, names: Sequence[str], bars: Mapping[str, tuple[Array, Array | None, Any]]) -> None:
    """Draw bars side by side for each name, and a zero line.

    Args:
        axis: axes to draw into.
        names: labels of the horizontal axis.
        bars: by label the heights (names,), the ends (2, names) of error bars or None, and the colour.
    """
    width = 0.8 / len(bars)
    for k, (label, (heights, ends, color)) in enumerate(bars.items()):
        place = np.arange(len(names)) + (k - (len(bars) - 1) / 2) * width
        axis.bar(place, heights, 0.92 * width, color=color, label=label)
        if ends is not None:
            axis.vlines(place, *ends, color="0.35", lw=1)
    axis.set_xticks(range(len(names)), names)
    if len(names) * max(map(len, names)) > 60:  # side by side they would overlap
        axis.tick_params("x", labelsize=8)
        for label in axis.get_xticklabels():
            label.set(rotation=30, ha="right", rotation_mode="anchor")
    axis.axhline(0, color="0.2", linewidth=0.8)
    axis.grid(visible=False, axis="x")


def legend(axes: Sequence[Any], *, title: str = "", columns: int = 0) -> None:
    """Draw one legend below all panels, with every label once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    axes[0].figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns or (len(handles) if len(handles) <= 4 else 3),
        title=title or None,
    )
