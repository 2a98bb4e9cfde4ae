"""Why 4 environments learn later than 64 on CoinRun with all adjustments: one cause at a time.

    python benchmarks/procgen_reasons.py --runs FOLDER --seeds 102 103 104

Trains PPO-EWMA of procgen_invariance.py for 212,992 environment steps on seeds that no reported number uses, four
minutes a run on one core. Prints the mean return of the last 400 episodes and the policy's entropy, averaged over the
last quarter of the runs. Runs that were stopped continue, and finished ones are not trained again.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import Interrupted, ScalingWarning
from anybatch.grid.run_folder import train_or_resume
from anybatch.reproduce.tables import markdown
from anybatch.runs.progress import read_progress
from anybatch.scaling import rescale, scale
from procgen_invariance_jobs import DEFAULT, FEWER, NUM_ENVS, STEPS, Job

TOTAL = 26 * NUM_ENVS * STEPS
C = NUM_ENVS // FEWER
SHAPES: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "64 x 128": lambda config: config,
    "4 x 128": lambda config: scale(config, C)[0],
    "4 x 128, betas": lambda config: scale(config, C, adam_betas=True)[0],
    "4 x 128, EWMA not adjusted": lambda config: scale(config, C, ewma=False)[0],
    "64 x 8": lambda config: rescale(config, rollout_steps=STEPS // C)[0],
    "64 x 8, betas": lambda config: rescale(config, rollout_steps=STEPS // C, adam_betas=True)[0],
}
"""Environments x steps. All but the first have a sixteenth of the batch, with all rules but for what is named; betas:
Adam's, to the power 1/16, as by --scaling.adam-betas both."""


def ends(name: str, seed: int, runs: Path) -> tuple[float, float]:
    """Return and entropy over the last quarter of a run, which is trained if it has to be."""
    folder = runs / f"{name.replace(', ', '-').replace(' ', '')}-seed{seed}"
    config = override(Job("coinrun", DEFAULT, seed).config()[0], {"total_env_steps": TOTAL})
    with warnings.catch_warnings():  # of short rollouts and of the ablation
        warnings.simplefilter("ignore", ScalingWarning)
        config = SHAPES[name](config)
    if train_or_resume(config, folder, seed, quiet=True).interrupted:
        raise Interrupted
    progress = read_progress(folder / "progress.csv")
    last = np.array(progress["env_steps"]) > 0.75 * TOTAL
    columns = (np.array(progress[column])[last] for column in ("mean_episode_return_400", "entropy"))
    value, entropy = (float(np.mean(column)) for column in columns)
    return value, entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[102, 103, 104])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--runs", type=Path, default=Path("runs/procgen-reasons"))
    args = parser.parse_args()
    found = {name: [ends(name, seed, args.runs) for seed in args.seeds] for name in args.shapes}
    rows = [
        [name, *(", ".join(f"{number:.2f}" for number in column) for column in zip(*values, strict=True))]
        for name, values in found.items()
    ]
    print(markdown(["environments x steps", "return of each seed", "entropy of each seed"], rows))


if __name__ == "__main__":
    main()
