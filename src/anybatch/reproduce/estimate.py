"""What a suite would take: runs, environment steps, hours of a GPU, disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo
from anybatch.reproduce.figures.cost import work
from anybatch.reproduce.suites.suite import Figure, Suite, work_of
from anybatch.reproduce.tables import markdown

_ROW_BYTES = 450  # of progress.csv
_NETWORK_BYTES = 2_500_000  # 0.62M weights of an IMPALA network for 64x64 pixels
_OBSERVATION_BYTES = 64 * 64 * 3


@dataclass(frozen=True)
class Estimate:
    """Totals of some runs."""

    runs: int
    env_steps: int
    gpu_hours: float
    disk_gb: float
    """What stays: logs and checkpoints."""
    phase_gb: float
    """What a run of PPG needs besides while it trains, for the observations of a phase."""


def estimate(suite: Suite, figures: Sequence[Figure], steps_per_second: float) -> Estimate:
    """Totals over the runs of figures, each counted once.

    Args:
        suite: tasks and hyperparameters.
        figures: what is wanted.
        steps_per_second: environment steps a second that a GPU trains PPO at, at the default batch; other algorithms
            take longer in proportion to their passes. Small batches are slower than this says.
    """
    configs = [cell.config for cell, _ in work_of(suite, figures).jobs]
    seconds = sum(c.total_env_steps / steps_per_second * relative_cost(c) for c in configs)
    phases = [c.iteration_batch * c.aux.policy_iterations for c in configs if c.aux.enabled]
    return Estimate(
        runs=len(configs),
        env_steps=sum(c.total_env_steps for c in configs),
        gpu_hours=seconds / 3600,
        disk_gb=sum(map(kept_bytes, configs)) / 1e9,
        phase_gb=max(phases, default=0) * _OBSERVATION_BYTES / 1e9,
    )


def relative_cost(config: TrainConfig) -> float:
    """Passes of the networks for an environment step, relative to PPO's."""
    return work(config) / work(ppo())


def kept_bytes(config: TrainConfig) -> float:
    """Log and checkpoints of a run: weights with Adam's two moments, and the EWMA."""
    rows = math.ceil(config.total_env_steps / config.iteration_batch)
    networks = 2 if config.model.architecture == "dual" else 1
    copies = 3 * networks + (1 if config.policy.proximal == "ewma" else 0) + (3 * networks if config.aux.enabled else 0)
    return rows * _ROW_BYTES + config.keep_checkpoints * copies * _NETWORK_BYTES


def table(suite: Suite, figures: Sequence[Figure], steps_per_second: float) -> str:
    """A row for each figure, and the total of all runs, which figures share."""
    rows = []
    for figure in figures:
        one = estimate(suite, [figure], steps_per_second)
        rows.append([figure.name, *_row(one, suite)])
    rows.append(["together", *_row(estimate(suite, figures, steps_per_second), suite)])
    return markdown(
        ["figure", "runs", "environment steps", *([] if suite.stacked else ["GPU-hours", "disk (GB)"])], rows
    )


def _row(one: Estimate, suite: Suite) -> list[str]:
    steps = f"{one.env_steps / 1e6:,.1f}M" if one.env_steps < 1e10 else f"{one.env_steps / 1e9:,.1f}G"
    return [f"{one.runs:,}", steps, *([] if suite.stacked else [f"{one.gpu_hours:,.0f}", f"{one.disk_gb:,.1f}"])]
