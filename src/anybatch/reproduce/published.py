"""The curves published with Phasic Policy Gradient, compared: ``python -m anybatch.reproduce.published``."""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anybatch.envs.procgen import NORMALIZATION
from anybatch.errors import AnybatchError
from anybatch.reproduce.statistics import (
    FINAL_WINDOW,
    Array,
    band,
    bootstrap_interval,
    final_average,
    iqm,
    normalized,
    probability_of_improvement,
    van_elteren,
)
from anybatch.reproduce.tables import markdown

NAMES: dict[str, str] = {"ppo": "PPO", "ppg": "PPG", "ppg-kl": "PPG-KL", "ppg-single": "single-network PPG"}
"""The algorithms in the file, by the names they have in print."""

COMPARISONS: tuple[tuple[str, str], ...] = (("ppg", "ppo"), ("ppg-kl", "ppg"), ("ppg-single", "ppg"))
"""Pairs of which the first is tested to be better than the second."""

_FILE = Path("results", "reference", "procgen_hard_published_curves.csv.gz")
_REPETITIONS = 10_000


@dataclass(frozen=True)
class Curves:
    """Learning curves of several algorithms on the same games and seeds, at the same environment steps."""

    games: tuple[str, ...]
    steps: Array
    """(points,) environment steps."""
    returns: dict[str, Array]
    """Algorithm to (seeds, games, points): mean episode returns, not normalised."""


class Comparison(NamedTuple):
    """How much better one algorithm is than another, in final normalised return."""

    first: str
    second: str
    difference: float
    """Mean of the first less mean of the second, over seeds and games."""
    low: float
    high: float
    """The 95% bootstrap interval of the difference."""
    improvement: float
    """Probability that the first is better than the second."""
    z: float
    p: float
    """Van Elteren's test of the first being better, games as strata."""


def read_curves(path: Path | None = None) -> Curves:
    """The published curves: 4 algorithms, 3 seeds, 16 games, 429 points.

    Args:
        path: the CSV file, compressed with gzip; by default the one in the repository that this file lies in.

    Raises:
        AnybatchError: no such file, or one in which some run lacks points that another has.
    """
    path = path or Path(__file__).parents[3] / _FILE
    if not path.is_file():
        raise AnybatchError(f"There are no published curves at {path}; name {_FILE} of the repository with --curves.")
    runs: dict[tuple[str, str, int], dict[int, float]] = {}
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            run = runs.setdefault((row["algorithm"], row["env"], int(row["seed"])), {})
            run[int(row["env_steps"])] = float(row["mean_episode_return"])
    algorithms = tuple(dict.fromkeys(algorithm for algorithm, _, _ in runs))
    games = tuple(dict.fromkeys(game for _, game, _ in runs))
    seeds = sorted({seed for _, _, seed in runs})
    steps = sorted({step for run in runs.values() for step in run})
    expected = len(algorithms) * len(games) * len(seeds)
    if not runs or len(runs) != expected or any(len(run) != len(steps) for run in runs.values()):
        raise AnybatchError(f"{path} is incomplete: not every algorithm, game and seed has all {len(steps)} points.")
    returns = {
        algorithm: np.array(
            [[[runs[algorithm, game, seed][step] for step in steps] for game in games] for seed in seeds]
        )
        for algorithm in algorithms
    }
    return Curves(games, np.array(steps, dtype=np.float64), returns)


def final_returns(curves: Curves, window: float = FINAL_WINDOW) -> dict[str, Array]:
    """Algorithm to (seeds, games): normalised returns, averaged over the last ``window`` environment steps."""
    low, high = np.array([NORMALIZATION[game] for game in curves.games]).T
    return {name: normalized(final_average(curves.steps, x, window), low, high) for name, x in curves.returns.items()}


def compare(results: dict[str, Array], pairs: Sequence[tuple[str, str]] = COMPARISONS) -> list[Comparison]:
    """Compare final normalised returns, algorithm to (seeds, games), pair by pair."""
    comparisons = []
    for first, second in pairs:
        a, b = results[first], results[second]
        difference = mean_difference(a, b)
        low, high = bootstrap_interval((a, b), mean_difference, repetitions=_REPETITIONS)
        improvement = probability_of_improvement(a, b)
        comparisons.append(Comparison(first, second, difference, low, high, improvement, *van_elteren(a, b)))
    return comparisons


def mean_difference(a: Array, b: Array) -> float:
    """Mean of a (seeds, tasks) less mean of b (seeds, tasks)."""
    return float(a.mean() - b.mean())


def table_of_results(results: dict[str, Array]) -> str:
    """Markdown: the mean normalised return of each algorithm with its deviation over seeds, and the IQM."""
    rows = []
    for algorithm, values in results.items():
        mean, std, _ = band(values.mean(1))
        rows.append([NAMES.get(algorithm, algorithm), f"{mean:.3f}", f"{std:.3f}", f"{iqm(values):.3f}"])
    return markdown(["algorithm", "mean", "std over seeds", "IQM"], rows)


def table_of_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Markdown: difference with its interval, probability of improvement, Z and p of each comparison."""
    rows = [
        [
            f"{NAMES.get(c.first, c.first)} over {NAMES.get(c.second, c.second)}",
            f"{c.difference:+.3f}",
            f"{c.low:+.3f} to {c.high:+.3f}",
            f"{c.improvement:.3f}",
            f"{c.z:.2f}",
            f"{c.p:.1e}" if c.p < 0.001 else f"{c.p:.3f}",
        ]
        for c in comparisons
    ]
    return markdown(["comparison", "difference", "95% interval", "P(improvement)", "Z", "p"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Compare the curves published with Phasic Policy Gradient.")
    parser.add_argument("--curves", type=Path, help=f"the file, if it is not {_FILE} of this repository")
    try:
        results = final_returns(read_curves(parser.parse_args(arguments).curves))
    except AnybatchError as error:
        parser.error(str(error))
    print(table_of_results(results))
    print()
    print(table_of_comparisons(compare(results)))


if __name__ == "__main__":
    main()
