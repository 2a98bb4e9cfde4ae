"""Train many runs in one call: those of equal shape as stacks, or one by one; finished runs are skipped."""

from __future__ import annotations

import functools
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from anybatch.config.schema import TrainConfig
from anybatch.config.validation import check_integer
from anybatch.errors import AnybatchError, ConfigError, DivergenceError, Interrupted
from anybatch.reproduce.evaluations import Evaluations
from anybatch.reproduce.stacked.results import read_result, result_path, write_result
from anybatch.reproduce.stacked.shapes import shape_key
from anybatch.reproduce.stacked.stack import RunResult, run_stacked
from anybatch.runs.files import PROGRESS
from anybatch.runs.progress import read_progress
from anybatch.sampling.replay import kept_iterations
from anybatch.system.processes import end_with_parent
from anybatch.training import train

Run = tuple[TrainConfig, int]
"""A configuration and a seed."""

MAX_RUNS = 256
"""Largest stack: with more runs a gradient step is bound by arithmetic, and stacking saves nothing."""
MAX_SAMPLES = 1 << 20
"""Most samples that a stack keeps at a time: about a gigabyte with small observations."""


def launch(
    configs: Sequence[TrainConfig],
    seeds: Sequence[int],
    folder: str | Path,
    *,
    launcher: Literal["vectorized", "single"] = "vectorized",
    rows: int | None = 200,
    processes: int = 1,
    evaluations: Evaluations | None = None,
    statistics: bool = False,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> list[RunResult]:
    """Train runs and write the result of each to ``folder``; runs that already have a result are not trained again.

    Args:
        configs: what to train, one for each run; equal runs are trained once.
        seeds: their seeds, as many.
        folder: of the results, see :func:`~anybatch.reproduce.stacked.results.write_result`.
        launcher: ``vectorized`` stacks runs that differ in numbers alone; ``single`` calls
            :func:`anybatch.training.train` for each, which offers everything.
        rows: about how many rows to keep of each new run; None keeps every iteration.
        processes: number of processes, each of which trains a stack or a single run with one thread.
        evaluations: evaluate the policies during training, see :func:`~anybatch.reproduce.stacked.stack.run_stacked`;
            with ``vectorized`` alone.
        statistics: also keep the columns about the policy update, likewise; a single run has them anyway. They are not
            part of a result's name, so results with and without them need different folders.
        on_done: called with the numbers of finished runs and of all runs, at first with the runs that have a result.

    Returns:
        The results, in the order of the arguments.

    Raises:
        ConfigError: a run makes no sense, or cannot be stacked.
        EnvError: an environment cannot be made, or failed; AnybatchError: a process was killed.
        Interrupted: a single run was stopped, by a signal; it leaves no result.
    """
    if len(configs) != len(seeds):
        raise ConfigError(f"a launch needs as many seeds as configurations, not {len(seeds)} for {len(configs)}")
    _check(configs, launcher, rows, processes, evaluations)
    folder = Path(folder)
    paths = [result_path(folder, *run, evaluations) for run in zip(configs, seeds, strict=True)]
    runs = dict(zip(paths, zip(configs, seeds, strict=True), strict=True))
    missing = [run for path, run in runs.items() if not path.exists()]
    total, done = len(runs), len(runs) - len(missing)
    on_done(done, total)
    work = stacks(missing) if launcher == "vectorized" else [[run] for run in missing]
    train_stack = functools.partial(
        _train, launcher=launcher, folder=folder, rows=rows, evaluations=evaluations, statistics=statistics
    )
    for finished in _work(work, train_stack, processes):
        done += finished
        on_done(done, total)
    return [read_result(path) for path in paths]


def _check(
    configs: Sequence[TrainConfig], launcher: str, rows: int | None, processes: int, evaluations: Evaluations | None
) -> None:
    """Raise ConfigError for arguments of :func:`launch` that make no sense."""
    check_integer("processes", processes, at_least=1)
    if rows is not None:
        check_integer("rows", rows, at_least=1)
    if launcher not in ("vectorized", "single"):
        raise ConfigError(f"launcher is {launcher!r}, but must be vectorized or single")
    if evaluations is not None and launcher == "single":
        raise ConfigError("evaluations need launcher vectorized; a single run has eval.every")
    if launcher == "single" and len({config.precision for config in configs}) > 1:
        raise ConfigError(
            "the precision is not part of a result's name: launch runs with another precision in another folder"
        )


def stacks(runs: Sequence[Run], max_runs: int = MAX_RUNS, max_samples: int = MAX_SAMPLES) -> list[list[Run]]:
    """Split runs into stacks of one shape, of about equal width, and within the bounds; the longest first.

    ``max_samples`` bounds the samples that a stack keeps at a time, except for a stack of one run.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(shape_key(run[0]), []).append(run)
    split = []
    for group in groups.values():
        widest = max(1, min(max_runs, max_samples // max(kept_samples(config) for config, _ in group)))
        count = math.ceil(len(group) / widest)
        split += [group[i::count] for i in range(count)]
    return sorted(split, key=lambda stack: -len(stack) * stack[0][0].total_env_steps)


def kept_samples(config: TrainConfig) -> int:
    """Samples that a run keeps at a time: of this iteration, delayed rollouts, passes to come, and a policy phase."""
    source, aux = config.rollout.source, config.aux
    iterations = 1 + (source.delay if source.kind == "delayed" else 0) + kept_iterations(config.optimizer)
    if aux.enabled and aux.epochs:
        iterations += aux.policy_iterations
    return iterations * config.iteration_batch


def _work(work: Sequence[Sequence[Run]], train_stack: Callable[[Sequence[Run]], int], processes: int) -> Iterator[int]:
    """Train stacks and yield the number of runs of each when it is done."""
    if processes == 1 or len(work) < 2:
        yield from map(train_stack, work)
        return
    # spawned, not forked: EnvPool and torch have threads
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_start_process) as pool:
        pending = [pool.submit(train_stack, stack) for stack in work]
        try:
            for future in as_completed(pending):
                yield future.result()
        except BrokenProcessPool as error:
            raise AnybatchError(
                "a process that trained runs was killed, perhaps because memory is short: train with fewer processes"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    torch.set_num_threads(1)
    end_with_parent()  # a killed parent gives no more work, and leaves nobody to keep the results


def _train(
    stack: Sequence[Run],
    launcher: str,
    folder: Path,
    rows: int | None,
    evaluations: Evaluations | None,
    statistics: bool,
) -> int:
    configs, seeds = zip(*stack, strict=True)
    if launcher == "vectorized":
        results = run_stacked(configs, seeds, rows=rows, evaluations=evaluations, statistics=statistics)
    else:
        results = [_single(*stack[0], rows)]
    for result in results:
        write_result(folder, result, evaluations)
    return len(results)


def _single(config: TrainConfig, seed: int, rows: int | None) -> RunResult:
    quiet = replace(config, log=replace(config.log, tensorboard=False, wandb=False))
    with tempfile.TemporaryDirectory() as folder:
        out, diverged = Path(folder) / "run", False
        try:
            if train(quiet, out, seed=seed, quiet=True).interrupted:  # a part of a run is no result
                raise Interrupted
        except DivergenceError:
            diverged = True
        progress = out / PROGRESS
        table = read_progress(progress) if progress.exists() else {}
    columns = {name: np.array(values) for name, values in table.items()}
    iterations = len(columns.get("iteration", ()))
    every = 1 if rows is None else max(1, math.ceil(iterations / rows))
    kept = sorted({*range(every - 1, iterations, every), *range(iterations - 1, iterations)})
    return RunResult(config, seed, {name: values[kept] for name, values in columns.items()}, diverged)
