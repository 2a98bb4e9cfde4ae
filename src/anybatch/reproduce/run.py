"""Train the runs that figures need, stacked in this process or as a grid of processes, and collect their curves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from anybatch.errors import AnybatchError, ConfigError, DivergenceError
from anybatch.grid.job import Job
from anybatch.grid.run_folder import finished, has_diverged, train_or_resume
from anybatch.grid.runner import run_grid
from anybatch.reproduce.claims import as_markdown, claims_of
from anybatch.reproduce.figures.scaling_up import NOISE
from anybatch.reproduce.results import Curve, Key, Results, ResultsFolder, curve_points, read_results, write_results
from anybatch.reproduce.stacked import launch, read_result, result_path
from anybatch.reproduce.statistics import Array
from anybatch.reproduce.suites.suite import Figure, RunGroup, Suite, group_seeds, required_runs
from anybatch.runs.files import PROGRESS
from anybatch.runs.progress import read_progress
from anybatch.system.exit_codes import INTERRUPTED

Launcher = Literal["local", "ray", "print", "here"]
"""Launchers of :func:`anybatch.grid.runner.run_grid`, or one run after another in this process."""


def train_all(
    suite: Suite,
    figures: Sequence[Figure],
    folder: ResultsFolder,
    *,
    launcher: Launcher = "local",
    processes: int | None = 1,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Train every run that figures need and that has no result yet.

    Args:
        suite: tasks and hyperparameters.
        figures: figures to train for.
        folder: folder of the results.
        launcher: how to start the runs of a suite that is not stacked.
        processes: number of simultaneous runs, or stacks; None for the capacity of a Ray cluster.
        on_done: called with the number of finished runs and of all runs.

    Returns:
        The exit code: 0 if all results exist now, 1 if runs failed or were only printed, 130 if they were stopped.
    """
    required = required_runs(suite, figures)
    if suite.stacked:
        for single, path in ((False, folder.runs), (True, folder.single_runs)):
            if chosen := [(group.config, seed) for group, seed in required if group.single == single]:
                configs, seeds = zip(*chosen, strict=True)
                how: Literal["single", "vectorized"] = "single" if single else "vectorized"
                launch(
                    configs,
                    seeds,
                    path,
                    launcher=how,
                    processes=processes or 1,
                    evaluations=None if single else suite.evaluations,
                    on_done=on_done,
                )
        return 0
    jobs = [Job(group.config, seed, f"{group.variant} {group.task} {group.x}") for group, seed in required]
    jobs = [job for job in jobs if not has_diverged(folder.runs / job.folder_name)]
    if not jobs:
        return 0
    if launcher == "here":
        return _train_here(jobs, folder, on_done)
    result = run_grid(jobs, folder.runs, launcher=launcher, processes=processes)
    if launcher == "print":
        return 1
    # the curve of a diverged run ends there
    return 0 if {outcome.status for outcome in result.outcomes} <= {"done", "diverged"} else result.exit_code


def _train_here(jobs: Sequence[Job], folder: ResultsFolder, on_done: Callable[[int, int], None]) -> int:
    """Train one run after another; returns the exit code."""
    for done, job in enumerate(jobs):
        on_done(done, len(jobs))
        with contextlib.suppress(DivergenceError):  # the curve ends there
            if train_or_resume(job.config, folder.runs / job.folder_name, job.seed, quiet=True).interrupted:
                return INTERRUPTED
    on_done(len(jobs), len(jobs))
    return 0


def is_done(suite: Suite, group: RunGroup, seed: int, folder: ResultsFolder) -> bool:
    """Whether a run has its result."""
    path = _run_path(suite, group, seed, folder)
    return path.exists() if suite.stacked else finished(path, group.config) or has_diverged(path)


def _run_path(suite: Suite, group: RunGroup, seed: int, folder: ResultsFolder) -> Path:
    """File with the result of a stacked run, or the run folder of a job."""
    if suite.stacked:
        if group.single:
            return result_path(folder.single_runs, group.config, seed)
        return result_path(folder.runs, group.config, seed, suite.evaluations)
    return folder.runs / Job(group.config, seed).folder_name


def _run_columns(suite: Suite, group: RunGroup, seed: int, folder: ResultsFolder) -> tuple[dict[str, Array], bool]:
    """Columns of a run's progress, and whether it diverged."""
    path = _run_path(suite, group, seed, folder)
    if not is_done(suite, group, seed, folder):
        raise AnybatchError(f"a run of {group.variant} on {group.task} at {group.x} is missing; run the figure first")
    if suite.stacked:
        result = read_result(path)
        return result.columns, result.diverged
    table = read_progress(path / PROGRESS) if (path / PROGRESS).exists() else {}
    return {name: np.array(values) for name, values in table.items()}, has_diverged(path)


def collect_curves(suite: Suite, figure: Figure, folder: ResultsFolder) -> Results:
    """Read a figure's curves from its runs.

    Raises:
        AnybatchError: a run is missing.
    """
    curves: dict[Key, Curve] = {}
    for group in figure.runs(suite):
        seeds = group_seeds(suite, figure.name, group)
        column = "noise_scale_adam" if group.variant == NOISE else figure.column
        if column == "return" and suite.evaluations is not None:
            column = "eval_return"
        rows, diverged = [], []
        for seed in seeds:
            columns, bad = _run_columns(suite, group, seed, folder)
            rows.append(curve_points(columns, group.config, column, suite.points, diverged=bad))
            diverged.append(bad)
        length = max(len(row) for row in rows)
        values = np.array([np.pad(row, (0, length - len(row)), constant_values=math.nan) for row in rows])
        key = group.variant, group.task, group.x
        curves[key] = Curve(seeds, group.config.total_env_steps, values, tuple(diverged))
    return Results(curves)


def check_tables(suite: Suite, figures: Sequence[Figure], folder: ResultsFolder) -> None:
    """Raise ConfigError if the folder has a table with results that training these figures would replace by others."""
    for figure in figures:
        path = folder.table(figure.name)
        if figure.measure is not None or not figure.has_table or not path.exists():
            continue
        groups = {(group.variant, group.task, group.x): group for group in figure.runs(suite)}
        for (variant, task, x), curve in read_results(path).curves.items():
            group = groups.get((variant, task, x))
            if group is None or curve.env_steps != group.config.total_env_steps:
                wanted = "not asked for" if group is None else f"asked for with {group.config.total_env_steps:,}"
            elif lost := set(curve.seeds) - set(group_seeds(suite, figure.name, group)):
                wanted = f"asked for without {len(lost)} of its {len(curve.seeds)} seeds"
            else:
                continue
            raise ConfigError(
                f"{path} has {variant} on {task} at {x} with {curve.env_steps:,} environment steps, now {wanted}: "
                "choose another --out for other --games, --seeds, --steps or --budget"
            )


def write_table(suite: Suite, figure: Figure, folder: ResultsFolder) -> None:
    """Write a figure's table from its runs, or from its measurements."""
    if figure.measure is not None:
        write_results(folder.table(figure.name), figure.measure(suite))
    elif figure.has_table:
        write_results(folder.table(figure.name), collect_curves(suite, figure, folder))


def read_tables(figure: Figure, folder: ResultsFolder) -> Results:
    """Results of a figure and of the figures that it reads."""
    results = Results()
    there = (name for name in figure.reads_if_trained if folder.table(name).exists())
    for name in (*figure.reads, *there, *([figure.name] if figure.has_table else [])):
        results |= read_results(folder.table(name))
    return results


def draw_figure(suite: Suite, figure: Figure, folder: ResultsFolder) -> list[Path]:
    """Draw a figure from the tables, and write its numbers in words beside it."""
    if not folder.path.is_dir():
        raise ConfigError(f"out is {str(folder.path)!r}, which does not exist; run the figure first")
    results = read_tables(figure, folder)
    try:
        paths, words = figure.draw(suite, results, folder.path), figure.summary(suite, results)
    except (KeyError, IndexError, ValueError) as error:
        raise AnybatchError(
            f"the tables in {str(folder.path)!r} do not match {figure.name} ({type(error).__name__}: {error}): run it "
            "again"
        ) from error
    folder.summary(figure.name).write_text("\n\n".join(words) + "\n")
    return paths


def write_claims(suite: Suite, folder: ResultsFolder) -> Path:
    """Write ``claims.md`` beside the tables."""
    path = folder.summary("claims")
    path.write_text(as_markdown(claims_of(suite, folder)))
    return path
