"""Curves of runs at common points of training, stored as one compressed CSV per figure."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anybatch.config.schema import TrainConfig
from anybatch.errors import AnybatchError
from anybatch.reproduce.statistics import Array
from anybatch.system.atomic_files import write_bytes

Key = tuple[str, str, int]
"""Variant, task and x of a group of runs."""

_HEADER = ("variant", "task", "x", "seed", "env_steps", "diverged")
_DIGITS = 5
_UNSMOOTHED_POINTS = 200


@dataclass(frozen=True)
class Curve:
    """The curves of a group of runs."""

    seeds: tuple[int, ...]
    env_steps: int
    """Environment steps of each run."""
    values: Array
    """(seeds, points); point k of K is the mean over the k-th of K equal intervals of training."""
    diverged: tuple[bool, ...]
    """Whether each run's numbers stopped being finite."""


@dataclass(frozen=True)
class Results:
    """Curves by variant, task and x."""

    curves: Mapping[Key, Curve] = field(default_factory=dict)

    def __getitem__(self, key: Key) -> Curve:
        if key not in self.curves:
            variant, task, x = key
            raise AnybatchError(f"there are no results of {variant} on {task} at {x}; run the figure first")
        return self.curves[key]

    def __contains__(self, key: object) -> bool:
        return key in self.curves

    def __or__(self, other: Results) -> Results:
        return Results({**self.curves, **other.curves})

    def variants(self) -> tuple[str, ...]:
        """Variants in the order in which they were run."""
        return tuple(dict.fromkeys(variant for variant, _, _ in self.curves))

    def source(self, variant: str, task: str, divisor: int) -> str:
        """The variant whose runs are shown: ablations that change nothing at the default batch share those of "all"."""
        return "all" if divisor == 1 and (variant, task, 1) not in self.curves else variant


@dataclass(frozen=True)
class ResultsFolder:
    """A folder with a table, pictures and a summary per figure; raw runs, in ``runs``, may be deleted."""

    path: Path

    @property
    def runs(self) -> Path:
        """Results of stacked runs, or the run folders of a grid."""
        return self.path / "runs"

    @property
    def single_runs(self) -> Path:
        """Results of runs of the ordinary trainer in a stacked suite."""
        return self.path / "runs" / "single"

    def table(self, figure: str) -> Path:
        """File with the curves of a figure."""
        return self.path / f"{figure}.csv.gz"

    def summary(self, figure: str) -> Path:
        """File with the numbers of a figure in words."""
        return self.path / f"{figure}.md"


def curve_points(columns: dict[str, Array], config: TrainConfig, column: str, points: int, *, diverged: bool) -> Array:
    """Points of one run: means over equal intervals of training, or unsmoothed values of another column.

    Returns are means over the episodes that ended in an interval, if the run counted them; otherwise over the curve of
    the last 400 episodes, as in the published curves. Those of evaluations are the values at the ends of the intervals,
    interpolated between evaluations, which are done up to an iteration later. Points after the end of a diverged run
    are NaN.
    """
    steps = columns.get("env_steps", np.zeros(0))
    edges = np.linspace(0, config.total_env_steps, points + 1)
    if len(steps) == 0:
        return np.full(points, math.nan)
    if column == "return" and "episode_return_sum" in columns:
        values = mean_returns(edges, steps, columns["episodes"], columns["episode_return_sum"])
    elif column == "return":
        values = interval_means(edges, steps, columns["mean_episode_return_400"])
    elif column == "eval_return":
        done = np.isfinite(columns[column])
        values = np.interp(edges[1:], steps[done], columns[column][done])
    elif column.startswith("noise_scale"):
        values = interval_means(edges, steps, columns[column])
    elif column not in columns:  # it diverged in its first iteration, after the evaluation before training
        return np.full(points, math.nan)
    else:
        count = min(_UNSMOOTHED_POINTS, len(steps))
        return columns[column][np.unique(np.round(np.linspace(0, len(steps) - 1, count)).astype(int))]
    if diverged:
        values = np.where(edges[1:] > steps[-1], math.nan, values)
    return values


def mean_returns(edges: Array, steps: Array, episodes: Array, returns: Array) -> Array:
    """(K,) mean returns of the episodes that ended in each interval between ``edges`` (K + 1,), in environment steps.

    By ``steps`` (rows,), ``episodes`` (rows,) had ended with a sum of returns (rows,). Intervals in which no episode
    ended take the previous value, or the next one at the start; all are NaN if no episode ended at all.
    """
    count, total = (np.diff(np.interp(edges, [0.0, *steps], [0.0, *sums])) for sums in (episodes, returns))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(count > 1e-9, total / count, math.nan)
    return fill_gaps(means)


def interval_means(edges: Array, steps: Array, values: Array) -> Array:
    """(K,) means of a piecewise linear curve, steps and values (rows,), over the intervals between ``edges`` (K + 1,).

    NaN points are skipped, and the ends continue level; all are NaN if all values are.
    """
    known = np.isfinite(values)
    if not known.any():
        return np.full(len(edges) - 1, math.nan)
    fine = np.linspace(edges[:-1], edges[1:], 33, axis=1)  # (K, 33)
    heights = np.interp(fine, steps[known], values[known])
    return np.asarray((heights[:, 1:] + heights[:, :-1]).mean(1) / 2)


def fill_gaps(values: Array) -> Array:
    """Replace NaN by the previous value, or by the next one at the start."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) == 0:
        return values
    last = np.searchsorted(known, np.arange(len(values)), side="right") - 1
    return np.asarray(values[known[np.maximum(last, 0)]])


def write_rows(path: Path, rows: Iterable[Iterable[object]], heading: str = "") -> None:
    """Write rows as a gzipped CSV after a ``heading``, atomically; equal content gives equal bytes."""
    text = io.StringIO()
    text.write(heading)
    csv.writer(text, lineterminator="\n").writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, gzip.compress(text.getvalue().encode(), mtime=0))


def write_results(path: Path, results: Results) -> None:
    """Write curves as a gzipped CSV, one row per run; equal results give equal bytes."""
    points = max((curve.values.shape[1] for curve in results.curves.values()), default=0)
    rows: list[list[object]] = [[*_HEADER, *(f"p{k + 1}" for k in range(points))]]
    for (variant, task, x), curve in results.curves.items():
        for seed, bad, row in zip(curve.seeds, curve.diverged, curve.values, strict=True):
            fields = ("" if math.isnan(value) else f"{value:.{_DIGITS}g}" for value in row)
            rows.append([variant, task, x, seed, curve.env_steps, int(bad), *fields])
    write_rows(path, rows)


def read_results(path: Path) -> Results:
    """Read a table of :func:`write_results`.

    Raises:
        AnybatchError: there is no such file, or it is not such a table.
    """
    if not path.is_file():
        name = path.name.partition(".")[0]
        raise AnybatchError(
            f"{path} does not exist: `anybatch reproduce run {name}` with the same --suite, --budget and --out creates "
            "it"
        )
    try:
        with gzip.open(path, "rt", newline="") as file:
            return Results(dict(_curves(csv.reader(file))))
    except (OSError, EOFError, zlib.error, ValueError, IndexError, csv.Error) as error:
        raise AnybatchError(f"{path} is not a table of results: {error}") from error


def _curves(reader: Iterator[list[str]]) -> Iterator[tuple[Key, Curve]]:
    groups: dict[Key, list[list[str]]] = {}
    next(reader, None)
    for row in reader:
        groups.setdefault((row[0], row[1], int(row[2])), []).append(row)
    for key, rows in groups.items():
        values = np.array([[float(x or "nan") for x in row[len(_HEADER) :]] for row in rows])
        seeds, diverged = tuple(int(row[3]) for row in rows), tuple(row[5] == "1" for row in rows)
        yield key, Curve(seeds, int(rows[0][4]), values, diverged)
