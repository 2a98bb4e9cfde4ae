"""How much faster stacked runs are than single ones: environment steps a second of CPU time, on one thread.

    python benchmarks/vectorized_speed.py --runs 1 16 64 256 --num-envs 1

The processor time of this process is measured, so that other programs disturb little; both are measured in turns.
EnvPool's own thread is included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.reproduce.stacked import run_stacked
from anybatch.reproduce.suites.laptop import laptop
from anybatch.training import train


def config(env: str, num_envs: int, iterations: int, step_size: float) -> TrainConfig:
    """The laptop suite's networks and rollouts."""
    changes = {"env.id": f"envpool:{env}", "num_envs": num_envs, "step_size": step_size}
    return override(laptop().invariance["catch"], {**changes, "total_env_steps": num_envs * 32 * iterations})


def seconds(function) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def single_rate(env: str, num_envs: int, iterations: int) -> float:
    """Environment steps per CPU second of training.train, the fixed cost of a short run taken off."""
    times = []
    for count in (1, 1 + iterations):
        with tempfile.TemporaryDirectory() as folder:
            run = config(env, num_envs, count, 1.5e-3)
            times.append(seconds(lambda run=run, folder=folder: train(run, Path(folder) / "run", quiet=True)))
    return num_envs * 32 * iterations / (times[1] - times[0])


def stacked_rate(env: str, num_envs: int, iterations: int, runs: int) -> float:
    """The same of a stack, with three different step sizes among its runs."""
    times = []
    for count in (1, 1 + iterations):
        configs = [config(env, num_envs, count, 1.5e-3 * 2 ** (run * 3 // runs)) for run in range(runs)]
        times.append(seconds(lambda configs=configs: run_stacked(configs, list(range(runs)))))
    return runs * num_envs * 32 * iterations / (times[1] - times[0])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--iterations", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stacked_rate(arguments.env, arguments.num_envs, 1, 2)  # what is paid once a process
    single = single_rate(arguments.env, arguments.num_envs, arguments.iterations)
    print(f"{arguments.env}, {arguments.num_envs} environments a run, environment steps per CPU second")
    print(f"{'single':>8} {single:12,.0f}")
    for runs in arguments.runs:
        rate = stacked_rate(arguments.env, arguments.num_envs, arguments.iterations, runs)
        print(f"{runs:8} {rate:12,.0f}   {rate / single:6.1f} times")


if __name__ == "__main__":
    main()
