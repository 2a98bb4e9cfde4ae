"""The batch ladder: a task's configuration at every batch size, with all rules or without one of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import ScalingWarning
from anybatch.reproduce.suites.suite import RunGroup, Suite
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


def ladder(suite: Suite, variant: str, divisors: Iterable[int], tasks: Iterable[str]) -> list[RunGroup]:
    """Runs of a variant with the default batch size divided by each of ``divisors``."""
    groups = []
    for task in tasks:
        config = suite.invariance[task]
        if variant == "no-ewma":
            config = without_ewma(config)
        for divisor in divisors:
            with warnings.catch_warnings():  # ablations are there to break conditions
                warnings.simplefilter("ignore", ScalingWarning)
                scaled = scale(config, divisor, **RULES[variant])[0] if divisor > 1 else config
            groups.append(RunGroup(variant, task, divisor, scaled))
    return groups


def ladder_tasks(suite: Suite) -> tuple[str, ...]:
    """Tasks of the invariance experiment."""
    return tuple(suite.invariance)


def ppg_tasks(suite: Suite) -> tuple[str, ...]:
    """Tasks of the invariance experiment that PPG-EWMA is trained on."""
    return tuple(task for task, config in suite.invariance.items() if config.aux.enabled)
