"""The curves of procgen_invariance.py: what is kept of a finished run."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anybatch.reproduce.results import fill_gaps, write_rows
from anybatch.reproduce.statistics import Array
from anybatch.runs.progress import read_progress
from procgen_invariance_jobs import STEPS, TOTAL, Job, whole_lines

BINS = 50
"""Parts of a run."""
HEADER = "game", "arm", "seed", "env_steps", "episodes", "return", "mean_episode_return", "mean_episode_return_400"


class Finished(NamedTuple):
    """What is kept of a run: (BINS,) each."""

    returns: Array
    """Mean return of the episodes whose middle was in that part of the run; see :func:`by_middle`."""
    episodes: Array
    logged: Array
    """mean_episode_return (last 100 episodes) at the end of the part."""
    logged_400: Array


def by_middle(job: Job, ends: Array, lengths: Array, returns: Array) -> tuple[Array, Array]:
    """Mean return and number of episodes by the part of the run that the middle of an episode was in.

    An episode of L steps in one of N environments lasts N * L environment steps of the run. Counted when it ends, as in
    mean_episode_return, it measures policies up to N * L steps old, so that a curve of 64 environments lags behind one
    of 4. ``ends`` are known to an iteration; the middle of the iteration stands for all that ended in it.
    """
    middles = ends - job.num_envs * STEPS / 2 - job.num_envs * lengths / 2
    part = np.clip(middles // (TOTAL / BINS), 0, BINS - 1).astype(int)
    count = np.bincount(part, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return fill_gaps(np.bincount(part, returns, minlength=BINS) / count), count


def read_finished(job: Job, runs: Path) -> Finished:
    """Read a finished run."""
    _, ends, lengths, returns = np.loadtxt(whole_lines(runs / job.name / "episodes.csv"), delimiter=",").T
    progress = {name: np.asarray(column) for name, column in read_progress(runs / job.name / "progress.csv").items()}
    edges = np.arange(1, BINS + 1) * (TOTAL / BINS)
    rows = np.searchsorted(progress["env_steps"], edges, side="right") - 1
    logged = (progress[name][rows] for name in ("mean_episode_return", "mean_episode_return_400"))
    return Finished(*by_middle(job, ends, lengths, returns), *logged)


def write_curves(path: Path, finished: Mapping[Job, Finished]) -> None:
    """Write a row for each run and part; equal curves give equal bytes."""
    rows: list[list[object]] = [list(HEADER)]
    for job, run in finished.items():
        for part in range(BINS):
            steps = round((part + 1) * TOTAL / BINS)
            values = (f"{column[part]:.4f}" for column in (run.returns, run.logged, run.logged_400))
            rows.append([job.game, job.arm, job.seed, steps, int(run.episodes[part]), *values])
    write_rows(path, rows)


def read_curves(path: Path) -> dict[Job, Finished]:
    """Read what :func:`write_curves` wrote; no runs if there is no such file."""
    if not path.is_file():
        return {}
    values: dict[Job, list[list[float]]] = {}
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            job = Job(row["game"], row["arm"], int(row["seed"]))
            values.setdefault(job, []).append([float(row[name]) for name in ("return", "episodes", *HEADER[-2:])])
    return {job: Finished(*np.array(parts).T) for job, parts in values.items()}
