"""All figures and tables, and both suites, by name."""

from __future__ import annotations

from collections.abc import Callable

from anybatch.errors import ConfigError
from anybatch.reproduce.figures import (
    adam_betas,
    advantage_std,
    cost,
    ewma_grid,
    head_to_head,
    invariance,
    linear_step,
    scaling_up,
    staleness,
    tests_table,
)
from anybatch.reproduce.suites.laptop import laptop, laptop_smoke
from anybatch.reproduce.suites.procgen import procgen, procgen_smoke
from anybatch.reproduce.suites.suite import Figure, Suite

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        staleness.FIGURE,
        invariance.FIGURE,
        head_to_head.FIGURE,
        linear_step.FIGURE,
        adam_betas.FIGURE,
        tests_table.FIGURE,
        advantage_std.FIGURE,
        ewma_grid.FIGURE,
        cost.FIGURE,
        scaling_up.FIGURE,
    )
}
"""In the order of the paper."""

SUITES: dict[tuple[str, str], Callable[[], Suite]] = {
    ("laptop", "full"): laptop,
    ("laptop", "smoke"): laptop_smoke,
    ("procgen", "full"): procgen,
    ("procgen", "smoke"): procgen_smoke,
}
"""By name and budget."""


def figures_of(name: str) -> list[Figure]:
    """A figure by name, or all of them; with what it reads before it.

    Raises:
        ConfigError: there is no such figure.
    """
    if name == "all":
        return list(FIGURES.values())
    if name not in FIGURES:
        raise ConfigError(f"figure is {name!r}, but must be all or one of {', '.join(FIGURES)}")
    return [*(FIGURES[other] for other in FIGURES[name].reads), FIGURES[name]]


def with_tasks(suite: Suite, figures: list[Figure]) -> list[Figure]:
    """The figures that a suite still has tasks for, after it was cut.

    Raises:
        ConfigError: there are none.
    """
    kept = [figure for figure in figures if _TASKS.get(figure.name, lambda one: one.invariance)(suite)]
    if not kept:
        names = ", ".join(figure.name for figure in figures)
        raise ConfigError(f"games leaves no task for {names}: the games named are none of its own")
    return kept


_TASKS: dict[str, Callable[[Suite], object]] = {
    "staleness": lambda suite: suite.staleness,
    "scaling-up": lambda suite: suite.scaling_up,
    "head-to-head": lambda suite: suite.algorithms["ppo"],
    "cost": lambda suite: suite.algorithms["ppo"],
    "ewma-grid": lambda suite: suite.grid in suite.invariance,
    "adam-betas": lambda suite: any(task in suite.invariance for task in suite.betas),
}
