"""Appendix G: centre of mass against KL coefficient at the smallest batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anybatch.config.io import override
from anybatch.reproduce.finals import final
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import Array
from anybatch.reproduce.style import NORMALIZED, panels
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown
from anybatch.scaling import scale


def cells(suite: Suite) -> list[Cell]:
    """Every pair: the variant divides the centre of mass, the ladder multiplies the KL coefficient."""
    config = scale(suite.invariance[suite.grid], suite.divisors[-1])[0]
    if suite.grid_steps is not None:
        config = override(config, {"total_env_steps": suite.grid_steps})
    center, coefficient = config.policy.center_of_mass, config.policy.kl_coefficient
    return [
        Cell(
            f"com-{divisor}",
            suite.grid,
            factor,
            override(config, {"center_of_mass": center / divisor, "kl_coefficient": coefficient * factor}),
        )
        for divisor in suite.grid_factors
        for factor in suite.grid_factors
    ]


def returns(suite: Suite, results: Results) -> Array:
    """(divisors of the centre of mass, factors of the KL coefficient) final normalised returns."""
    return np.array(
        [
            [final(suite, results, f"com-{divisor}", factor, (suite.grid,)).mean() for factor in suite.grid_factors]
            for divisor in suite.grid_factors
        ]
    )


def paper_layout(grid: Array) -> Array:
    """Rows: KL coefficient from large to small; columns: centre of mass from small to large."""
    return np.asarray(grid[::-1, ::-1].T)


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """The heat map, with the default in the bottom right corner as in the paper."""
    path, grid = folder / "ewma-grid.png", returns(suite, results)
    center, coefficient = _defaults(suite)
    shown = paper_layout(grid)
    with panels(path, 1, width=4.2, height=3.4) as axes:
        axis = axes[0]
        image = axis.imshow(shown, cmap="viridis", vmin=min(0.0, float(shown.min())), vmax=1.0, aspect="auto")
        for (row, column), value in np.ndenumerate(shown):
            color = "white" if value < 0.6 else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
        factors = suite.grid_factors
        axis.set_xticks(range(len(factors)), [f"{center / d:g}" for d in reversed(factors)])
        axis.set_yticks(range(len(factors)), [f"{coefficient * f:g}" for f in reversed(factors)])
        axis.set_xlabel(r"COM$_{\mathrm{prox}}$ (gradient steps)")
        axis.set_ylabel(r"KL penalty coefficient $\beta$")
        axis.grid(visible=False)
        axis.set_title(f"{suite.labels[suite.grid]} at default / {suite.divisors[-1]}")
        axis.figure.colorbar(image, ax=axis, label=NORMALIZED)
    return [path]


def _defaults(suite: Suite) -> tuple[float, float]:
    policy = suite.invariance[suite.grid].policy
    return policy.center_of_mass * suite.divisors[-1], policy.kl_coefficient


def summary(suite: Suite, results: Results) -> list[str]:
    """Spread along the diagonal (both change) and along the edges (one changes)."""
    grid, factors = returns(suite, results), suite.grid_factors
    center, coefficient = _defaults(suite)
    diagonal, only_center, only_kl = np.diagonal(grid), grid[:, 0], grid[0, :]
    rows = [[f"COM {center / d:g}", *(f"{x:.3f}" for x in row)] for d, row in zip(factors, grid, strict=True)]
    return [
        f"From the default (COM {center:g}, β {coefficient:g}), final normalised return {grid[0, 0]:.3f}: dividing COM "
        f"by {factors[-1]} alone gives {only_center[-1]:.3f}, multiplying β by {factors[-1]} alone {only_kl[-1]:.3f}, "
        f"both together {diagonal[-1]:.3f}; halfway along the diagonal {diagonal[len(diagonal) // 2]:.3f}.",
        markdown(["final return", *(f"β {coefficient * f:g}" for f in factors)], rows),
    ]


FIGURE = Figure(
    "ewma-grid", "appendix G", "centre of mass times KL coefficient at the smallest batch", cells, draw, summary
)
