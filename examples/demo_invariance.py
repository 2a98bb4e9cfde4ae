"""The second part of ``make demo``: the same task at 64 environments and at 4, with the scaling rules and without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np

from anybatch.config import TrainConfig, override
from anybatch.presets import ppo_ewma
from anybatch.reproduce.stacked import run_stacked
from anybatch.scaling import scale

DIVISOR = 16
"""Quotient of the two batch sizes."""
SEEDS = tuple(range(5000, 5008))
"""Seeds of the runs of each configuration."""
_POINTS, _COLORS = 50, ("#000000", "#0072B2", "#D55E00")


def configurations() -> dict[str, TrainConfig]:
    """The tuned configuration, and a smaller batch with the rules and without."""
    tuned = ppo_ewma(
        "envpool:Catch-v0",
        num_envs=64,
        rollout_steps=32,
        minibatches=8,
        policy_epochs=1,
        value_epochs=1,
        objective="kl",
        step_size=4e-2,
        discount=0.99,
        encoder="mlp",
        architecture="dual",
        model={"options": {"width": 32, "depth": 2}},
        total_env_steps=40_000,
        workers=1,
        threads=1,
        device="cpu",
        tensorboard=False,
        noise_scale=False,
    )
    adjusted, _ = scale(tuned, DIVISOR)
    small = adjusted.env.num_envs
    return {
        f"{tuned.env.num_envs} environments": tuned,
        f"{small} environments, adjusted": adjusted,
        f"{small} environments, not adjusted": override(tuned, {"num_envs": small}),
    }


def compare(path: Path, configs: Mapping[str, TrainConfig], seeds: tuple[int, ...] = SEEDS) -> str:
    """Train every configuration with every seed, and draw the curves.

    Args:
        path: the picture to write.
        configs: configurations of one task, by the name in the legend.
        seeds: repetitions.

    Returns:
        The final mean returns.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ends = []
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for (name, config), color in zip(configs.items(), _COLORS, strict=True):
        steps = np.linspace(0, config.total_env_steps, _POINTS)
        returns = _returns(config, seeds, steps)
        mean, deviation = returns.mean(0), returns.std(0)
        axes.plot(steps / 1000, mean, color=color, label=name)
        axes.fill_between(steps / 1000, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
        ends.append(f"{name}: {mean[-1]:.2f} ± {deviation[-1]:.2f}")
    axes.set(title=f"PPO-EWMA on Catch, mean and deviation of {len(seeds)} seeds")
    axes.set(xlabel="thousand environment steps", ylabel="mean return of the last 100 episodes")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return "; ".join(ends)


def _returns(config: TrainConfig, seeds: tuple[int, ...], steps: np.ndarray) -> np.ndarray:
    """(seeds, points) returns after so many environment steps; a run that diverges keeps its last return."""
    columns = [result.columns for result in run_stacked([config] * len(seeds), seeds)]
    return np.array([np.interp(steps, x["env_steps"], x["mean_episode_return"]) for x in columns])
