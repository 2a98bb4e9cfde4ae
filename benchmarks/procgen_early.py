"""The early part of Procgen training against the published curves.

    python benchmarks/procgen_early.py run --games starpilot coinrun dodgeball --seeds 1 --steps 1048576
    python benchmarks/procgen_early.py run --preset ppg --games starpilot --steps 4194304
    python benchmarks/procgen_early.py draw
    python benchmarks/procgen_early.py draw --preset ppg

``run`` trains a preset with all 256 environments, game after game, and continues where it was interrupted. ``draw``
copies the progress of every run into results/procgen-early/ and draws it over the published curves.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

from anybatch.config.io import override
from anybatch.presets import PRESETS
from anybatch.reproduce.plots import BLACK, BLUE, GREEN, ORANGE, VERMILION, figure, in_millions
from anybatch.reproduce.style import legend
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "results" / "reference" / "procgen_hard_published_curves.csv.gz"
POINTS = (262_144, 524_288, 1_048_576, 1_572_864, 2_031_616, 2_949_120)
KEPT = (
    "iteration",
    "env_steps",
    "seconds",
    "mean_episode_return",
    "mean_episode_return_400",
    "episodes",
    "explained_variance",
)


def run(preset: str, games: list[str], seeds: list[int], steps: int, runs: Path, threads: int) -> None:
    for seed in seeds:
        for game in games:
            folder = runs / f"{preset}-{game}-seed{seed}"
            config = override(PRESETS[preset](f"procgen:{game}-hard"), {"total_env_steps": steps, "threads": threads})
            started = (folder / "config.yaml").exists()
            done = max(read_progress(folder / "progress.csv")["env_steps"], default=0) if started else 0
            if done < steps:
                print(resume(folder, total_env_steps=steps) if started else train(config, folder, seed), flush=True)


# the presets of PPG have the KL-penalised objective, as the paper does
PUBLISHED = {"ppo": "ppo", "ppo-ewma": "ppo", "ppg": "ppg-kl", "ppg-ewma": "ppg-kl"}


def published(algorithm: str, game: str) -> dict[int, list[float]]:
    """Returns of the seeds, by environment steps."""
    by_steps: dict[int, list[float]] = defaultdict(list)
    with gzip.open(REFERENCE, "rt") as file:
        for row in csv.DictReader(file):
            if row["algorithm"] == algorithm and row["env"] == game:
                by_steps[int(row["env_steps"])].append(float(row["mean_episode_return"]))
    return by_steps


def of_preset(preset: str, paths: Iterable[Path]) -> list[Path]:
    """Those of ``paths`` that are named PRESET-GAME-seedN; no game has a dash, so ppo-ewma's are not among ppo's."""
    return sorted(path for path in paths if re.fullmatch(rf"{preset}-[a-z]+-seed\d+", path.stem))


def draw(preset: str, runs: Path, results: Path) -> None:
    algorithm = PUBLISHED[preset]
    for folder in of_preset(preset, runs.glob("*")):
        keep_progress(folder, results)
    curves = {path.stem: read_progress(path) for path in of_preset(preset, results.glob("*.csv"))}
    games = list(dict.fromkeys(name.removeprefix(f"{preset}-").split("-")[0] for name in curves))
    with figure(
        results / f"{preset}.png", len(games), width=3.4, height=2.7, label="mean return,\nlast 400 episodes"
    ) as axes:
        for panel, game in zip(axes, games, strict=True):
            theirs = published(algorithm, game)
            ours = {name: curve for name, curve in curves.items() if f"-{game}-" in name}
            last = max(curve["env_steps"][-1] for curve in ours.values())
            steps = [s for s in sorted(theirs) if s <= last * 1.02]
            means = [statistics.mean(theirs[s]) for s in steps]
            spreads = [statistics.stdev(theirs[s]) for s in steps]
            low, high = zip(*((m - s, m + s) for m, s in zip(means, spreads, strict=True)), strict=True)
            panel.fill_between(steps, low, high, color=BLACK, alpha=0.15, linewidth=0)
            panel.plot(steps, means, color=BLACK, label=f"published {algorithm.upper()}, 3 seeds")
            for color, (name, curve) in zip(cycle((BLUE, VERMILION, GREEN, ORANGE)), ours.items(), strict=False):
                label = f"anybatch {preset.upper()}, seed {name.rsplit('seed', 1)[1]}"
                panel.plot(curve["env_steps"], curve["mean_episode_return_400"], color=color, label=label)
                report(name, curve, theirs)
            panel.set_title(f"{game}, hard")
            in_millions(panel)
        legend(axes)


def report(name: str, curve: dict[str, list[float]], theirs: dict[int, list[float]]) -> None:
    """Print ours beside theirs where the paper's authors and we have the same number of environment steps."""
    for step in POINTS:
        if step in curve["env_steps"]:
            value = curve["mean_episode_return_400"][curve["env_steps"].index(step)]
            mean, spread = statistics.mean(theirs[step]), statistics.stdev(theirs[step])
            print(f"{name} at {step / 1e6:.2f}M: {value:.2f}, published {mean:.2f} +- {spread:.2f}")
    # single points scatter by 0.1 on starpilot and dodgeball and by 0.25 on coinrun, the mean of a curve by less
    common = [step for step in curve["env_steps"] if step in theirs]
    value = statistics.mean(curve["mean_episode_return_400"][curve["env_steps"].index(step)] for step in common)
    seeds = [f"{statistics.mean(row):.2f}" for row in zip(*(theirs[step] for step in common), strict=True)]
    print(f"{name}, mean of the curve to {common[-1] / 1e6:.2f}M: {value:.2f}, published seeds {', '.join(seeds)}")


def keep_progress(folder: Path, results: Path) -> None:
    progress = read_progress(folder / "progress.csv")
    results.mkdir(parents=True, exist_ok=True)
    with (results / f"{folder.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(KEPT)
        writer.writerows(zip(*(progress[column] for column in KEPT), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("--preset", choices=PRESETS, default="ppo")
    parser.add_argument("--games", nargs="+", default=["starpilot", "coinrun", "dodgeball"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=1_048_576, help="environment steps of each run")
    parser.add_argument("--threads", type=int, default=1, help="threads that step environments")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "procgen-early", help="run folders")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "procgen-early", help="what is committed")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.preset, arguments.games, arguments.seeds, arguments.steps, arguments.runs, arguments.threads)
    else:
        draw(arguments.preset, arguments.runs, arguments.results)


if __name__ == "__main__":
    main()
