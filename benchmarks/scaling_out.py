"""Strong and weak scaling of data-parallel training on one machine: 1 and 2 workers, one core each.

    python benchmarks/scaling_out.py --out results/scaling-out

Strong: the same run, its environments shared out to twice as many workers; ideal is twice the steps per second. Weak:
twice the environments on twice the workers; ideal is also twice the steps per second of one worker with half of them.
Every worker has one thread of PyTorch and one of EnvPool. Runs are started by torchrun as users start them; times are
those between the first and the last iteration in progress.csv, so that starting up and warming up do not count. The
three kinds of run take turns, so that a change in the machine's load meets all; medians over the rounds are reported,
with the smallest and largest. Two rounds take five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from anybatch.reproduce.tables import markdown
from anybatch.runs.progress import read_progress
from anybatch.system.atomic_files import write_text
from bench_common import machine_facts

TASKS = {
    "procgen:starpilot-hard": ["ppg-ewma", "--rollout.steps", "64", "--optimizer.minibatches", "4"],
    "gym:CartPole-v1": ["ppo-ewma", "--rollout.steps", "128", "--optimizer.minibatches", "4"],
}
STEPS = {"procgen:starpilot-hard": 64, "gym:CartPole-v1": 128}
ENVS = {"procgen:starpilot-hard": 16, "gym:CartPole-v1": 64}
ITERATIONS = {"procgen:starpilot-hard": 6, "gym:CartPole-v1": 40}
WARM_UP = {"procgen:starpilot-hard": 1, "gym:CartPole-v1": 10}


def steps_per_second(task: str, workers: int, num_envs: int, out: Path) -> float:
    """Environment steps a second of one run, all workers together."""
    iteration = num_envs * STEPS[task]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)),
        *("-m", "anybatch", "train", *TASKS[task], "--env.id", task, "--env.num-envs", str(num_envs)),
        *("--total-env-steps", str(ITERATIONS[task] * iteration), "--env.threads", "1", "--precision", "fp32"),
        *("--scaling.off", "--device", "cpu", "--log.no-tensorboard", "--quiet", "--out", str(out)),
    ]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    progress = read_progress(out / "progress.csv")
    first, last = WARM_UP[task] - 1, -1
    return (progress["env_steps"][last] - progress["env_steps"][first]) / (
        progress["seconds"][last] - progress["seconds"][first]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for scaling-out.json and table.md")
    arguments = parser.parse_args()
    machine = machine_facts()
    rows, results = [], {}
    for task, envs in ENVS.items():
        kinds = {"one, half": (1, envs // 2), "one": (1, envs), "two": (2, envs)}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(arguments.rounds):
            for name, (workers, num_envs) in kinds.items():
                with tempfile.TemporaryDirectory() as folder:
                    found[name].append(steps_per_second(task, workers, num_envs, Path(folder) / "run"))
                print(f"round {number + 1} {task} {name}: {found[name][-1]:,.0f} steps/s", flush=True)
        speed = {name: statistics.median(values) for name, values in found.items()}
        results[task] = found
        for name, (workers, num_envs) in kinds.items():
            against = {"one, half": "", "one": "", "two": f"{speed['two'] / speed['one'] / 2:.0%}"}[name]
            weak = f"{speed['two'] / speed['one, half'] / 2:.0%}" if name == "two" else ""
            low, high = min(found[name]), max(found[name])
            cells = [task, workers, num_envs, f"{speed[name]:,.0f} ({low:,.0f} to {high:,.0f})", against, weak]
            rows.append([str(cell) for cell in cells])
    head = ["environment", "workers", "environments", "steps a second", "strong efficiency", "weak efficiency"]
    table = markdown(head, rows)
    print(table)
    if arguments.out:
        about = {"machine": machine, "rounds": results}
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_text(arguments.out / "scaling-out.json", json.dumps(about, indent=2) + "\n")
        write_text(arguments.out / "table.md", table + "\n")


if __name__ == "__main__":
    main()
