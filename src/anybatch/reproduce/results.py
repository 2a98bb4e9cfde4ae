"""Curves of runs on a common ladder of points, as one compressed CSV for each figure."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anybatch.errors import AnybatchError
from anybatch.reproduce.statistics import Array
from anybatch.system.atomic_files import write_bytes

Key = tuple[str, str, int]
"""Variant, task and place on the ladder."""

_HEAD = ("variant", "task", "x", "seed", "env_steps", "diverged")
_DIGITS = 5


@dataclass(frozen=True)
class Curve:
    """The runs of a cell."""

    seeds: tuple[int, ...]
    env_steps: int
    """Environment steps of each run."""
    values: Array
    """(seeds, points); point k of K belongs to the k-th K-th part of training."""
    diverged: tuple[bool, ...] = ()
    """Which of them were no longer finite at some point."""

    @property
    def steps(self) -> Array:
        """(points,) environment steps at which the points are drawn: the ends of their parts."""
        points = self.values.shape[1]
        return np.arange(1, points + 1) * (self.env_steps / points)


@dataclass(frozen=True)
class Results:
    """Curves by variant, task and place on the ladder."""

    curves: Mapping[Key, Curve] = field(default_factory=dict)

    def __getitem__(self, key: Key) -> Curve:
        if key not in self.curves:
            variant, task, x = key
            raise AnybatchError(f"there are no results of {variant} on {task} at {x}; run the figure first")
        return self.curves[key]

    def __contains__(self, key: object) -> bool:
        return key in self.curves

    def variants(self) -> tuple[str, ...]:
        """Variants in the order in which they were run."""
        return tuple(dict.fromkeys(variant for variant, _, _ in self.curves))

    def joined(self, other: Results) -> Results:
        """Curves of both."""
        return Results({**self.curves, **other.curves})


def mean_between(edges: Array, steps: Array, episodes: Array, returns: Array) -> Array:
    """Mean returns of the episodes that ended between neighbouring edges.

    Args:
        edges: (K + 1,) environment steps.
        steps: (rows,) environment steps, increasing.
        episodes: (rows,) episodes that had ended by then.
        returns: (rows,) the sum of their returns.

    Returns:
        (K,); where no episode ended, the value before (at the start: after) stands. NaN if none ended at all.
    """
    zero = np.zeros(1)
    at = np.concatenate([zero, steps])
    count = np.diff(np.interp(edges, at, np.concatenate([zero, episodes])))
    total = np.diff(np.interp(edges, at, np.concatenate([zero, returns])))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(count > 1e-9, total / count, math.nan)
    return filled(means)


def mean_of_line(edges: Array, steps: Array, values: Array) -> Array:
    """Means over the parts between edges of the line through points; NaN points are left out, its ends are level."""
    known = np.isfinite(values)
    if not known.any():
        return np.full(len(edges) - 1, math.nan)
    fine = np.linspace(edges[:-1], edges[1:], 33, axis=1)  # (K, 33)
    heights = np.interp(fine, steps[known], values[known])
    return np.asarray((heights[:, 1:] + heights[:, :-1]).mean(1) / 2)


def filled(values: Array) -> Array:
    """NaN replaced by the value before it, or after it at the start."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) == 0:
        return values
    last = np.searchsorted(known, np.arange(len(values)), side="right") - 1
    return np.asarray(values[known[np.maximum(last, 0)]])


def write_results(path: Path, results: Results) -> None:
    """Write curves as a gzipped CSV, a row for each run; equal results give equal bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    points = max((curve.values.shape[1] for curve in results.curves.values()), default=0)
    writer.writerow([*_HEAD, *(f"p{k + 1}" for k in range(points))])
    for (variant, task, x), curve in results.curves.items():
        diverged = curve.diverged or (False,) * len(curve.seeds)
        for seed, bad, row in zip(curve.seeds, diverged, curve.values, strict=True):
            writer.writerow([variant, task, x, seed, curve.env_steps, int(bad), *map(_format, row)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, gzip.compress(text.getvalue().encode(), mtime=0))


def read_results(path: Path) -> Results:
    """Read what :func:`write_results` wrote.

    Raises:
        AnybatchError: there is no such file, or it is something else.
    """
    if not path.is_file():
        raise AnybatchError(
            f"{path} does not exist; make it with: anybatch reproduce run {path.name.partition('.')[0]}"
        )
    try:
        rows = list(csv.reader(gzip.decompress(path.read_bytes()).decode().splitlines()))
        return Results(dict(_curves(rows[1:])))
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise AnybatchError(f"{path} is not a table of results: {error}") from error


def _curves(rows: Sequence[Sequence[str]]) -> Iterator[tuple[Key, Curve]]:
    groups: dict[Key, list[Sequence[str]]] = {}
    for row in rows:
        groups.setdefault((row[0], row[1], int(row[2])), []).append(row)
    for key, group in groups.items():
        values = np.array([[float(x or "nan") for x in row[len(_HEAD) :]] for row in group])
        seeds, diverged = tuple(int(row[3]) for row in group), tuple(row[5] == "1" for row in group)
        yield key, Curve(seeds, int(group[0][4]), values, diverged)


def _format(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.{_DIGITS}g}"
