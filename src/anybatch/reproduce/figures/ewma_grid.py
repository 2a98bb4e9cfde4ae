"""Appendix G: centre of mass and KL coefficient varied at the smallest batch."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from anybatch.config.io import override
from anybatch.reproduce.finals import final_returns
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Array
from anybatch.reproduce.style import NORMALIZED
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import markdown
from anybatch.scaling import scale


def runs(suite: Suite) -> list[RunGroup]:
    """Every pair of factors: the variant divides the centre of mass, x multiplies the KL coefficient."""
    config = scale(suite.invariance[suite.grid], suite.divisors[-1])[0]
    if suite.grid_steps is not None:
        config = override(config, {"total_env_steps": suite.grid_steps})
    center, coefficient = config.policy.center_of_mass, config.policy.kl_coefficient
    groups = []
    for divisor, factor in itertools.product(suite.grid_factors, repeat=2):
        changes = {"center_of_mass": center / divisor, "kl_coefficient": coefficient * factor}
        groups.append(RunGroup(f"com-{divisor}", suite.grid, factor, override(config, changes)))
    return groups


def grid_returns(suite: Suite, results: Results) -> Array:
    """(divisors of the centre of mass, factors of the KL coefficient) final normalised returns."""
    factors, task = suite.grid_factors, (suite.grid,)
    return np.array(
        [[final_returns(suite, results, f"com-{d}", factor, task).mean() for factor in factors] for d in factors]
    )


def paper_layout(grid: Array) -> Array:
    """Rows: KL coefficient from large to small; columns: centre of mass from small to large."""
    return np.asarray(grid[::-1, ::-1].T)


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw the heat map, with the default in the bottom right corner as in the paper."""
    path, factors = folder / "ewma-grid.png", suite.grid_factors
    shown = paper_layout(grid_returns(suite, results))
    center, coefficient = _defaults(suite)
    with figure(path, width=5.0, height=3.8, label="KL penalty coefficient β") as (axis,):
        image = axis.imshow(shown, cmap="viridis", vmin=min(0.0, float(shown.min())), vmax=1.0, aspect="auto")
        for (row, column), value in np.ndenumerate(shown):
            color = "white" if value < 0.6 else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
        axis.set_xticks(range(len(factors)), [f"{center / d:g}" for d in reversed(factors)])
        axis.set_yticks(range(len(factors)), [f"{coefficient * f:g}" for f in reversed(factors)])
        axis.set_xlabel("centre of mass of the EWMA (gradient steps)")
        axis.grid(visible=False)
        axis.set_title(f"{suite.labels[suite.grid]}, {suite.batch_label(suite.divisors[-1])}")
        axis.figure.colorbar(image, ax=axis, label=f"final {NORMALIZED}")
    return [path]


def _defaults(suite: Suite) -> tuple[float, float]:
    policy = suite.invariance[suite.grid].policy
    return policy.center_of_mass * suite.divisors[-1], policy.kl_coefficient


def summary(suite: Suite, results: Results) -> list[str]:
    """Spread along the diagonal, where both change, and along the edges, where one changes."""
    grid, factors = grid_returns(suite, results), suite.grid_factors
    center, coefficient = _defaults(suite)
    diagonal, only_center, only_kl = np.diagonal(grid), grid[:, 0], grid[0, :]
    rows = [[f"COM {center / d:g}", *(f"{x:.3f}" for x in row)] for d, row in zip(factors, grid, strict=True)]
    return [
        f"With the default (centre of mass COM {center:g}, KL coefficient β {coefficient:g}) the final normalised "
        f"return is {grid[0, 0]:.3f}. Dividing COM by {factors[-1]} alone gives {only_center[-1]:.3f}, multiplying β "
        f"by {factors[-1]} alone {only_kl[-1]:.3f}, both together {diagonal[-1]:.3f}; halfway along the diagonal it is "
        f"{diagonal[len(diagonal) // 2]:.3f}.",
        markdown(["final return", *(f"β {coefficient * f:g}" for f in factors)], rows),
    ]


FIGURE = Figure(
    name="ewma-grid",
    paper="appendix G",
    about="centre of mass and KL coefficient varied at the smallest batch",
    tasks=lambda suite: (suite.grid,) if suite.grid in suite.invariance else (),
    draw=draw,
    summary=summary,
    runs=runs,
    aliases=("figure18",),
)
