"""Estimated cost of a suite: runs, environment steps, GPU-hours and disk space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo
from anybatch.reproduce.figures.cost import passes
from anybatch.reproduce.suites.suite import Figure, Suite, required_runs
from anybatch.reproduce.tables import markdown

MEASURED_STEPS_PER_SECOND = 27_300.0
"""Environment steps per second of PPO on Procgen at the default batch, on one H200 (results/performance/h200.md)."""
# measured there as well: environments and the CUDA graph of an acting step with 256 of them, then one network's
# forward and backward pass by samples, and its forward pass alone
_ENV_SECONDS = 1 / 138_000
_ACTING_SECONDS = 256 / 288_000
_BACKWARD_SAMPLES = np.array([256.0, 1024.0, 2048.0, 8192.0])
_BACKWARD_SECONDS = _BACKWARD_SAMPLES / np.array([45_800.0, 108_700.0, 121_100.0, 130_100.0])
_FORWARD_SPEED = 351_000 / 130_100

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

    A GPU trains PPO with the default batch at ``steps_per_second``; others take longer by :func:`relative_cost`.
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
    """Time per environment step on a GPU, relative to PPO at the default batch, from the rates measured on an H200."""
    return step_seconds(config) / step_seconds(ppo())


def step_seconds(config: TrainConfig) -> float:
    """Seconds per environment step: the environment, acting, and the passes of policy and auxiliary phase.

    A step of acting or of the optimiser with few samples takes as long as one with 256: it is bound by latency.
    """
    forward, both = passes(config)
    networks = 2 if config.model.architecture == "dual" else 1
    acting = networks * _ACTING_SECONDS / min(config.env.num_envs, 256)
    batch = config.optimization_batch
    auxiliary, auxiliary_seconds = 0.0, 0.0
    if config.aux.enabled and config.aux.epochs:
        auxiliary = float(config.aux.epochs * networks)
        samples = config.aux.policy_iterations * config.iteration_batch / config.aux.minibatches_per_epoch
        auxiliary_seconds = auxiliary * pass_seconds(samples)
    average = (forward - networks) / _FORWARD_SPEED
    return _ENV_SECONDS + acting + (both - auxiliary + average) * pass_seconds(batch) + auxiliary_seconds


def pass_seconds(samples: float) -> float:
    """Seconds per sample of a forward and backward pass of one network over a minibatch of ``samples``."""
    if samples > _BACKWARD_SAMPLES[-1]:
        return float(_BACKWARD_SECONDS[-1] / _BACKWARD_SAMPLES[-1])
    return float(np.interp(samples, _BACKWARD_SAMPLES, _BACKWARD_SECONDS)) / samples


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
