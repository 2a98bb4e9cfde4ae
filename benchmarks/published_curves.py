"""Compare the curves published with Phasic Policy Gradient: ``python benchmarks/published_curves.py``."""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from anybatch.envs.procgen import NORMALIZATION
from anybatch.errors import AnybatchError
from anybatch.reproduce.statistics import (
    Array,
    band,
    bootstrap_interval,
    normalized,
    probability_of_improvement,
    van_elteren,
)
from anybatch.reproduce.tables import markdown, p_value

NAMES: dict[str, str] = {"ppo": "PPO", "ppg": "PPG", "ppg-kl": "PPG-KL", "ppg-single": "single-network PPG"}
"""Algorithms in the file, and their names in print."""

COMPARISONS: tuple[tuple[str, str], ...] = (("ppg", "ppo"), ("ppg-kl", "ppg"), ("ppg-single", "ppg"))
"""Pairs of algorithms; the tests ask whether the first is better."""

FINAL_WINDOW = 4_000_000
"""Environment steps at the end of training that the paper averages over: about one PPG phase (appendix E)."""

_FILE = Path("results", "reference", "procgen_hard_published_curves.csv.gz")
_REPETITIONS = 10_000


@dataclass(frozen=True)
class Curves:
    """Learning curves of several algorithms with the same games, seeds and environment steps."""

    games: tuple[str, ...]
    steps: Array
    """(points,) environment steps."""
    returns: dict[str, Array]
    """Mean episode returns (seeds, games, points) by algorithm, not normalised."""


class Comparison(NamedTuple):
    """Comparison of two algorithms in final normalised return."""

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
    """Read the published curves: 4 algorithms, 3 seeds, 16 games, 429 points.

    Raises:
        AnybatchError: there is no such file, or a run lacks points that another has.
    """
    path = path or Path(__file__).parents[1] / _FILE
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
    """Normalised returns (seeds, games) by algorithm, averaged over the last ``window`` environment steps."""
    low, high = np.array([NORMALIZATION[game] for game in curves.games]).T
    return {name: normalized(final_average(curves.steps, x, window), low, high) for name, x in curves.returns.items()}


def final_average(steps: ArrayLike, values: ArrayLike, window: float = FINAL_WINDOW) -> Array:
    """Mean of piecewise linear curves over the last ``window`` environment steps (figures 3, 4 and appendix E).

    Args:
        steps: (points,), increasing.
        values: (..., points).
        window: environment steps, at most those between the first and the last point.

    Returns:
        (...).

    Raises:
        ValueError: shapes that do not fit, steps that do not increase, or a window that is not within the curve.
    """
    steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if steps.ndim != 1 or values.ndim == 0 or values.shape[-1] != len(steps):
        raise ValueError(f"Steps (points,) and values (..., points) do not fit: {steps.shape} and {values.shape}.")
    if len(steps) < 2 or not (np.diff(steps) > 0).all():
        raise ValueError("A curve needs at least two points at increasing environment steps.")
    if not 0 < window <= steps[-1] - steps[0]:
        raise ValueError(f"The window is {window} steps, but the curve covers {steps[-1] - steps[0]:g}.")
    start = steps[-1] - window
    first = int(np.searchsorted(steps, start, side="right"))  # the first point after the start
    part = (start - steps[first - 1]) / (steps[first] - steps[first - 1])
    at_start = values[..., first - 1] * (1 - part) + values[..., first] * part
    heights = np.concatenate([at_start[..., None], values[..., first:]], axis=-1)
    widths = np.diff(np.concatenate([[start], steps[first:]]))
    return np.asarray(((heights[..., 1:] + heights[..., :-1]) / 2 * widths).sum(-1) / window)


def iqm(values: ArrayLike) -> float:
    """Interquartile mean over seeds and tasks (Agarwal et al., 2021): without the lowest and the highest quarter.

    Raises:
        ValueError: no values, or NaN.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=None)
    if len(ordered) == 0 or np.isnan(ordered).any():
        raise ValueError("The interquartile mean needs at least one value and no NaN.")
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def compare(results: dict[str, Array], pairs: Sequence[tuple[str, str]] = COMPARISONS) -> list[Comparison]:
    """Compare the final normalised returns of pairs of algorithms."""
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
    """Markdown table of mean, deviation over seeds and interquartile mean."""
    rows = []
    for algorithm, values in results.items():
        mean, std, _ = band(values.mean(1))
        rows.append([NAMES.get(algorithm, algorithm), f"{mean:.3f}", f"{std:.3f}", f"{iqm(values):.3f}"])
    return markdown(["algorithm", "mean", "std over seeds", "IQM"], rows)


def table_of_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Markdown table of differences and their tests."""
    rows = [
        [
            f"{NAMES.get(c.first, c.first)} over {NAMES.get(c.second, c.second)}",
            f"{c.difference:+.3f}",
            f"{c.low:+.3f} to {c.high:+.3f}",
            f"{c.improvement:.3f}",
            f"{c.z:.2f}",
            p_value(c.p),
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
