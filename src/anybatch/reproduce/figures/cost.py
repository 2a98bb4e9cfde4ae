"""Section 5.3's footnotes: what the EWMA costs, computed from passes and measured."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from anybatch.config.schema import TrainConfig
from anybatch.policy_phase import policy_phase
from anybatch.reproduce.plots import BLUE, ORANGE
from anybatch.reproduce.results import Curve, Results
from anybatch.reproduce.style import LABELS, panels
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown
from anybatch.runs.build import Components, build
from anybatch.training import estimate_advantages

PAPER = {"ppo-ewma": (0.30, 0.19), "ppg-ewma": (0.023, 0.03)}
"""The paper's increases, computed without and measured with the environment."""

_BACKWARD = 3.0  # a forward-backward pass costs as much as this many forward ones, as the paper has it


def passes(config: TrainConfig) -> tuple[float, float]:
    """Forward-only and forward-backward passes of one network for each environment step, as the paper counts them.

    A shared network counts once, separate ones twice. Sampling takes a forward pass; a policy epoch a forward-backward
    one and, with an EWMA, a forward pass of the policy's average; PPG's auxiliary epochs are forward-backward.
    """
    networks = 2 if config.model.architecture == "dual" else 1
    optimizer = config.optimizer
    joint = optimizer.policy_epochs == optimizer.value_epochs
    epochs = optimizer.policy_epochs * networks if joint else optimizer.policy_epochs + optimizer.value_epochs
    average = optimizer.policy_epochs if config.policy.proximal == "ewma" else 0
    auxiliary = config.aux.epochs if config.aux.enabled else 0
    return float(networks + average), float(epochs + auxiliary * networks)


def work(config: TrainConfig) -> float:
    """The passes of :func:`passes` together, in forward passes."""
    forward, both = passes(config)
    return forward + _BACKWARD * both


def computed_increase(with_ewma: TrainConfig, without: TrainConfig) -> float:
    """By what share the EWMA increases the passes, the environment's own cost left out.

    0.30 for the paper's PPO and 1/44 = 0.023 for its PPG.
    """
    return work(with_ewma) / work(without) - 1


def measure(suite: Suite) -> Results:
    """Seconds of processor time for each algorithm's iteration, by turns, on the suite's first task.

    Point k of the curve is round k; the first of them warms up.
    """
    task = next(iter(suite.algorithms["ppo"]))
    parts = {name: build(configs[task], seed=1) for name, configs in suite.algorithms.items()}
    taken: dict[str, list[float]] = {name: [] for name in parts}
    try:
        for _ in range(suite.cost_rounds + 1):
            for name, built in parts.items():
                began = time.process_time()
                one_phase(built)
                taken[name].append(time.process_time() - began)
    finally:
        for built in parts.values():
            built.env.close()
    curves = {
        (name, task, 1): Curve((1,), suite.algorithms[name][task].total_env_steps, np.array([seconds]))
        for name, seconds in taken.items()
    }
    return Results(curves)


def one_phase(parts: Components) -> None:
    """A phase of PPG, and as many iterations of PPO, as the training loop does them but without its logs."""
    config = parts.learner.config
    for _ in range(config.aux.policy_iterations):
        rollout = parts.source.next(0)
        normalizer = parts.reward_normalizer
        reward = normalizer(rollout.reward, rollout.first) if normalizer else rollout.reward
        batch, _ = estimate_advantages(rollout, reward, config, parts.advantage_normalizer)
        policy_phase(batch, parts.learner)
        if parts.auxiliary:
            parts.auxiliary.after_iteration(batch)
    if parts.auxiliary:
        for _ in parts.auxiliary.gradient_steps(0.0):
            pass


def cells(suite: Suite) -> list[Cell]:
    """None: it is measured in this process."""
    return []


def _increases(suite: Suite, results: Results) -> dict[str, tuple[float, float, float, float]]:
    """Paper computed, ours computed, paper measured, ours measured, by algorithm."""
    from anybatch.presets import PRESETS

    task = next(iter(suite.algorithms["ppo"]))
    found = {}
    for name, (paper_computed, paper_measured) in PAPER.items():
        baseline = name.removesuffix("-ewma")
        seconds = [statistics.median(results[n, task, 1].values[0, 1:].tolist()) for n in (name, baseline)]
        computed = computed_increase(PRESETS[name](), PRESETS[baseline]())
        found[name] = (paper_computed, computed, paper_measured, seconds[0] / seconds[1] - 1)
    return found


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Bars: computed, measured, the paper's as outlines."""
    path = folder / "cost.png"
    with panels(path, 1, width=4.0, height=2.4) as axes:
        for k, (_, values) in enumerate(_increases(suite, results).items()):
            paper_computed, computed, paper_measured, measured = (100 * x for x in values)
            for offset, ours, paper, color, what in (
                (-0.2, computed, paper_computed, BLUE, "computed"),
                (0.2, measured, paper_measured, ORANGE, "measured here"),
            ):
                axes[0].bar(k + offset, ours, 0.36, color=color, label=what if k == 0 else None)
                label = "the paper's" if k == 0 and offset < 0 else None
                axes[0].hlines(paper, k + offset - 0.2, k + offset + 0.2, color="0.1", lw=1.5, label=label)
        axes[0].set_xticks(range(len(PAPER)), [LABELS[name] for name in PAPER])
        axes[0].set_ylabel("increase by the EWMA (%)")
        axes[0].axhline(0, color="0.2", linewidth=0.8)
        axes[0].grid(visible=False, axis="x")
        axes[0].legend(fontsize=8)
    return [path]


def summary(suite: Suite, results: Results) -> list[str]:
    """Computed and measured increases beside the paper's."""
    rows = [
        [LABELS[name], *(f"{x:+.1%}" for x in (ours, paper, here, there))]
        for name, (paper, ours, there, here) in _increases(suite, results).items()
    ]
    first = next(iter(suite.algorithms["ppo"]))
    configs = {name: suite.algorithms[name][first] for name in (*PAPER, "ppo", "ppg")}
    alone = [computed_increase(configs[name], configs[name.removesuffix("-ewma")]) for name in PAPER]
    task = suite.labels[first]
    return [
        "What the EWMA adds to PPO and PPG: computed from the paper's hyperparameters by counting passes (without the "
        f"environment), and measured as processor time on {task} with this suite's networks and hyperparameters (with "
        f"the environment; passes alone would add {alone[0]:.1%} to its PPO and {alone[1]:.1%} to its PPG).",
        markdown(["increase", "computed", "the paper's", "measured", "the paper's"], rows),
    ]


FIGURE = Figure("cost", "section 5.3", "the EWMA's cost, computed and measured", cells, draw, summary, measure=measure)
