"""Beyond the paper: more environments than the default under three rules, and the noise scale as their limit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.reproduce import style
from anybatch.reproduce.finals import final_returns
from anybatch.reproduce.plots import BLACK, figure
from anybatch.reproduce.results import Results
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite
from anybatch.reproduce.tables import markdown
from anybatch.scaling import rescale

RULES = ("paper", "fixed-minibatch", "none")
"""Ways to adjust the hyperparameters to more environments."""
NOISE = "noise-scale"
"""Variant whose runs estimate the noise scale."""


def runs(suite: Suite) -> list[RunGroup]:
    """Every multiple of the default under every rule, and runs at the default that estimate the noise scale."""
    groups = []
    for task, config in suite.scaling_up.items():
        for rule in RULES:
            for multiple in suite.multiples:
                groups.append(RunGroup(rule, task, multiple, scaled_up(config, multiple, rule)))
        groups.append(RunGroup(NOISE, task, 1, override(config, {"log.noise_scale": True}), single=True))
    return groups


def scaled_up(config: TrainConfig, multiple: int, rule: str) -> TrainConfig:
    """Configuration with ``multiple`` times the environments, and everything else as the rule says."""
    num_envs = config.env.num_envs * multiple
    if multiple == 1:
        return config
    if rule == "none":
        return override(config, {"num_envs": num_envs})
    if rule not in ("paper", "fixed-minibatch"):
        raise ConfigError(f"rule is {rule!r}, but must be one of {', '.join(RULES)}")
    return rescale(config, num_envs=num_envs, rule=rule)[0]  # type: ignore[arg-type]


def noise_scale(results: Results, task: str) -> float:
    """Noise scale of Adam's updates in samples: the median over training and seeds, NaN without an estimate."""
    values = results[NOISE, task, 1].values
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw the final return against the samples of a gradient step, with the noise scale."""
    path, tasks = folder / "scaling-up.png", FIGURE.tasks(suite)
    with figure(path, len(tasks), width=4.0, height=3.0, label=f"final {style.NORMALIZED}") as axes:
        for axis, task in zip(axes, tasks, strict=True):
            config = suite.scaling_up[task]
            batches = [config.optimization_batch * m for m in suite.multiples]
            for rule in RULES:
                ends = [final_returns(suite, results, rule, m, (task,))[:, 0] for m in suite.multiples]
                style.draw_ends(axis, batches, ends, rule, marker_size=9 if rule == "paper" else 5)
            limit = noise_scale(results, task)
            if np.isfinite(limit):
                axis.axvline(limit, color=BLACK, linestyle=":", label="noise scale at the smallest batch")
            axis.set_xscale("log", base=2)
            axis.set_xticks(batches, [f"{config.env.num_envs * m}" for m in suite.multiples])
            axis.set_xlabel("environments")
            axis.set_title(suite.labels[task])
            axis.set_ylim(-0.05, 1.1)
        style.legend(axes, columns=2)
    return [path]


def summary(suite: Suite, results: Results) -> list[str]:
    """Final returns by rule and number of environments, and the noise scale."""
    rows, estimates = [], []
    for task, config in suite.scaling_up.items():
        for rule in RULES:
            ends = (final_returns(suite, results, rule, m, (task,)).mean() for m in suite.multiples)
            rows.append([f"{suite.labels[task]}, {style.LABELS[rule]}", *(f"{x:.3f}" for x in ends)])
        limit = noise_scale(results, task)
        shown = f"{limit:,.0f} samples" if np.isfinite(limit) else "no estimate"
        estimates.append(
            f"{suite.labels[task]}: {shown}, where a gradient step at the default has {config.optimization_batch:,.0f}"
        )
    return [
        f"Noise scale of Adam's updates, measured at the default: {'; '.join(estimates)}.",
        markdown(["final return, environments", *(f"×{m}" for m in suite.multiples)], rows),
    ]


FIGURE = Figure(
    name="scaling-up",
    paper="beyond the paper",
    about="up to 16 times the environments under three rules, and the noise scale",
    tasks=lambda suite: tuple(suite.scaling_up),
    draw=draw,
    summary=summary,
    runs=runs,
)
