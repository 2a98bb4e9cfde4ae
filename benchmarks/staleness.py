"""Return against the age of the data: figure 1's three variants and PPO-EWMA, on small tasks (section 5.1).

    OMP_NUM_THREADS=1 python benchmarks/staleness.py run --tasks cartpole acrobot --lags 0 1 2 4 8 --seeds 0 1 2 3 4
    OMP_NUM_THREADS=1 python benchmarks/staleness.py run --source asynchronous --lags 1 4     # for real, same schedule
    python benchmarks/staleness.py draw

``run`` goes on where it was interrupted and trains what is missing. The score of a run is the mean return over its
environment steps, so that both the speed of learning and where it ends count. ``draw`` writes scores.csv and return.png
to results/staleness.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anybatch.config import TrainConfig
from anybatch.config_io import override
from anybatch.logs import read_progress
from anybatch.plots import PALETTE, figure
from anybatch.presets import ppo
from anybatch.training import resume, train

ROOT = Path(__file__).parent.parent
VARIANTS: dict[str, dict[str, Any]] = {
    "a": {"proximal": "recent", "importance": "proximal"},
    "b": {"proximal": "recent", "importance": "behavior"},
    "c": {"proximal": "behavior", "importance": "behavior"},
    "ewma": {"proximal": "ewma", "importance": "behavior"},
}
LABELS = {
    "a": "recent for both: figure 1(a)",
    "b": "decoupled: figure 1(b)",
    "c": "behavior for both: figure 1(c)",
    "ewma": "decoupled, EWMA",
}
TASKS: dict[str, dict[str, Any]] = {
    # iterations of 256 environment steps; a lag of 8 is 2,048 of them
    "cartpole": {"env.id": "gym:CartPole-v1", "total_env_steps": 50_000, "optimizer.step_size": 2e-3},
    "acrobot": {"env.id": "gym:Acrobot-v1", "total_env_steps": 100_000, "optimizer.step_size": 2e-3},
}
SHARED: dict[str, Any] = {
    "env.num_envs": 8,
    "rollout.steps": 32,
    "optimizer.minibatches": 4,
    "optimizer.policy_epochs": 4,
    "optimizer.value_epochs": 4,
    "advantage.discount": 0.99,
    "policy.entropy_coefficient": 0.01,
    "policy.allow_stale_coupled": True,  # the variants that do worse are the point
    "model": {"encoder": "mlp", "options": {"width": 64, "depth": 2}},
    "precision": "fp32",
    "device": "cpu",
    "log": {"tensorboard": False, "noise_scale": False},
}


def configure(task: str, variant: str, lag: int, source: str, env_steps: int | None) -> TrainConfig:
    kinds: dict[str, dict[str, Any]] = {
        "delayed": {"kind": "delayed", "delay": lag},
        "asynchronous": {"kind": "asynchronous", "max_lag": lag, "deterministic": True},
    }
    config = override(ppo(), {**SHARED, **TASKS[task], **VARIANTS[variant], "rollout.source": kinds[source]})
    return override(config, {"total_env_steps": env_steps}) if env_steps else config


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for seed in arguments.seeds:  # a first curve of everything comes early
        for task in arguments.tasks:
            for lag in arguments.lags:
                for variant in arguments.variants:
                    config = configure(task, variant, lag, arguments.source, arguments.env_steps)
                    folder = arguments.runs / arguments.source / f"{task}-{variant}-lag{lag}-seed{seed}"
                    train_rest(config, folder, seed)


def train_rest(config: TrainConfig, folder: Path, seed: int) -> None:
    started = (folder / "config.yaml").exists()
    if (
        started
        and max(read_progress(folder / "progress.csv").get("env_steps", []), default=0) >= config.total_env_steps
    ):
        return
    result = resume(folder, quiet=True) if started else train(config, folder, seed, quiet=True)
    print(f"{folder.name}: {result.mean_episode_return:.1f}", flush=True)
    if result.interrupted:
        raise SystemExit(130)


def score(folder: Path) -> float:
    """Mean over the environment steps of the return of the last 100 episodes."""
    progress = read_progress(folder / "progress.csv")
    steps, returns = np.array(progress["env_steps"]), np.array(progress["mean_episode_return"])
    known = np.isfinite(returns)
    weights = np.diff(steps[known], prepend=0)
    return float(np.average(returns[known], weights=weights))


def scores(runs: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted(runs.glob("*/*-lag*-seed*")):
        task, variant, lag, seed = folder.name.split("-")
        if (folder / "progress.csv").exists():
            yield {
                "source": folder.parent.name,
                "task": task,
                "variant": variant,
                "lag": int(lag.removeprefix("lag")),
                "seed": int(seed.removeprefix("seed")),
                "score": score(folder),
            }


def draw(arguments: argparse.Namespace) -> None:
    found = list(scores(arguments.runs))
    if not found:
        raise SystemExit(f"no runs in {arguments.runs}: first `python benchmarks/staleness.py run`")
    arguments.results.mkdir(parents=True, exist_ok=True)
    with open(arguments.results / "scores.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    panels = list(dict.fromkeys((one["source"], one["task"]) for one in found))
    with figure(arguments.results / "return.png", columns=len(panels), width=3.6) as axes:
        for panel, (source, task) in zip([axes] if len(panels) == 1 else axes, panels, strict=True):
            for colour, variant in zip(PALETTE, VARIANTS, strict=False):
                by_lag: dict[int, list[float]] = defaultdict(list)
                for one in found:
                    if (one["source"], one["task"], one["variant"]) == (source, task, variant):
                        by_lag[one["lag"]].append(one["score"])
                if by_lag:
                    draw_curve(panel, by_lag, colour, LABELS[variant])
            panel.set_xscale("symlog", base=2, linthresh=1)
            lags = sorted({one["lag"] for one in found})
            panel.set_xticks(lags, [str(lag) for lag in lags])
            panel.set(title=f"{task}, {source}", xlabel="age of the data (iterations)")
            panel.set_ylabel("return, mean over training")
            panel.legend(fontsize=6)
    print(f"{len(found)} runs: {arguments.results / 'return.png'}")


def draw_curve(panel: Any, by_lag: dict[int, list[float]], colour: str, label: str) -> None:
    lags = sorted(by_lag)
    means = np.array([statistics.mean(by_lag[lag]) for lag in lags])
    deviations = np.array([statistics.stdev(by_lag[lag]) if len(by_lag[lag]) > 1 else 0.0 for lag in lags])
    panel.plot(lags, means, color=colour, marker="o", markersize=3, label=label)
    panel.fill_between(lags, means - deviations, means + deviations, color=colour, alpha=0.15, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run", help="train what is missing")
    runner.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    runner.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    runner.add_argument("--lags", nargs="+", type=int, default=[0, 1, 2, 4, 8, 16])
    runner.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    runner.add_argument("--source", choices=("delayed", "asynchronous"), default="delayed")
    runner.add_argument("--env-steps", type=int, help="instead of the task's own")
    runner.set_defaults(command=run)
    drawer = commands.add_parser("draw", help="write the table and the figure")
    drawer.add_argument("--results", type=Path, default=ROOT / "results" / "staleness")
    drawer.set_defaults(command=draw)
    for one in (runner, drawer):
        one.add_argument("--runs", type=Path, default=ROOT / "runs" / "staleness")
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
