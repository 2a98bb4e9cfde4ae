"""The look of the paper's figures: curves with bands, batch sizes as a gradient, and the words for what was changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.reproduce import plots
from anybatch.reproduce.results import Curve, Key, Results
from anybatch.reproduce.statistics import Array, band, normalized
from anybatch.reproduce.suites.suite import Suite

LABELS: dict[str, str] = {
    "all": "all adjustments",
    "no-adam-step": "(a) no Adam step size adjustment",
    "no-advantage-norm": "(b) no adv. norm. adjustment",
    "no-ewma-adjustment": "(c) no EWMA adjustment",
    "no-ewma": "(d) no EWMA at all",
    "no-policy-iterations": r"(e) no $N_\pi$ adjustment",
    "kl-256": r"KL penalty $\beta/256$, no EWMA",
    "linear-step": "linear Adam step size adjustment",
    "beta2": r"adjusting $\beta_2$",
    "both-betas": r"adjusting $\beta_1$ and $\beta_2$",
    "recent": r"(a) $\pi_{\theta_{old}}=\pi_{\theta_{recent}}$",
    "decoupled": "(b) decoupled objective",
    "behavior": r"(c) $\pi_{\theta_{old}}=\pi_{\theta_{behav}}$",
    "ppo": "PPO",
    "ppo-ewma": "PPO-EWMA",
    "ppg": "PPG",
    "ppg-ewma": "PPG-EWMA",
    "paper": "the paper's rules",
    "fixed-minibatch": "fixed minibatch size",
    "none": "no rule",
}
"""Words for the variants, in the paper's notation."""

PLAIN: dict[str, str] = {
    **LABELS,
    "no-policy-iterations": "(e) no N_π adjustment",
    "beta2": "adjusting β2",
    "both-betas": "adjusting β1 and β2",
}
"""The same without mathematics, for running text."""

ALGORITHM_COLORS = {"ppo": plots.SKY, "ppo-ewma": plots.BLUE, "ppg": plots.ORANGE, "ppg-ewma": plots.VERMILION}
PANEL = 2.6
"""Inches of a panel's width; three of them fill a page, one a column."""
NORMALIZED = "normalised return"


def gradient(count: int) -> list[Any]:
    """Colours from dark (first) to light that keep their order in grey print and for colour-blind readers."""
    return [plots.pyplot().get_cmap("viridis")(x) for x in np.linspace(0.0, 0.88, count)]


@contextmanager
def panels(path: Path, columns: int, rows: int = 1, *, width: float = PANEL, height: float = 2.1) -> Iterator[Any]:
    """A figure with a flat array of axes, even if there is one."""
    with plots.figure(path, columns=columns, rows=rows, width=width, height=height) as axes:
        yield np.atleast_1d(np.asarray(axes, dtype=object))


def normalized_curve(suite: Suite, results: Results, key: Key) -> Curve:
    """A cell's curves as normalised returns; after a divergence they are 0."""
    curve = results[key]
    values = normalized(curve.values, *suite.ranges[key[1]])
    bad = np.isnan(values) & np.array(curve.diverged or (False,) * len(curve.seeds))[:, None]
    return Curve(curve.seeds, curve.env_steps, np.where(bad, 0.0, values), curve.diverged)


def mean_over_tasks(suite: Suite, results: Results, variant: str, x: int, tasks: Sequence[str]) -> tuple[Array, Array]:
    """Progress (points,) from 0 to 1 and normalised returns (seeds, points), averaged over tasks."""
    values = np.stack([normalized_curve(suite, results, (variant, task, x)).values for task in tasks])
    points = values.shape[-1]
    return np.arange(1, points + 1) / points, values.mean(0)


def line(axis: Any, x: Array, values: Array, *, color: Any, label: str = "", style: str = "-") -> None:
    """Mean of (seeds, points) with a band of one standard deviation over seeds."""
    mean, deviation, _ = band(values)
    axis.plot(x, mean, style, color=color, label=label)
    if len(values) > 1:
        axis.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.18, linewidth=0)


def steps_axis(axis: Any, suite: Suite, tasks: Sequence[str], env_steps: Sequence[int]) -> float:
    """Label the steps axis; where tasks differ in length, as a share. Returns what progress is multiplied with."""
    same = len(set(env_steps)) == 1
    length = float(env_steps[0]) if same else 1.0
    axis.set_xlim(0, length)
    if same:
        plots.in_millions(axis)
    else:
        axis.set_xlabel("share of training")
    return length


def legend(axes: Sequence[Any], *, title: str = "", columns: int = 4) -> None:
    """One legend below all panels, of the labels in all of them."""
    figure = axes[0].figure
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        title=title or None,
        fontsize=8,
        title_fontsize=8,
    )


def hide(axes: Sequence[Any]) -> None:
    """Leave panels empty."""
    for axis in axes:
        axis.axis("off")
