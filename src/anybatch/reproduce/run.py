"""Train what figures need, and gather it: stacked in this process, or as a grid of processes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from anybatch.config.schema import TrainConfig
from anybatch.errors import AnybatchError, ConfigError, DivergenceError
from anybatch.grid.job import finished, go_on
from anybatch.grid.runner import Job, Outcome, run_grid
from anybatch.reproduce.figures.scaling_up import NOISE
from anybatch.reproduce.results import (
    Curve,
    Key,
    Results,
    mean_between,
    mean_of_line,
    read_results,
    write_results,
)
from anybatch.reproduce.stacked import launch, read_result, result_path
from anybatch.reproduce.statistics import Array
from anybatch.reproduce.suites.suite import Cell, Figure, Suite, job_seeds, work_of
from anybatch.runs.files import PROGRESS
from anybatch.runs.progress import read_progress

Launcher = Literal["local", "ray", "print", "here"]

_UNSMOOTHED = 200
_RETURN = "mean_episode_return_400"


@dataclass(frozen=True)
class Place:
    """A folder of results: raw runs in ``runs``, which may be deleted, and one table a figure beside it."""

    folder: Path

    @property
    def runs(self) -> Path:
        """Results of stacked runs, or a run folder for each run of a grid."""
        return self.folder / "runs"

    @property
    def singles(self) -> Path:
        """Results of runs that the ordinary trainer made."""
        return self.folder / "runs" / "single"

    def table(self, name: str) -> Path:
        """A figure's curves."""
        return self.folder / f"{name}.csv.gz"

    def words(self, name: str) -> Path:
        """A figure's numbers in words."""
        return self.folder / f"{name}.md"


def train_all(
    suite: Suite,
    figures: Sequence[Figure],
    place: Place,
    *,
    launcher: Launcher = "local",
    processes: int | None = 1,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> bool:
    """Train every run that figures need and that is not there yet.

    Args:
        suite: tasks and hyperparameters.
        figures: what is wanted.
        place: where results are kept.
        launcher: of suites that are not stacked: that of :func:`anybatch.grid.runner.run_grid`, or ``here``, one after
            another in this process.
        processes: runs, or stacks, at the same time; None as many as a Ray cluster has room for.
        on_done: called with finished and all runs.

    Returns:
        Whether all are there now; not so after ``print``, or where runs failed or were stopped.
    """
    jobs = work_of(suite, figures).jobs
    if suite.stacked:
        stacked, single = ([(c, s) for c, s in jobs if c.single == kind] for kind in (False, True))
        for chosen, folder, how in ((stacked, place.runs, "vectorized"), (single, place.singles, "single")):
            if chosen:
                configs, seeds = [cell.config for cell, _ in chosen], [seed for _, seed in chosen]
                launch(configs, seeds, folder, launcher=how, processes=processes or 1, on_done=on_done)  # type: ignore[arg-type]
        return True
    named = [Job(cell.config, seed, f"{cell.variant} {cell.task} {cell.x}") for cell, seed in jobs]
    if not named:
        return True
    if launcher == "here":
        for done, job in enumerate(named):
            on_done(done, len(named))
            if not _train_here(job, place):
                return False
        on_done(len(named), len(named))
        return True
    outcomes = run_grid(named, place.runs, launcher=launcher, processes=processes).outcomes
    return all(outcome.status == "done" or _diverged(outcome) for outcome in outcomes)


def _diverged(outcome: Outcome) -> bool:
    """Whether a run ended because its numbers were no longer finite: a result too."""
    return outcome.status == "failed" and "not finite" in outcome.error


def _train_here(job: Job, place: Place) -> bool:
    """Whether the run has ended, rather than been stopped."""
    with contextlib.suppress(DivergenceError):  # the curve ends there
        return not go_on(job.config, place.runs / job.address, job.seed, quiet=True).interrupted
    return True


def is_done(suite: Suite, cell: Cell, seed: int, place: Place) -> bool:
    """Whether a run has its result."""
    if suite.stacked:
        return result_path(place.singles if cell.single else place.runs, cell.config, seed).exists()
    return finished(place.runs / Job(cell.config, seed).address, cell.config)


def gather(suite: Suite, figure: Figure, place: Place) -> Results:
    """A figure's curves from its runs.

    Raises:
        AnybatchError: a run is missing.
    """
    curves: dict[Key, Curve] = {}
    for cell in figure.cells(suite):
        seeds = job_seeds(suite, figure.name, cell)
        column = "noise_scale_adam" if cell.variant == NOISE else figure.column
        rows, bad = [], []
        for seed in seeds:
            columns, diverged = _columns(suite, cell, seed, place)
            rows.append(curve_of(columns, cell.config, column, suite.points, diverged=diverged))
            bad.append(diverged)
        length = max(len(row) for row in rows)
        values = np.array([np.pad(row, (0, length - len(row)), constant_values=math.nan) for row in rows])
        curves[cell.variant, cell.task, cell.x] = Curve(seeds, cell.config.total_env_steps, values, tuple(bad))
    return Results(curves)


def _columns(suite: Suite, cell: Cell, seed: int, place: Place) -> tuple[dict[str, Array], bool]:
    if suite.stacked:
        path = result_path(place.singles if cell.single else place.runs, cell.config, seed)
        if not path.exists():
            raise AnybatchError(f"a run of {cell.variant} on {cell.task} at {cell.x} is missing; run the figure first")
        result = read_result(path)
        return result.columns, result.diverged
    folder = place.runs / Job(cell.config, seed).address
    progress = folder / PROGRESS
    table = read_progress(progress) if progress.exists() else {}
    columns = {name: np.array(values) for name, values in table.items()}
    return columns, not finished(folder, cell.config)


def curve_of(columns: dict[str, Array], config: TrainConfig, column: str, points: int, *, diverged: bool) -> Array:
    """The points of one run: means over equal parts of training, or unsmoothed values of another column.

    Returns are means over the episodes that ended in a part, where they were counted, else over the curve of the last
    400 episodes that the published curves show. What a diverged run did not live to see is NaN.
    """
    steps = columns.get("env_steps", np.zeros(0))
    edges = np.linspace(0, config.total_env_steps, points + 1)
    if len(steps) == 0:
        return np.full(points, math.nan)
    if column == "return" and "episode_return_sum" in columns:
        values = mean_between(edges, steps, columns["episodes"], columns["episode_return_sum"])
    elif column == "return":
        values = mean_of_line(edges, steps, columns[_RETURN])
    elif column.startswith("noise_scale"):
        values = mean_of_line(edges, steps, columns[column])
    else:
        kept = np.unique(np.round(np.linspace(0, len(steps) - 1, min(_UNSMOOTHED, len(steps)))).astype(int))
        return columns[column][kept]
    if diverged:
        values = np.where(edges[1:] > steps[-1], math.nan, values)
    return values


def make_table(suite: Suite, figure: Figure, place: Place) -> None:
    """Write a figure's curves, or measure them."""
    if figure.measure is not None:
        write_results(place.table(figure.name), figure.measure(suite))
    elif figure.own:
        write_results(place.table(figure.name), gather(suite, figure, place))


def results_of(figure: Figure, place: Place, by_name: dict[str, Figure]) -> Results:
    """A figure's curves and those of the figures that it reads, from their tables."""
    results = Results()
    for name in (*figure.reads, figure.name):
        if by_name[name].own:
            results = results.joined(read_results(place.table(name)))
    return results


def draw_figure(suite: Suite, figure: Figure, place: Place, by_name: dict[str, Figure]) -> list[Path]:
    """Draw a figure from its tables, and write its numbers in words beside it."""
    if not place.folder.is_dir():
        raise ConfigError(f"out is {str(place.folder)!r}, which does not exist; run the figure first")
    results = results_of(figure, place, by_name)
    paths = figure.draw(suite, results, place.folder)
    place.words(figure.name).write_text("\n\n".join(figure.summary(suite, results)) + "\n")
    return paths
