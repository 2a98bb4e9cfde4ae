"""MuJoCo: PPO beside published results, and PPO-EWMA at batches of 64 environments to 1.

    python benchmarks/mujoco_tasks.py run published        # five tasks, 5 seeds
    python benchmarks/mujoco_tasks.py run tune             # step sizes of ppo-ewma-mujoco, 4 seeds
    python benchmarks/mujoco_tasks.py run ladder           # 64, 16, 4, 1 environments, all rules and without each
    python benchmarks/mujoco_tasks.py draw                 # what is finished: results/mujoco/

``run`` trains runs of one shape together and skips the stacks that are finished; ``draw`` shows the finished runs.
Step sizes are chosen on seeds from 900, which no other queue uses. Runs of ``tune`` and ``ladder`` are shorter, 300,000
steps, so that all batch sizes fit into hours of one core.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo_ewma_mujoco, ppo_mujoco
from anybatch.reproduce.plots import BLACK, BLUE, figure, in_millions
from anybatch.reproduce.stacked import RunResult, launch, read_result, result_path
from anybatch.reproduce.style import LABELS, gradient, legend
from anybatch.reproduce.suites.ladder import ABLATIONS, RULES, without_ewma
from anybatch.scaling import scale

RESULTS = Path(__file__).parent.parent / "results" / "mujoco"
TASKS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "InvertedPendulum-v4", "InvertedDoublePendulum-v4")
LADDER_TASKS = TASKS[:3]
STEP_SIZES = (3e-4, 1e-3, 3e-3)
ENVS = (64, 16, 4, 1)
VARIANTS = ("all", *ABLATIONS)
SHORT = 300_000
TUNED_STEP_SIZE = 3e-3
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
        (f"{task} {step_size:g}", _short(task, step_size), 900 + seed)
        for task in LADDER_TASKS
        for step_size in STEP_SIZES
        for seed in range(seeds)
    ]


def ladder(seeds: int) -> list[Job]:
    jobs = []
    for task in LADDER_TASKS:
        for variant in VARIANTS:
            config = _short(task, TUNED_STEP_SIZE)
            config = without_ewma(config) if variant == "no-ewma" else config
            for envs in ENVS:
                divisor = config.env.num_envs // envs
                if divisor > 1:
                    scaled, _ = scale(config, divisor, **RULES[variant])
                elif variant in ("all", "no-ewma"):  # the others are the same as "all" there
                    scaled = config
                else:
                    continue
                jobs += [(f"{task} {envs} {variant}", scaled, seed) for seed in range(seeds)]
    return jobs


def _short(task: str, step_size: float) -> TrainConfig:
    return ppo_ewma_mujoco(f"envpool:{task}", step_size=step_size, total_env_steps=SHORT)


QUEUES = {"published": (published, 5), "tune": (tune, 4), "ladder": (ladder, 8)}


def run(queue: str, seeds: int, tasks: list[str], processes: int) -> None:
    jobs = [job for job in QUEUES[queue][0](seeds) if job[0].split()[0] in tasks]
    launch(
        [config for _, config, _ in jobs],
        [seed for _, _, seed in jobs],
        RESULTS / "runs",
        processes=processes,
        on_done=lambda done, total: print(f"{queue}: {done} of {total} runs", flush=True),
    )


def finished(queue: str) -> dict[str, list[RunResult]]:
    """Finished runs by label."""
    results = defaultdict(list)
    for label, config, seed in QUEUES[queue][0](20):
        path = result_path(RESULTS / "runs", config, seed)
        if path.exists():
            results[label].append(read_result(path))
    return results


def last(results: list[RunResult]) -> tuple[float, float]:
    """Mean and standard error over seeds of the last 100 episodes."""
    values = np.array([result.columns["mean_episode_return"][-1] for result in results])
    return float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


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
    for queue, title in (("tune", "task, step size"), ("ladder", "task, environments, adjustments")):
        lines += ["", f"| {title} | ppo-ewma-mujoco | seeds |", "|---|---:|---:|"]
        for label, runs in results[queue].items():
            mean, error = last(runs)
            lines.append(f"| {label} | {mean:.0f} ± {error:.0f} | {len(runs)} |")
    (RESULTS / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if results["published"]:
        draw_published(results["published"])
    if results["ladder"]:
        draw_ladder(results["ladder"])


def write_curves(results: dict[str, dict[str, list[RunResult]]]) -> None:
    names = ("env_steps", "mean_episode_return", "episodes", "episode_return_sum")
    with gzip.open(RESULTS / "curves.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("queue", "label", "seed", *names))
        for queue, by_label in results.items():
            for label, runs in by_label.items():
                for one in runs:
                    rows = zip(*(one.columns[name] for name in names), strict=True)
                    writer.writerows((queue, label, one.seed, *(f"{x:.7g}" for x in row)) for row in rows)


def curve(runs: list[RunResult]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Environment steps, and mean and standard error of the returns at them."""
    steps = runs[0].columns["env_steps"]
    returns = np.array([np.interp(steps, r.columns["env_steps"], r.columns["mean_episode_return"]) for r in runs])
    return steps, returns.mean(0), returns.std(0, ddof=min(1, len(runs) - 1)) / math.sqrt(len(runs))


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


def draw_ladder(results: dict[str, list[RunResult]]) -> None:
    """A row of panels for each task, a panel for each variant, a line for each batch."""
    tasks = [task for task in LADDER_TASKS if any(label.startswith(task) for label in results)]
    panels = [(task, variant) for task in tasks for variant in VARIANTS]
    with figure(
        RESULTS / "ladder.png", len(panels), columns=len(VARIANTS), width=2.6, height=2.3, label="return"
    ) as axes:
        for panel, (task, variant) in zip(axes, panels, strict=True):
            for envs, color in zip(ENVS, gradient(len(ENVS)), strict=True):
                runs = results.get(f"{task} {envs} {variant}") or results.get(f"{task} {envs} all")
                if runs:
                    steps, mean, error = curve(runs)
                    panel.plot(steps, mean, color=color, label=f"{envs} environment{'s' * (envs > 1)}")
                    panel.fill_between(steps, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
            panel.set_title(f"{task.removesuffix('-v4')}\n{LABELS[variant]}", fontsize=9)
            in_millions(panel)
        legend(axes)


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
        run(arguments.queue, arguments.seeds or QUEUES[arguments.queue][1], arguments.tasks, arguments.processes)
    else:
        draw()


if __name__ == "__main__":
    main()
