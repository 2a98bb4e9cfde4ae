"""Estimated cost of a suite: runs, environment steps, GPU-hours and disk space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo
from anybatch.reproduce.figures.cost import work
from anybatch.reproduce.suites.suite import Figure, Suite, required_runs
from anybatch.reproduce.tables import markdown

_ROW_BYTES = 450  # of progress.csv
_NETWORK_BYTES = 2_500_000  # 0.62M weights of an IMPALA network for 64x64 pixels
_OBSERVATION_BYTES = 64 * 64 * 3


@dataclass(frozen=True)
class Estimate:
    """Totals over runs."""

    runs: int
    env_steps: int
    gpu_hours: float
    disk_gb: float
    """Logs and checkpoints."""
    phase_gb: float
    """Additional space for the observations of a phase while a run of PPG trains."""


def estimate(suite: Suite, figures: Sequence[Figure], steps_per_second: float) -> Estimate:
    """Estimate the totals over the runs of figures, each counted once.

    A GPU trains PPO with the default batch at ``steps_per_second``. Other algorithms take longer in proportion to their
    network passes; small batches take longer than estimated.
    """
    configs = [group.config for group, _ in required_runs(suite, figures)]
    phases = [c.iteration_batch * c.aux.policy_iterations for c in configs if c.aux.enabled]
    return Estimate(
        runs=len(configs),
        env_steps=sum(c.total_env_steps for c in configs),
        gpu_hours=sum(c.total_env_steps * relative_cost(c) for c in configs) / steps_per_second / 3600,
        disk_gb=sum(map(kept_bytes, configs)) / 1e9,
        phase_gb=max(phases, default=0) * _OBSERVATION_BYTES / 1e9,
    )


def relative_cost(config: TrainConfig) -> float:
    """Network passes per environment step, relative to PPO."""
    return work(config) / work(ppo())


def kept_bytes(config: TrainConfig) -> float:
    """Size of a run's log and checkpoints: weights with the two moments of Adam, and the EWMA."""
    rows = math.ceil(config.total_env_steps / config.iteration_batch)
    networks = 2 if config.model.architecture == "dual" else 1
    copies = 3 * networks + (1 if config.policy.proximal == "ewma" else 0) + (3 * networks if config.aux.enabled else 0)
    return rows * _ROW_BYTES + config.keep_checkpoints * copies * _NETWORK_BYTES


def table(suite: Suite, figures: Sequence[Figure], steps_per_second: float) -> str:
    """Markdown table with a row per figure, and the total of all runs, some of which figures share."""
    rows = []
    for name, chosen in (*((figure.name, [figure]) for figure in figures), ("together", figures)):
        total = estimate(suite, chosen, steps_per_second)
        steps = f"{total.env_steps / 1e6:,.1f}M" if total.env_steps < 1e10 else f"{total.env_steps / 1e9:,.1f}G"
        rows.append([name, f"{total.runs:,}", steps, f"{total.gpu_hours:,.0f}", f"{total.disk_gb:,.1f}"])
    header = ["figure", "runs", "environment steps", "GPU-hours", "disk (GB)"]
    columns = 3 if suite.stacked else 5
    return markdown(header[:columns], [row[:columns] for row in rows])
