"""MuJoCo: PPO beside published results, and the step size of PPO-EWMA.

    python benchmarks/mujoco_tasks.py run published        # five tasks, 5 seeds
    python benchmarks/mujoco_tasks.py run tune             # step sizes of ppo-ewma-mujoco, 4 seeds
    python benchmarks/mujoco_tasks.py draw                 # what is finished: results/mujoco/

``run`` trains runs of one shape together and skips the stacks that are finished; ``draw`` shows the finished runs.
Step sizes are chosen on seeds from 900, which nothing else uses, by evaluations of the policies during 300,000 steps.
Batches of 64 environments to 1 are compared by ``anybatch reproduce run invariance --suite mujoco``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo_ewma_mujoco, ppo_mujoco
from anybatch.reproduce.plots import BLACK, BLUE, figure, in_millions
from anybatch.reproduce.results import write_rows
from anybatch.reproduce.stacked import Evaluations, RunResult, launch, read_result, result_path
from anybatch.reproduce.statistics import band
from bench_common import refuse_to_shrink

RESULTS = Path(__file__).parent.parent / "results" / "mujoco"
TASKS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "InvertedPendulum-v4", "InvertedDoublePendulum-v4")
TUNED_TASKS = ("HalfCheetah-v4", "Hopper-v4", "InvertedDoublePendulum-v4")
STEP_SIZES = (3e-4, 1e-3, 3e-3)
CLEANRL = {
    "HalfCheetah-v4": (1442.64, 46.03),
    "Hopper-v4": (2382.86, 271.74),
    "Walker2d-v4": (2287.95, 571.78),
    "InvertedPendulum-v4": (963.09, 22.20),
}
"""Mean and spread of 3 seeds at 1M steps: vwxyzjn/cleanrl, docs/benchmark/ppo_continuous_action.md at fe8d8a0."""
SB3_ZOO = {"HalfCheetah-v4": 5819.10, "Hopper-v4": 2410.44, "Walker2d-v4": 3478.80}
"""One run each of v3, tuned for the task, acting greedily: DLR-RM/rl-baselines3-zoo, benchmark.md at 0088472."""

Job = tuple[str, TrainConfig, int]
"""Label, configuration and seed of a run."""


def published(seeds: int) -> list[Job]:
    return [(task, ppo_mujoco(f"envpool:{task}"), seed) for task in TASKS for seed in range(seeds)]


def tune(seeds: int) -> list[Job]:
    return [
        (
            f"{task} {step_size:g}",
            ppo_ewma_mujoco(f"envpool:{task}", step_size=step_size, total_env_steps=300_000),
            seed,
        )
        for task in TUNED_TASKS
        for step_size in STEP_SIZES
        for seed in range(900, 900 + seeds)
    ]


@dataclass(frozen=True)
class Queue:
    """Runs of a kind."""

    jobs: Callable[[int], list[Job]]
    """Runs for a number of seeds."""
    seeds: int
    column: str
    """Column of the returns."""
    evaluations: Evaluations | None = None


QUEUES = {
    "published": Queue(published, 5, "mean_episode_return"),
    "tune": Queue(tune, 4, "eval_return", Evaluations(points=15, episodes=4)),
}


def run(queue: str, seeds: int | None, tasks: list[str], processes: int) -> None:
    chosen = QUEUES[queue]
    jobs = [job for job in chosen.jobs(seeds or chosen.seeds) if job[0].split()[0] in tasks]
    launch(
        [config for _, config, _ in jobs],
        [seed for _, _, seed in jobs],
        RESULTS / "runs",
        processes=processes,
        evaluations=chosen.evaluations,
        on_done=lambda done, total: print(f"{queue}: {done} of {total} runs", flush=True),
    )


def finished(queue: str) -> dict[str, list[RunResult]]:
    """Finished runs by label."""
    results = defaultdict(list)
    for label, config, seed in QUEUES[queue].jobs(20):
        path = result_path(RESULTS / "runs", config, seed, QUEUES[queue].evaluations)
        if path.exists():
            results[label].append(read_result(path))
    return results


def last(results: list[RunResult]) -> tuple[float, float]:
    """Mean and standard error over seeds of the last 100 episodes."""
    values = band([result.columns["mean_episode_return"][-1] for result in results])
    return float(values.mean), float(values.sem)


def area(results: list[RunResult]) -> tuple[float, float]:
    """Mean and standard error over seeds of the mean return of all evaluations during training."""
    values = band([np.nanmean(result.columns["eval_return"][1:]) for result in results])
    return float(values.mean), float(values.sem)


def draw() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = []
    results = {queue: finished(queue) for queue in QUEUES}
    write_curves(results)
    lines += [
        "| task, 1M steps | anybatch, ppo-mujoco | seeds | CleanRL | SB3 zoo (tuned, v3, 1 run) |",
        "|---|---:|---:|---:|---:|",
    ]
    for task in TASKS:
        if runs := results["published"].get(task):
            mean, error = last(runs)
            cleanrl = "{:.0f} ± {:.0f}".format(*CLEANRL[task]) if task in CLEANRL else "–"
            zoo = f"{SB3_ZOO[task]:.0f}" if task in SB3_ZOO else "–"
            lines.append(f"| {task} | {mean:.0f} ± {error:.0f} | {len(runs)} | {cleanrl} | {zoo} |")
    lines += ["", "| task, step size | ppo-ewma-mujoco, area | seeds |", "|---|---:|---:|"]
    for label, runs in results["tune"].items():
        mean, error = area(runs)
        lines.append(f"| {label} | {mean:.0f} ± {error:.0f} | {len(runs)} |")
    (RESULTS / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if results["published"]:
        draw_published(results["published"])


def write_curves(results: dict[str, dict[str, list[RunResult]]]) -> None:
    written: list[tuple[object, ...]] = [("queue", "label", "seed", "env_steps", "return")]
    for queue, by_label in results.items():
        for label, runs in by_label.items():
            for one in runs:
                rows = zip(one.columns["env_steps"], one.columns[QUEUES[queue].column], strict=True)
                written += [(queue, label, one.seed, f"{x:.7g}", f"{y:.7g}") for x, y in rows if y == y]
    refuse_to_shrink(RESULTS / "curves.csv.gz", len(written))
    write_rows(RESULTS / "curves.csv.gz", written)


def curve(runs: list[RunResult]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Environment steps, and mean and standard error of the returns at them."""
    steps = runs[0].columns["env_steps"]
    returns = np.array([np.interp(steps, r.columns["env_steps"], r.columns["mean_episode_return"]) for r in runs])
    mean, _, sem = band(returns)
    return steps, mean, sem


def draw_published(results: dict[str, list[RunResult]]) -> None:
    with figure(RESULTS / "published.png", len(results), width=3.4, height=2.8, label="return") as axes:
        for panel, (task, runs) in zip(axes, results.items(), strict=True):
            steps, mean, error = curve(runs)
            panel.plot(steps, mean, color=BLUE, label=f"anybatch, {len(runs)} seeds")
            panel.fill_between(steps, mean - error, mean + error, color=BLUE, alpha=0.2, linewidth=0)
            if task in CLEANRL:
                panel.errorbar([steps[-1]], *[[x] for x in CLEANRL[task]], color=BLACK, fmt="o", label="CleanRL")
            panel.set_title(task)
            panel.legend(fontsize=7)
            in_millions(panel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("queue", choices=QUEUES, nargs="?", default="published")
    parser.add_argument("--seeds", type=int, help="number of seeds; the default is that of the queue")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--processes", type=int, default=1, help="stacks that are trained at the same time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "run":
        run(arguments.queue, arguments.seeds, arguments.tasks, arguments.processes)
    else:
        draw()


if __name__ == "__main__":
    main()
