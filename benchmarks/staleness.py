"""Return against the age of the data: figure 1's three variants and PPO-EWMA, on small tasks (section 5.1).

    python benchmarks/staleness.py run                    # train what is missing, and draw; ten minutes on an idle core
    python benchmarks/staleness.py draw                   # tables and figure from scores.csv.gz in results/staleness
    python benchmarks/staleness.py run tuning             # step sizes compared, on seeds that are used for nothing else
    python benchmarks/staleness.py run beyond             # rules of other authors, at delays 4, 16 and 64
    python benchmarks/staleness.py run own-step-size      # the largest delay with the best step size of each variant
    python benchmarks/staleness.py run --seeds 2 --delays 0 2 --env-steps 20000 --runs /tmp/runs --results /tmp/results

Runs of one task and delay are trained together, as a stack (:mod:`anybatch.reproduce.stacked`). The delay is the
artificial one; asynchronous sampling with a deterministic schedule of the same lag gives the same bits.

The score of a run is the mean return of the episodes that end in the last tenth of its environment steps, normalised by
the range in ``TASKS``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo
from anybatch.reproduce import van_elteren
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import write_rows
from anybatch.reproduce.stacked import RunResult, launch
from anybatch.reproduce.statistics import band, normalized
from anybatch.reproduce.style import COLORS, LABELS, NORMALIZED, legend
from anybatch.reproduce.tables import markdown, p_value
from anybatch.system.atomic_files import write_text

ROOT = Path(__file__).parent.parent
DEFAULTS = {
    "delays": ([0, 1, 2, 4, 8, 16], 8),
    "tuning": ([0, 16], 4),
    "own-step-size": ([16], 8),
    "beyond": ([4, 16, 64], 6),
}
"""Delays and number of seeds."""
FIRST_SEED, FIRST_TUNING_SEED, FIRST_BEYOND_SEED = 70_000, 100, 71_000
TUNING_FACTORS = (0.5, 1.0, 2.0, 4.0)
LAST_SHARE = 0.1
FIELDS = ("task", "variant", "delay", "step_size", "seed", "return", "score")


@dataclass(frozen=True)
class Task:
    """An environment, what was tuned for it without delay, and the returns that count as 0 and 1."""

    env: str
    step_size: float
    clip: float
    low: float
    high: float


@dataclass(frozen=True)
class Variant:
    """A choice of the two policies."""

    name: str
    """Key of its label and colour in figures."""
    proximal: str
    importance: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return LABELS.get(self.name, self.name)


TASKS = {
    "catch": Task("envpool:Catch-v0", 1e-3, 0.1, -0.6, 1.0),
    "acrobot": Task("envpool:Acrobot-v1", 5e-4, 0.2, -500.0, -80.0),
}
VARIANTS = {
    "recent": Variant("recent", "recent", "proximal"),
    "decoupled": Variant("decoupled", "recent", "behavior"),
    "behavior": Variant("behavior", "behavior", "behavior"),
    "ewma": Variant("ppo-ewma", "ewma", "behavior"),
}
FIGURE_1 = tuple(VARIANTS)
VARIANTS |= {
    "decoupled-ess": Variant("decoupled, ESS step size", "recent", "behavior", {"follow_ess": True}),
    "ewma-ess": Variant("PPO-EWMA, ESS step size", "ewma", "behavior", {"follow_ess": True}),
    "m2": Variant("second-moment mask", "behavior", "behavior", {"policy.clip": math.inf, "second_moment": 0.04}),
    "interpolated": Variant("interpolated", "behavior", "behavior", {"interpolated": True, "center_of_mass": 24.0}),
}
BEYOND = ("decoupled", "ewma", *list(VARIANTS)[len(FIGURE_1) :])
"""Beside the two best of figure 1. The interpolated policy is one iteration of 24 gradient steps old, as in A-3PO."""
SHARED: dict[str, Any] = {
    "total_env_steps": 120_000,
    "env.num_envs": 16,
    "rollout.steps": 32,
    "env.threads": 1,
    "optimizer.minibatches": 8,
    "optimizer.policy_epochs": 3,
    "optimizer.value_epochs": 3,
    "advantage.discount": 0.99,
    "policy.entropy_coefficient": 0.01,
    "policy.allow_stale_coupled": True,  # the variants that do worse are the point
    "model": {"encoder": "mlp", "architecture": "dual", "options": {"width": 32, "depth": 2}},
    "precision": "fp32",
    "device": "cpu",
    "log": {"tensorboard": False, "noise_scale": False},
}


def configure(task: Task, variant: Variant, delay: int, env_steps: int | None, factor: float = 1.0) -> TrainConfig:
    changes = {
        **SHARED,
        "optimizer.step_size": task.step_size * factor,
        "policy.clip": task.clip,
        "policy.proximal": variant.proximal,
        "policy.importance": variant.importance,
        "rollout.source": {"kind": "delayed", "delay": delay},
        **variant.changes,
    }
    config = override(ppo(task.env), changes)
    return override(config, {"total_env_steps": env_steps}) if env_steps else config


def planned(arguments: argparse.Namespace) -> list[tuple[dict[str, Any], TrainConfig]]:
    """Every run: what identifies it, and its configuration."""
    first = {"tuning": FIRST_TUNING_SEED, "beyond": FIRST_BEYOND_SEED}.get(arguments.what, FIRST_SEED)
    tuning = read_scores(arguments.results / "tuning.csv.gz") if arguments.what == "own-step-size" else []
    runs = []
    for task, delay, variant in itertools.product(arguments.tasks, arguments.delays, arguments.variants):
        factors: tuple[float, ...] = (1.0,)
        if arguments.what == "tuning":
            factors = TUNING_FACTORS
        if arguments.what == "own-step-size":
            factors = (best_factor(tuning, task, variant, delay),)
        for factor in factors:
            config = configure(TASKS[task], VARIANTS[variant], delay, arguments.env_steps, factor)
            about = {"task": task, "variant": variant, "delay": delay, "step_size": config.optimizer.step_size}
            runs += [({**about, "seed": first + number}, config) for number in range(arguments.seeds)]
    return runs


def best_factor(tuning: Sequence[dict[str, Any]], task: str, variant: str, delay: int) -> float:
    """The factor of the step size with the best mean score on the tuning seeds at this delay."""
    means = {
        factor: scores_of(
            tuning, task=task, variant=variant, delay=delay, step_size=TASKS[task].step_size * factor
        ).mean()
        for factor in TUNING_FACTORS
    }
    return max(means, key=lambda factor: means[factor])


def final_return(result: RunResult) -> float:
    """Mean return of the episodes that ended in the last tenth of the environment steps."""
    steps, episodes, total = (result.columns[name] for name in ("env_steps", "episodes", "episode_return_sum"))
    first = int(np.searchsorted(steps, (1 - LAST_SHARE) * steps[-1])) - 1
    return float((total[-1] - total[first]) / (episodes[-1] - episodes[first]))


def run(arguments: argparse.Namespace) -> None:
    """Train what is missing, write the scores, and draw."""
    torch.set_num_threads(1)
    runs = planned(arguments)
    results = launch(
        [config for _, config in runs],
        [about["seed"] for about, _ in runs],
        arguments.runs,
        processes=arguments.processes,
        on_done=lambda done, total: print(f"{done} of {total} runs", flush=True),
    )
    rows = []
    for (about, _), result in zip(runs, results, strict=True):
        if result.diverged:
            raise SystemExit(f"diverged: {about}")
        task, final = TASKS[about["task"]], final_return(result)
        rows.append({**about, "return": final, "score": float(normalized(final, task.low, task.high))})
    arguments.results.mkdir(parents=True, exist_ok=True)
    write_scores(arguments.results / f"{arguments.name}.csv.gz", rows)
    draw(arguments)


def read_scores(path: Path) -> list[dict[str, Any]]:
    """The rows of scores.csv.gz."""
    kinds = {"task": str, "variant": str, "delay": int, "seed": int}
    with gzip.open(path, "rt", newline="") as file:
        return [{name: kinds.get(name, float)(value) for name, value in row.items()} for row in csv.DictReader(file)]


def write_scores(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    numbers = ("return", "score")
    cells = ([f"{row[name]:.6g}" if name in numbers else row[name] for name in FIELDS] for row in rows)
    write_rows(path, [FIELDS, *cells])


def scores_of(rows: Sequence[dict[str, Any]], **wanted: Any) -> np.ndarray:
    """(seeds,) scores in the order of the seeds."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return np.array([row["score"] for row in sorted(found, key=lambda row: row["seed"])])


def distinct(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def score_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Mean score and its standard error, a table for each task."""
    delays = distinct(rows, "delay")
    parts = []
    for task in distinct(rows, "task"):
        lines = []
        for variant in distinct(rows, "variant"):
            bands = [band(scores_of(rows, task=task, variant=variant, delay=delay)) for delay in delays]
            lines.append([VARIANTS[variant].label, *(f"{float(b.mean):.3f} ± {float(b.sem):.3f}" for b in bands)])
        parts.append(markdown([f"{task}, delay", *map(str, delays)], lines))
    return "\n\n".join(parts)


def test_table(rows: Sequence[dict[str, Any]], better: str) -> str:
    """Whether ``better`` is above each other variant: van Elteren's one-tailed test with the tasks as strata."""
    tasks, lines = distinct(rows, "task"), []
    for other in (variant for variant in distinct(rows, "variant") if variant != better):
        cells = [VARIANTS[other].label]
        for delay in distinct(rows, "delay"):
            a, b = (
                np.stack([scores_of(rows, task=task, variant=variant, delay=delay) for task in tasks], axis=1)
                for variant in (better, other)
            )
            test = van_elteren(a, b)
            cells.append(f"{a.mean() - b.mean():+.3f} (Z {test.z:.2f}, p {p_value(test.p)})")
        lines.append(cells)
    return markdown([f"{VARIANTS[better].label} less", *(str(delay) for delay in distinct(rows, "delay"))], lines)


def step_size_table(rows: Sequence[dict[str, Any]]) -> str:
    """The step size of each variant."""
    tasks, lines = distinct(rows, "task"), []
    for variant in distinct(rows, "variant"):
        found = {row["task"]: row["step_size"] for row in rows if row["variant"] == variant}
        lines.append([VARIANTS[variant].label, *(f"{found[task]:g}" for task in tasks)])
    return markdown(["step size", *tasks], lines)


def tuning_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for task in distinct(rows, "task"):
        for variant in distinct(rows, "variant"):
            for delay in distinct(rows, "delay"):
                cells = []
                for factor in TUNING_FACTORS:
                    step_size = TASKS[task].step_size * factor
                    one = band(scores_of(rows, task=task, variant=variant, delay=delay, step_size=step_size))
                    cells.append(f"{float(one.mean):.3f} ± {float(one.sem):.3f}")
                lines.append([task, VARIANTS[variant].label, str(delay), *cells])
    return markdown(["task", "variant", "delay", *(f"step size x {factor:g}" for factor in TUNING_FACTORS)], lines)


def draw_figure(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    tasks, delays = distinct(rows, "task"), distinct(rows, "delay")
    with figure(path, len(tasks), width=3.8, height=2.8, label=f"final {NORMALIZED}") as axes:
        for panel, task in zip(axes, tasks, strict=True):
            for variant in distinct(rows, "variant"):
                bands = [band(scores_of(rows, task=task, variant=variant, delay=delay)) for delay in delays]
                mean, sem = (np.array([float(getattr(b, name)) for b in bands]) for name in ("mean", "sem"))
                color = COLORS[VARIANTS[variant].name]
                panel.plot(delays, mean, "o-", color=color, markersize=4, label=VARIANTS[variant].label)
                panel.fill_between(delays, mean - sem, mean + sem, color=color, alpha=0.2, linewidth=0)
            panel.set_xscale("symlog", base=2, linthresh=1)
            panel.set_xticks(delays, [str(delay) for delay in delays])
            panel.set_title(task.capitalize())
            panel.set_xlabel("age of the data (iterations)")
            panel.set_ylim(-0.05, 1.08)
        legend(axes, columns=2)


def draw(arguments: argparse.Namespace) -> None:
    """Write the tables and the figure of stored scores."""
    folder, rows = arguments.results, read_scores(arguments.results / f"{arguments.name}.csv.gz")
    text = tuning_table(rows) if arguments.what == "tuning" else score_tables(rows)
    write_text(folder / f"{arguments.name}.md", text + "\n")
    if arguments.what != "tuning":
        comparisons = test_table(rows, "decoupled")
        write_text(folder / f"{arguments.name}-tests.md", comparisons + "\n")
        text += f"\n\n{comparisons}"
    if arguments.what == "delays":
        draw_figure(folder / "return.png", rows)
    if arguments.what == "own-step-size":
        text += f"\n\n{step_size_table(rows)}"
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, command, about in (
        ("run", run, "train what is missing, write the scores, and draw"),
        ("draw", draw, "write the tables and the figure of the scores"),
    ):
        one = commands.add_parser(name, help=about)
        one.add_argument("what", nargs="?", choices=DEFAULTS, default="delays")
        one.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
        one.add_argument("--variants", nargs="+", choices=VARIANTS, help="by default those of figure 1, or beyond")
        one.add_argument("--delays", nargs="+", type=int)
        one.add_argument("--seeds", type=int, help="how many")
        one.add_argument("--env-steps", type=int, help="instead of 120,000")
        one.add_argument("--processes", type=int, default=1)
        one.add_argument("--runs", type=Path, default=ROOT / "runs" / "staleness")
        one.add_argument("--results", type=Path, default=ROOT / "results" / "staleness")
        one.set_defaults(command=command)
    arguments = parser.parse_args()
    arguments.name = "scores" if arguments.what == "delays" else arguments.what
    delays, seeds = DEFAULTS[arguments.what]
    arguments.variants = arguments.variants or (BEYOND if arguments.what == "beyond" else FIGURE_1)
    arguments.delays, arguments.seeds = arguments.delays or delays, arguments.seeds or seeds
    arguments.command(arguments)


if __name__ == "__main__":
    main()
