"""All figures and tables, and all suites, by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from anybatch.errors import ConfigError
from anybatch.reproduce.figures import (
    adam_betas,
    advantage_std,
    cost,
    equivalence,
    ewma_grid,
    head_to_head,
    invariance,
    linear_step,
    noise_gap,
    scaling_up,
    staleness,
    tests_table,
)
from anybatch.reproduce.suites.ladder_tasks import ladder_full, ladder_quick, ladder_smoke
from anybatch.reproduce.suites.laptop import laptop, laptop_smoke
from anybatch.reproduce.suites.mujoco import mujoco, mujoco_smoke
from anybatch.reproduce.suites.procgen import procgen, procgen_smoke
from anybatch.reproduce.suites.suite import Figure, Suite

FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE
    for module in (
        staleness,
        invariance,
        head_to_head,
        linear_step,
        adam_betas,
        tests_table,
        advantage_std,
        ewma_grid,
        cost,
        scaling_up,
        equivalence,
        noise_gap,
    )
}
"""Figures in the order of the paper."""

SUITES: dict[tuple[str, str], Callable[[], Suite]] = {
    ("laptop", "full"): laptop,
    ("laptop", "smoke"): laptop_smoke,
    ("ladder", "full"): ladder_full,
    ("ladder", "quick"): ladder_quick,
    ("ladder", "smoke"): ladder_smoke,
    ("mujoco", "full"): mujoco,
    ("mujoco", "smoke"): mujoco_smoke,
    ("procgen", "full"): procgen,
    ("procgen", "smoke"): procgen_smoke,
}
"""Suites by name and budget."""


def figures_of(name: str) -> list[Figure]:
    """A figure, by its name or number in the paper (``Figure 2``), after those whose results it reads; or all figures.

    Raises:
        ConfigError: there is no such figure.
    """
    if name == "all":
        return list(FIGURES.values())
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for figure in FIGURES.values():
        if name == figure.name or plain in figure.aliases:
            return [*(FIGURES[other] for other in figure.reads), figure]
    raise ConfigError(
        f"figure is {name!r}, but must be all, one of {', '.join(FIGURES)}, or a number of the paper: figure1 to "
        "figure18, table5 (tables 1 to 4 are the hyperparameters of the presets)"
    )


def listing() -> str:
    """One line per figure: name, place in the paper, content, and other names."""
    rows = ((figure, f"; also {', '.join(figure.aliases)}" if figure.aliases else "") for figure in FIGURES.values())
    return "\n".join(f"{figure.name:15} {figure.paper:17} {figure.about}{also}" for figure, also in rows)
