"""From PPO to PPO-EWMA: KL from the proximal policy, and returns, for several centres of mass.

    python benchmarks/ppo_to_ewma.py --out results/ppo-to-ewma/results.csv

Plain PPO is compared with PPO-EWMA that differs from it in the proximal policy alone, with multiples of the centre of
mass of ``anybatch.scaling.center_of_mass_of_ppo``. All runs of a task are trained as one stack. The script prints, for
each, the mean KL[proximal, policy] and clip fraction over the run, the mean return of the last half, and the multiple
at which the KL is PPO's, interpolated.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo
from anybatch.reproduce.stacked.stack import RunResult, run_stacked
from anybatch.reproduce.statistics import band
from anybatch.scaling import center_of_mass_of_ppo

TASKS = {
    "CartPole": ("envpool:CartPole-v1", 50_000),
    "Acrobot": ("envpool:Acrobot-v1", 50_000),
    "Catch": ("envpool:Catch-v0", 50_000),
}
SETTINGS = {"4 minibatches, 4 epochs": (4, 4), "16 minibatches, 1 epoch": (16, 1)}
"""Minibatches and epochs; both are 16 gradient steps an iteration."""
MULTIPLES = (0.5, 0.75, 1.0, 2.0)
COLUMNS = ("task", "setting", "multiple", "center_of_mass", "seed", "kl", "clip_fraction", "last_half", "all")


def plain_ppo(env: str, steps: int, minibatches: int, epochs: int) -> TrainConfig:
    """PPO with the numbers of CleanRL's ppo.py, but for the networks, and a step size that suits these tasks."""
    return ppo(
        env,
        num_envs=8,
        rollout_steps=128,
        total_env_steps=steps,
        minibatches=minibatches,
        policy_epochs=epochs,
        value_epochs=epochs,
        step_size=1e-3,
        discount=0.99,
        encoder="mlp",
        architecture="dual",
        device="cpu",
        **{"model.options": {"width": 32, "depth": 2}, "log.noise_scale": False},
    )


def numbers(result: RunResult) -> dict[str, float]:
    """The measurements of a run: KL and clip fraction after its first tenth."""
    columns = result.columns
    later = columns["env_steps"] > columns["env_steps"][-1] / 10
    sums, counts = columns["episode_return_sum"], columns["episodes"]
    half = len(sums) // 2
    return {
        "kl": float(columns["kl_proximal"][later].mean()),
        "clip_fraction": float(columns["clip_fraction"][later].mean()),
        "last_half": float((sums[-1] - sums[half]) / (counts[-1] - counts[half])),
        "all": float(sums[-1] / counts[-1]),
    }


def crossing(kls: dict[float, float], target: float) -> float:
    """The multiple at which the KL is ``target``, linear between logarithms; NaN outside."""
    points = sorted(kls.items())
    for (low, before), (high, after) in itertools.pairwise(points):
        if before <= target <= after:
            part = math.log(target / before) / math.log(after / before)
            return low * (high / low) ** part
    return math.nan


def train_setting(task: str, setting: str, seeds: int, steps: int | None) -> list[dict[str, object]]:
    """Train PPO and PPO-EWMA at all multiples; one row a run."""
    minibatches, epochs = SETTINGS[setting]
    env, default = TASKS[task]
    base = plain_ppo(env, steps or default, minibatches, epochs)
    center = center_of_mass_of_ppo(epochs, minibatches)
    variants = {0.0: base}
    for multiple in MULTIPLES:
        policy = replace(base.policy, proximal="ewma", center_of_mass=multiple * center)
        variants[multiple] = replace(base, policy=policy)
    pairs = [(multiple, seed) for multiple in variants for seed in range(seeds)]
    results = run_stacked([variants[m] for m, _ in pairs], [7000 + s for _, s in pairs], rows=None, statistics=True)
    return [
        {"task": task, "setting": setting, "multiple": m, "center_of_mass": m * center, "seed": s, **numbers(result)}
        for (m, s), result in zip(pairs, results, strict=True)
    ]


def report(rows: list[dict[str, object]]) -> None:
    """Means over seeds, and standard errors of the returns."""

    def column(multiple: float, name: str) -> np.ndarray:
        return np.array([row[name] for row in rows if row["multiple"] == multiple])

    print(f"{rows[0]['task']}, {rows[0]['setting']}")
    kls = {m: float(column(m, "kl").mean()) for m in (0.0, *MULTIPLES)}
    for m in kls:
        returns, clipped = band(column(m, "last_half")), column(m, "clip_fraction").mean()
        name = "PPO" if m == 0 else f"EWMA x {m:g}"
        print(f"  {name:12} KL {kls[m]:.5f}  clipped {clipped:6.1%}  return {returns.mean:8.2f} +- {returns.sem:.2f}")
    target = kls.pop(0.0)
    print(f"  the KL is PPO's at x {crossing(kls, target):.2f}", flush=True)


def main() -> None:
    """Train, print, and write every run's numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="environment steps of a run")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    everything = []
    for task in TASKS:
        for setting in SETTINGS:
            began = time.monotonic()
            rows = train_setting(task, setting, arguments.seeds, arguments.steps)
            report(rows)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)
            everything += rows
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                with arguments.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(
                        {k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()} for row in everything
                    )


if __name__ == "__main__":
    main()
