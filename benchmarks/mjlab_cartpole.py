"""PPO-EWMA in rsl_rl on mjlab's Cartpole, on the CPU: beside PPO, and with fewer environments.

    pip install mjlab gymnasium matplotlib                # in an environment with torch; brings rsl_rl
    python benchmarks/mjlab_cartpole.py run parity        # 256 environments, mjlab's configuration, class substituted
    python benchmarks/mjlab_cartpole.py run tune          # fixed step sizes at 256 environments, seeds from 900
    python benchmarks/mjlab_cartpole.py run ladder        # 256, 64, 16 environments: the rule against KL-adaptive PPO
    python benchmarks/mjlab_cartpole.py draw              # what is finished: results/mjlab/

Everything is mjlab's configuration of the task, but for the number of environments and the arguments of the algorithm.
Those of the arms with a fixed step size are what ``anybatch scale ppo-ewma --from-ppo --for rsl_rl`` prints. All runs
have 491,520 environment steps: a minute of one core with 256 environments, nine with 16, for a step costs nearly the
same. ``run`` skips finished runs, each of which has a file in results/mjlab/runs.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo_ewma
from anybatch.reproduce.plots import figure, in_millions
from anybatch.reproduce.results import write_rows
from anybatch.reproduce.statistics import band
from anybatch.reproduce.style import gradient
from anybatch.scaling import center_of_mass_of_ppo, scale
from anybatch.scaling.frameworks import translate
from bench_common import refuse_to_shrink

RESULTS = Path(__file__).parent.parent / "results" / "mjlab"
TASKS = ("Balance", "Swingup")
ENVS = (256, 64, 16)
STEPS, ITERATIONS = 32, 60
STEP_SIZES = (1e-3, 3e-3, 1e-2)
COLUMNS = ("iteration", "env_steps", "reward", "learning_rate", "action_std")
LAST = 10
"""Iterations of 256 environments at the end, whose mean is the reward of a run."""


Key = tuple[str, str, int]
"""Task, label of the arm and number of environments."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    task: str
    arm: str
    envs: int
    seed: int
    step_size: float = 0.0
    """At 256 environments; 0 where the step size follows the KL."""

    @property
    def name(self) -> str:
        return f"{self.task}-{self.arm}-{self.step_size:g}-envs{self.envs}-seed{self.seed}"

    @property
    def path(self) -> Path:
        return RESULTS / "runs" / f"{self.name}.csv"


def ppo(job: Job) -> dict[str, Any]:
    """mjlab's configuration: PPO with a step size that follows the KL."""
    return {}


def ewma_adaptive(job: Job) -> dict[str, Any]:
    """The class substituted without a clipped value loss; averages follow the batch, the step size follows the KL."""
    c = ENVS[0] / job.envs
    averages = {"center_of_mass": c * center_of_mass_of_ppo(epochs=5, minibatches=4), "advantage_span": c}
    return {"class_name": "anybatch.integrations.rsl_rl:PPOEWMA", "use_clipped_value_loss": False, **averages}


def reference(job: Job, epochs: int, minibatches: int) -> TrainConfig:
    """mjlab's numbers at 256 environments with a fixed step size, without gradient clipping, as the rules want it."""
    return ppo_ewma(
        num_envs=ENVS[0],
        steps=STEPS,
        minibatches=minibatches,
        policy_epochs=epochs,
        value_epochs=epochs,
        step_size=job.step_size,
        total_env_steps=ENVS[0] * STEPS * ITERATIONS,
        center_of_mass=center_of_mass_of_ppo(epochs, minibatches),
        **{"advantage.discount": 0.99, "optimizer.value_coefficient": 1.0, "reward.normalize": False},
    )


def fixed(job: Job, epochs: int, minibatches: int, scaled: bool = True) -> dict[str, Any]:
    """PPO-EWMA with the numbers that the rules give for the batch, or with those of 256 environments."""
    config = reference(job, epochs, minibatches)
    if scaled and job.envs < ENVS[0]:
        config, _ = scale(config, ENVS[0] / job.envs)
    arguments = translate(config, "rsl_rl").arguments
    return {name: value for name, value in arguments.items() if name not in ("num_steps_per_env", "max_iterations")}


ARMS: dict[str, tuple[str, Callable[[Job], dict[str, Any]]]] = {
    "ppo": ("PPO, KL-adaptive", ppo),
    "ewma-adaptive": ("PPO-EWMA, KL-adaptive", ewma_adaptive),
    "rule": ("PPO-EWMA, the rule", lambda job: fixed(job, 5, 4)),
    "rule-1-epoch": ("PPO-EWMA, 1 epoch, the rule", lambda job: fixed(job, 1, 16)),
    "rule-log-std": ("PPO-EWMA, the rule, log std", lambda job: fixed(job, 5, 4)),
    "unscaled": ("PPO-EWMA, nothing scaled", lambda job: fixed(job, 5, 4, scaled=False)),
}
"""Label, and the arguments of the algorithm that differ from mjlab's."""
TUNED = {"rule": 3e-3, "rule-log-std": 3e-3, "unscaled": 3e-3}
"""Step sizes of the ladder, from the queue ``tune``, in which one epoch learned too slowly to be compared."""


def parity(seeds: int) -> Iterator[Job]:
    for seed in range(seeds):
        for task in TASKS:
            yield Job(task, "ppo", ENVS[0], seed)
            yield Job(task, "ewma-adaptive", ENVS[0], seed)


def tune(seeds: int) -> Iterator[Job]:
    for seed in range(seeds):
        for arm in ("rule", "rule-1-epoch"):
            for step_size in STEP_SIZES:
                yield Job(TASKS[0], arm, ENVS[0], 900 + seed, step_size)


def ladder(seeds: int) -> Iterator[Job]:
    for seed in range(seeds):
        for arm in ("ppo", "ewma-adaptive", "rule", "rule-log-std", "unscaled"):
            for envs in ENVS:
                source = "rule" if envs == ENVS[0] and arm == "unscaled" else arm  # the same run
                yield Job(TASKS[0], source, envs, seed, TUNED.get(arm, 0.0))


QUEUES = {"parity": (parity, 4), "tune": (tune, 2), "ladder": (ladder, 4)}
"""Jobs, and their number of seeds."""


def train(job: Job) -> str:
    """Train a run and write its curve; a line about it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import mjlab.tasks  # noqa: F401  registers the tasks
    import torch
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_env_cfg, load_rl_cfg

    torch.set_num_threads(1)
    start, name = time.process_time(), f"Mjlab-Cartpole-{job.task}"
    environment, settings = load_env_cfg(name), load_rl_cfg(name)
    environment.scene.num_envs, environment.seed = job.envs, job.seed
    rewards: list[float] = []

    class Recorded(RslRlVecEnvWrapper):
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            rewards.append(float(result[1].mean()))
            return result

    env = Recorded(ManagerBasedRlEnv(cfg=environment, device="cpu"), clip_actions=settings.clip_actions)
    config = asdict(settings)
    config["algorithm"] |= ARMS[job.arm][1](job)
    if job.arm == "rule-log-std":
        config["actor"]["distribution_cfg"]["std_type"] = "log"  # mjlab's is the standard deviation itself
    torch.manual_seed(job.seed)
    runner = MjlabOnPolicyRunner(env, config, None, "cpu")
    rows = []

    def record(*, it: int, learning_rate: float, action_std: Any, **_: Any) -> None:
        reward = np.mean(rewards[-STEPS:])
        rows.append((it + 1, (it + 1) * STEPS * job.envs, reward, learning_rate, float(action_std.detach().mean())))

    runner.logger.log = record
    runner.learn(ITERATIONS * ENVS[0] // job.envs, init_at_random_ep_len=True)
    job.path.parent.mkdir(parents=True, exist_ok=True)
    temporary = job.path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in rows)
    temporary.replace(job.path)
    return f"{job.name}: {rows[-1][2]:.4f} a step, {time.process_time() - start:.0f} s"


def run(queue: str, seeds: int | None, processes: int, arms: list[str], envs: list[int], tasks: list[str]) -> None:
    make, default = QUEUES[queue]
    jobs = [job for job in make(seeds or default) if job.arm in arms and job.envs in envs and job.task in tasks]
    jobs = [job for job in dict.fromkeys(jobs) if not job.path.exists()]
    # a process for each run: Warp keeps its state
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for number, line in enumerate(pool.map(train, jobs), 1):
            print(f"{queue}: {number} of {len(jobs)}: {line}", flush=True)


def finished() -> dict[Key, dict[int, np.ndarray]]:
    """Curves by seed: means over intervals, each an iteration of 256 environments, (ITERATIONS, columns)."""
    jobs = dict.fromkeys(job for make, _ in QUEUES.values() for job in make(20))
    curves = defaultdict[Key, dict[int, np.ndarray]](dict)
    for job in jobs:
        if job.path.exists():
            rows = np.loadtxt(job.path, delimiter=",", skiprows=1, ndmin=2)
            label = ARMS[job.arm][0] + (f", {job.step_size:g}" if job.seed >= 900 else "")
            curves[job.task, label, job.envs][job.seed] = rows.reshape(ITERATIONS, -1, len(COLUMNS)).mean(1)
    return curves


def draw() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    curves = finished()
    lines = [
        f"| task | variant | environments | reward a step, last {LAST} of {ITERATIONS} intervals | whole run | seeds |",
        "|---|---|---:|---:|---:|---:|",
    ]
    written: list[tuple[object, ...]] = [("task", "arm", "environments", "seed", "env_steps", *COLUMNS[2:])]
    for (task, label, envs), runs in curves.items():
        rewards = np.array(list(runs.values()))[:, :, 2]
        ends, means = rewards[:, -LAST:].mean(1), rewards.mean(1)
        numbers = " | ".join(f"{x.mean:.4f} ± {x.sem:.4f}" for x in map(band, (ends, means)))
        lines.append(f"| {task} | {label} | {envs} | {numbers} | {len(runs)} |")
        for seed, rows in runs.items():
            steps = (1 + np.arange(ITERATIONS)) * STEPS * ENVS[0]
            values = ([f"{x:.5g}" for x in row[2:]] for row in rows)
            written += [(task, label, envs, seed, n, *x) for n, x in zip(steps, values, strict=True)]
    refuse_to_shrink(RESULTS / "curves.csv.gz", len(written))
    write_rows(RESULTS / "curves.csv.gz", written)
    (RESULTS / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw_ladder({key: runs for key, runs in curves.items() if key[0] == TASKS[0]})


def draw_ladder(curves: dict[Key, dict[int, np.ndarray]]) -> None:
    """A panel for each arm, a line for each number of environments."""
    labels = [label for name, (label, _) in ARMS.items() if any(label == key[1] for key in curves)]
    with figure(RESULTS / "ladder.png", len(labels), columns=4, width=3.2, height=2.8, label="reward a step") as axes:
        for panel, label in zip(axes, labels, strict=True):
            for envs, color in zip(ENVS, gradient(len(ENVS)), strict=True):
                if runs := curves.get((TASKS[0], label, envs)):
                    rewards = np.array(list(runs.values()))[:, :, 2]
                    steps = (1 + np.arange(ITERATIONS)) * STEPS * ENVS[0]
                    mean, _, spread = band(rewards)
                    panel.plot(steps, mean, color=color, label=f"{envs} environments, seeds: {len(runs)}")
                    panel.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)
            panel.set_title(label, fontsize=9)
            panel.set_ylim(-0.012, 0.052)  # room for the legend
            panel.legend(fontsize=7, loc="lower right")
            in_millions(panel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("queue", choices=QUEUES, nargs="?", default="parity")
    parser.add_argument("--seeds", type=int, help="number of seeds; the default is that of the queue")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--envs", nargs="+", type=int, choices=ENVS, default=list(ENVS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--processes", type=int, default=1, help="runs that are trained at the same time")
    arguments = parser.parse_args()
    if arguments.command == "run":
        queue, processes = arguments.queue, arguments.processes
        run(queue, arguments.seeds, processes, arguments.arms, arguments.envs, arguments.tasks)
    else:
        draw()


if __name__ == "__main__":
    main()
