"""The batch ladder: a task's configuration at every batch size, under the rules or without one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.reproduce.suites.suite import Cell, Suite
from anybatch.scaling import scale

RULES: dict[str, dict[str, Any]] = {
    "all": {},
    "no-adam-step": {"adam_step": "none"},
    "no-advantage-norm": {"advantage_norm": False},
    "no-ewma-adjustment": {"ewma": False},
    "no-ewma": {},
    "no-policy-iterations": {"policy_iterations": False},
    "linear-step": {"adam_step": "linear"},
    "beta2": {"adam_betas": "beta2"},
    "both-betas": {"adam_betas": True},
}
"""Arguments of :func:`anybatch.scaling.scale` for each variant."""

ABLATIONS = ("no-adam-step", "no-advantage-norm", "no-ewma-adjustment", "no-ewma")
"""(a) to (d) of figure 2."""


def without_ewma(config: TrainConfig) -> TrainConfig:
    """PPO or PPG with the same numbers."""
    return override(config, {"proximal": "behavior"})


def ladder(suite: Suite, variant: str, divisors: Iterable[int], tasks: Iterable[str]) -> list[Cell]:
    """Cells of a variant at the default batch size divided by each of ``divisors``."""
    cells = []
    for task in tasks:
        config = suite.invariance[task]
        if variant == "no-ewma":
            config = without_ewma(config)
        for divisor in divisors:
            scaled = scale(config, divisor, **RULES[variant])[0] if divisor > 1 else config
            cells.append(Cell(variant, task, divisor, scaled))
    return cells


def tasks_with_phases(suite: Suite) -> tuple[str, ...]:
    """Tasks of the invariance experiment that are trained by PPG-EWMA."""
    return tuple(task for task, config in suite.invariance.items() if config.aux.enabled)
