"""``make demo``: train PPO-EWMA on a real Procgen game, then one task at two batch sizes, in about three minutes."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import matplotlib

from anybatch.errors import AnybatchError
from anybatch.presets import ppo_ewma
from anybatch.runs import evaluate, initial_policy, load_policy, read_progress
from anybatch.training import train
from demo_invariance import SEEDS, compare, configurations

GAME = "procgen:bigfish-easy"
"""The environment."""
STEPS = 150_000
"""Environment steps of training."""
EPISODES = 64
"""Episodes of each evaluation."""


def main() -> int:
    """Train, evaluate before and after, draw the learning curve; returns the exit code."""
    # one level, a small batch and the small network, so that two minutes of CPU are enough to see it learn
    config = ppo_ewma(
        GAME,
        env_options={"num_levels": 1},
        encoder="nature",
        num_envs=32,
        rollout_steps=64,
        total_env_steps=STEPS,
        policy_epochs=2,
        value_epochs=2,
        discount=0.99,
    )
    out = next(path for path in map(_folder, itertools.count(1)) if not path.exists())
    print(f"PPO-EWMA on one level of {GAME}: {STEPS:,} environment steps on the CPU, about two minutes")
    started = time.monotonic()
    before = evaluate(initial_policy(config, device="cpu"), episodes=EPISODES, seed=1)
    result = train(config, out)
    if result.interrupted:
        print(f"stopped; to continue: anybatch resume {out}")
        return 130
    after = evaluate(load_policy(out, device="cpu"), episodes=EPISODES, seed=1)
    curve = draw(out, before.mean, after.mean)
    print(f"mean return before training: {before}")
    print(f"mean return after training:  {after}")
    print(f"learning curve: {curve}")
    print(f"everything else: {out} (config.yaml, progress.csv, TensorBoard events, checkpoints)")
    show_invariance(out)
    print(f"took {time.monotonic() - started:.0f} s; watch it play: .venv/bin/anybatch watch {out} --video demo.mp4")
    return 0


def show_invariance(out: Path) -> None:
    """Train a small task at two batch sizes, with the scaling rules and without, and print the returns."""
    configs, path = configurations(), out / "batch_sizes.png"
    print(f"the same training at two batch sizes: {len(configs)} times {len(SEEDS)} small runs, under a minute")
    print(f"final mean return, {compare(path, configs)}")
    print(f"curves: {path}")


def draw(run_dir: Path, before: float, after: float) -> Path:
    """Draw a run's learning curve between its evaluations before and after; returns the PNG's path."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    progress = read_progress(run_dir / "progress.csv")
    steps = [x / 1000 for x in progress["env_steps"]]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(steps, progress["mean_episode_return"], color="#0072B2", label="last 100 training episodes")
    axes.plot((0, steps[-1]), (before, after), "o", color="#D55E00", label=f"evaluation, {EPISODES} episodes")
    axes.set(title=f"PPO-EWMA on {GAME}", xlabel="thousand environment steps", ylabel="mean return")
    axes.legend()
    path = run_dir / "learning_curve.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _folder(number: int) -> Path:
    return Path("runs") / ("demo" if number == 1 else f"demo-{number}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AnybatchError as error:
        print(f"anybatch: {error}", file=sys.stderr)
        sys.exit(1)
