"""Section 5.3's footnotes: cost of the EWMA, computed from network passes and measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anybatch.config.schema import TrainConfig
from anybatch.presets import PRESETS
from anybatch.reproduce.plots import BLACK, BLUE, ORANGE, figure
from anybatch.reproduce.results import Curve, Key, Results
from anybatch.reproduce.style import LABELS, draw_bars
from anybatch.reproduce.suites.suite import Figure, Suite
from anybatch.reproduce.tables import markdown

if TYPE_CHECKING:
    from anybatch.runs.build import Components

PAPER = {"ppo-ewma": (0.30, 0.19), "ppg-ewma": (0.023, 0.03)}
"""The paper's increases of the cost, computed without and measured with the environment."""

_BACKWARD = 3.0  # cost of a forward-backward pass in forward passes, as in the paper


def passes(config: TrainConfig) -> tuple[float, float]:
    """Forward-only and forward-backward passes of one network per environment step, counted as in the paper.

    A shared network counts once, separate ones twice. Sampling takes a forward pass, a policy epoch a forward-backward
    pass and, with a proximal policy of its own (EWMA or recent), a forward pass of that; auxiliary epochs are
    forward-backward.
    """
    networks = 2 if config.model.architecture == "dual" else 1
    optimizer = config.optimizer
    joint = optimizer.policy_epochs == optimizer.value_epochs
    epochs = optimizer.policy_epochs * networks if joint else optimizer.policy_epochs + optimizer.value_epochs
    has_copy = config.policy.proximal != "behavior" and not config.policy.interpolated
    proximal = optimizer.policy_epochs if has_copy else 0
    auxiliary = config.aux.epochs if config.aux.enabled else 0
    return float(networks + proximal), float(epochs + auxiliary * networks)


def work(config: TrainConfig) -> float:
    """Total of :func:`passes`, in forward passes."""
    forward, both = passes(config)
    return forward + _BACKWARD * both


def computed_increase(with_ewma: TrainConfig, without: TrainConfig) -> float:
    """Relative increase of the passes by the EWMA, without the cost of the environment.

    0.30 for the paper's PPO and 1/44 = 0.023 for its PPG.
    """
    return work(with_ewma) / work(without) - 1


def measure(suite: Suite) -> Results:
    """Measure the processor time of each algorithm's phase, in turn, on the suite's first task.

    Point k of the curve is round k in seconds; round 0 is a warm-up.
    """
    from anybatch.runs.build import build  # here, so that listing the figures does not load PyTorch

    task = _task(suite)
    built = {name: build(configs[task], seed=1) for name, configs in suite.algorithms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in built}
    try:
        for _ in range(suite.cost_rounds + 1):
            for name, run in built.items():
                start = time.process_time()
                one_phase(run)
                seconds[name].append(time.process_time() - start)
    finally:
        for run in built.values():
            run.env.close()
    curves: dict[Key, Curve] = {}
    for name, values in seconds.items():
        steps = suite.algorithms[name][task].total_env_steps
        curves[name, task, 1] = Curve((1,), steps, np.array([values]), (False,))
    return Results(curves)


def one_phase(run: Components) -> None:
    """Run a phase of PPG, or as many iterations of PPO, as the training loop does but without logs."""
    from anybatch.policy_phase import policy_phase
    from anybatch.training import estimate_advantages

    config = run.learner.config
    for _ in range(config.aux.policy_iterations):
        rollout = run.source.next(0)
        normalizer = run.reward_normalizer
        reward = normalizer(rollout.reward, rollout.first) if normalizer else rollout.reward
        batch, _ = estimate_advantages(rollout, reward, config, run.advantage_normalizer)
        policy_phase(batch, run.learner)
        if run.auxiliary:
            run.auxiliary.after_iteration(batch)
    if run.auxiliary:
        for _ in run.auxiliary.gradient_steps(0.0):
            pass


def increases(suite: Suite, results: Results) -> dict[str, tuple[float, float, float, float]]:
    """Relative increases of the cost by algorithm: computed, the paper's computed, measured, the paper's measured."""
    rows = {}
    for name, (paper_computed, paper_measured) in PAPER.items():
        baseline = name.removesuffix("-ewma")
        ours, without = (np.median(results[n, _task(suite), 1].values[0, 1:]) for n in (name, baseline))
        computed = computed_increase(PRESETS[name](), PRESETS[baseline]())
        rows[name] = computed, paper_computed, float(ours / without - 1), paper_measured
    return rows


def _task(suite: Suite) -> str:
    """The task that the algorithms are timed on."""
    return next(iter(suite.algorithms["ppo"]))


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Draw computed and measured increases as bars, the paper's as lines."""
    path = folder / "cost.png"
    computed, paper_computed, measured, paper_measured = 100 * np.array([*increases(suite, results).values()]).T
    bars = {"computed": (computed, None, BLUE), "measured here": (measured, None, ORANGE)}
    with figure(path, width=4.6, height=3.0, label="time added by the EWMA (%)") as (axis,):
        draw_bars(axis, [LABELS[name] for name in PAPER], bars)
        place = np.arange(len(PAPER))
        axis.hlines(paper_computed, place - 0.4, place, color=BLACK, label="in the paper")
        axis.hlines(paper_measured, place, place + 0.4, color=BLACK)
        axis.legend()
    return [path]


def summary(suite: Suite, results: Results) -> list[str]:
    """Computed and measured increases beside the paper's."""
    rows = [[LABELS[name], *(f"{x:+.1%}" for x in row)] for name, row in increases(suite, results).items()]
    configs = {name: by_task[_task(suite)] for name, by_task in suite.algorithms.items()}
    ppo, ppg = (computed_increase(configs[name], configs[name.removesuffix("-ewma")]) for name in PAPER)
    return [
        "Increase of the cost by the EWMA. Computed: from the number of network passes with the paper's "
        "hyperparameters, without the environment. Measured: processor time on "
        f"{suite.labels[_task(suite)]} with this suite's networks and hyperparameters, with the environment; there the "
        f"passes alone would add {ppo:.1%} to PPO and {ppg:.1%} to PPG.",
        markdown(["increase", "computed", "the paper's", "measured", "the paper's"], rows),
    ]


FIGURE = Figure(
    name="cost",
    paper="section 5.3",
    about="cost of the EWMA, computed and measured",
    tasks=lambda suite: tuple(suite.algorithms.get("ppo", ())),
    measure=measure,
    draw=draw,
    summary=summary,
)
