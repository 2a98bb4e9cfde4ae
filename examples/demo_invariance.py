"""The second part of ``make demo``: the same task at 64 environments and at 4, with the rules and without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.reproduce.plots import BLUE, SKY, VERMILION, figure, in_millions
from anybatch.reproduce.results import Curve
from anybatch.reproduce.run import curve_of
from anybatch.reproduce.stacked import run_stacked
from anybatch.reproduce.statistics import band
from anybatch.reproduce.suites.laptop import laptop
from anybatch.scaling import scale

TASK, DIVISOR, POINTS = "catch", 16, 20
SEEDS = tuple(range(5000, 5008))
"""Seeds of the runs of each configuration."""


def configurations() -> dict[str, TrainConfig]:
    """The default, and a smaller batch with the rules and without."""
    default = laptop().invariance[TASK]
    adjusted, _ = scale(default, DIVISOR)
    small = adjusted.env.num_envs
    return {
        f"{default.env.num_envs} environments": default,
        f"{small} environments, adjusted": adjusted,
        f"{small} environments, not adjusted": override(default, {"num_envs": small}),
    }


def compare(path: Path, configs: Mapping[str, TrainConfig], seeds: tuple[int, ...] = SEEDS) -> str:
    """Train every configuration with every seed, stacked; draw the curves, and say how they end.

    Args:
        path: the picture to write.
        configs: configurations of one task by what they are called.
        seeds: repetitions.

    Returns:
        A sentence with the numbers.
    """
    curves = {name: _train(config, seeds) for name, config in configs.items()}
    with figure(path) as axes:
        for (name, curve), color in zip(curves.items(), (BLUE, SKY, VERMILION), strict=False):
            mean, deviation, _ = band(curve.values)
            axes.plot(curve.steps, mean, color=color, label=name)
            axes.fill_between(curve.steps, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
        axes.set_title(f"PPO-EWMA on {laptop().labels[TASK]}, mean and deviation of {len(seeds)} seeds")
        axes.set_ylabel("mean return")
        axes.legend(loc="lower right")
        in_millions(axes)
    ends = {name: band(curve.values[:, -2:].mean(1)) for name, curve in curves.items()}
    return "; ".join(f"{name}: {float(end.mean):.2f} ± {float(end.std):.2f}" for name, end in ends.items())


def _train(config: TrainConfig, seeds: tuple[int, ...]) -> Curve:
    """Curves of one configuration; where a run is no longer finite its last value stands."""
    rows = []
    for result in run_stacked([config] * len(seeds), seeds):
        values = curve_of(result.columns, config, "return", POINTS, diverged=False)
        rows.append(np.nan_to_num(values, nan=float(laptop().ranges[TASK][0])))
    return Curve(seeds, config.total_env_steps, np.array(rows))
