"""Why the default batch of the ladder suite learns later than small ones: one cause at a time, at 64 environments.

    python benchmarks/ladder_reasons.py [TASK...] --runs FOLDER

Prints the area under the normalised curve of the suite's default batch, of variants of it, and of 4 environments with
all adjustments, on seeds that no reported number uses. Finished runs in the folder are not trained again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.reproduce.stacked import Evaluations, launch
from anybatch.reproduce.suites.ladder_tasks import TASKS, config_of
from anybatch.reproduce.tables import markdown
from anybatch.scaling import adam_step_size, center_of_mass, scale
from ladder_curves import normalized_curve

SEEDS = range(905, 913)
AT = Evaluations(points=20, episodes=4)
CHOSEN = ("cartpole", "acrobot", "pendulum", "inverted-pendulum", "reacher")
"""Tasks with a significant difference between 64 environments and fewer, and CartPole."""


def smaller_steps(config: TrainConfig) -> TrainConfig:
    """Gradient steps of a quarter of the samples, in the same environments, by the rules."""
    changes = {
        "optimizer.minibatches": 4 * config.optimizer.minibatches,
        "optimizer.step_size": adam_step_size(config.optimizer.step_size, divide_batch_by=4),
        "policy.center_of_mass": center_of_mass(config.policy.center_of_mass, divide_batch_by=4),
    }
    return override(config, changes)


SHAPES: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "64 environments": lambda config: config,
    "64, 64 samples a gradient step": smaller_steps,
    "64, four epochs of the value function": lambda config: override(config, {"optimizer.value_epochs": 4}),
    "4 environments": lambda config: scale(config, 16)[0],
}


def area(task: str, config: TrainConfig, runs: Path) -> str:
    """Mean area over the seeds, with its standard error."""
    results = launch([config] * len(SEEDS), SEEDS, runs, evaluations=AT)
    areas = np.array([normalized_curve(task, result, AT.points).mean() for result in results])
    return f"{areas.mean():.3f} ± {areas.std(ddof=1) / np.sqrt(len(areas)):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help=f"by default {', '.join(CHOSEN)}")
    parser.add_argument("--runs", type=Path, default=Path("runs/ladder-reasons"))
    args = parser.parse_args()
    rows = [
        [TASKS[task].label, *(area(task, shape(config_of(TASKS[task])), args.runs) for shape in SHAPES.values())]
        for task in args.tasks or CHOSEN
    ]
    print(markdown(["area", *SHAPES], rows))


if __name__ == "__main__":
    main()
