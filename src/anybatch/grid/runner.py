"""Train the jobs of a grid: skip finished runs, resume interrupted ones, restart failed ones, bound the concurrency.

A job's folder is named by a hash of its configuration, its seed and the version of anybatch. A folder therefore holds
exactly this run or nothing, and results of different configurations cannot mix. Every launcher runs the same command,
``anybatch train FILE --go-on``, in a separate process.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import shlex
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from anybatch._version import __version__
from anybatch.config.io import to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import check_integer, validate
from anybatch.envs.registry import check_importable
from anybatch.errors import ConfigError, shown
from anybatch.grid.display import Display, make_display
from anybatch.grid.job import JOB, LOG, GridResult, Job, Outcome
from anybatch.grid.launchers import LocalLauncher, RayLauncher, RayTask, make_launcher
from anybatch.grid.run_folder import ended, has_diverged, last_row
from anybatch.runs.owned import checked_folder, refuse_links
from anybatch.system.atomic_files import write_text
from anybatch.system.exit_codes import BAD_INPUT, FAILED
from anybatch.system.processes import ChildProcess
from anybatch.system.signals import Interrupts

_INDEX = "grid.csv"
_POLL_SECONDS = 0.2

LauncherName: TypeAlias = Literal["local", "ray", "print"]
"""Ways to run jobs."""


def run_grid(
    jobs: Iterable[Job | tuple[TrainConfig, int]],
    folder: str | Path,
    *,
    launcher: LauncherName = "local",
    processes: int | None = None,
    restarts: int = 2,
    address: str | None = None,
    quiet: bool = False,
) -> GridResult:
    """Train every job of a list; finished runs are skipped and interrupted ones resumed.

    Ctrl-C and SIGTERM stop the runs with a checkpoint each; the same call continues later. A run that fails, is killed
    or ends before its last environment step is restarted from its newest checkpoint, unless its configuration is wrong
    or it diverged.

    Args:
        jobs: jobs, or pairs of a configuration and a seed. Repeated jobs run once.
        folder: parent of the run folders; ``grid.csv`` in it lists them. For Ray on several machines it must be on a
            shared file system.
        launcher: ``local`` for processes on this machine, ``ray`` for tasks of a Ray cluster, or ``print`` to write one
            shell command per line to standard output and run nothing.
        processes: maximum number of simultaneous runs; by default one per core, or the capacity of the Ray cluster.
        restarts: maximum number of restarts of each run.
        address: address of the Ray cluster; by default RAY_ADDRESS, or a new Ray instance on this machine.
        quiet: show no progress.

    Returns:
        One outcome per job; a failed run does not raise.

    Raises:
        ConfigError: a job's configuration or another argument is invalid.
        AnybatchError: Ray is not installed.
    """
    restarts = check_integer("restarts", restarts, at_least=0)
    if processes is not None:
        processes = check_integer("processes", processes, at_least=1)
    folder = checked_folder("folder", folder)
    outcomes = plan(jobs, folder)
    pending = [outcome for outcome in outcomes if outcome.status != "done"]
    if launcher == "print":
        for outcome in pending:
            print(shlex.join(["anybatch", *outcome.command]), flush=True)
        return GridResult(outcomes)
    backend = make_launcher(launcher, processes, address) if pending else None
    display = make_display(outcomes, quiet=quiet)
    try:
        if backend is not None:
            with contextlib.closing(backend):
                _run_jobs(outcomes, backend, display, restarts)
    finally:
        display.close(outcomes)
        _write_index(outcomes, folder)
    return GridResult(outcomes)


def _job(job: Any) -> Job:
    if isinstance(job, Job):
        return job
    if not isinstance(job, tuple | list) or len(job) != 2 or not isinstance(job[0], TrainConfig):
        raise ConfigError(f"jobs contains {shown(job)}, but must contain pairs of a TrainConfig and a seed, or Jobs")
    return Job(*job)


def plan(jobs: Iterable[Job | tuple[TrainConfig, int]], folder: str | Path) -> list[Outcome]:
    """Create the run folders of a grid with a job file each, and mark finished runs as done.

    Raises:
        ConfigError: a job is invalid, or a folder cannot be written.
    """
    folder = checked_folder("folder", folder)
    given = [_job(job) for job in jobs]
    given = [replace(job, seed=check_integer("seed", job.seed, at_least=0)) for job in given]
    distinct = {job.folder_name: job for job in given}
    if not distinct:
        raise ConfigError("the grid has no jobs")
    for job in distinct.values():
        validate(job.config)
        check_importable(job.config.env.id, job.config.model.encoder, "the processes of a grid")
    outcomes = [Outcome(job, folder.absolute() / name) for name, job in distinct.items()]
    for outcome in outcomes:
        refuse_links(outcome.folder)
        path, job = outcome.folder / JOB, outcome.job
        text = to_yaml(job.config, anybatch=__version__, seed=job.seed)
        if not path.is_file() or path.read_bytes() != text.encode():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
            except OSError as error:
                reason = f"which cannot be written: {error.strerror}"
                raise ConfigError(f"the grid's folder is {str(folder)!r}, {reason}") from error
        if ended(outcome.folder, job.config):
            outcome.status = "done"
    _write_index(outcomes, folder)
    return outcomes


def _run_jobs(
    outcomes: Sequence[Outcome], launcher: LocalLauncher | RayLauncher, display: Display, restarts: int
) -> None:
    waiting = deque(outcome for outcome in outcomes if outcome.status != "done")
    running: dict[int, tuple[Outcome, ChildProcess | RayTask]] = {}
    stopping = False
    with Interrupts(patience=60.0) as interrupts:
        try:
            while running or (waiting and not stopping):
                if interrupts.requested and not stopping:
                    stopping = True
                    for _, run in running.values():
                        run.stop()
                while waiting and not stopping and len(running) < launcher.processes:
                    outcome = waiting.popleft()
                    slot = next(number for number in range(launcher.processes) if number not in running)
                    outcome.status, outcome.starts = "running", outcome.starts + 1
                    running[slot] = outcome, launcher.start(outcome, slot)
                time.sleep(_POLL_SECONDS)
                for slot, (outcome, run) in list(running.items()):
                    code = run.exit_code()
                    if code is not None:
                        del running[slot]
                        _record_end(outcome, code, may_restart=outcome.starts <= restarts, stopping=stopping)
                        waiting.extend([outcome] if outcome.status == "waiting" else [])
                display.update(outcomes)
                if interrupts.overdue:  # a second signal, or a run that does not stop; its last checkpoint remains
                    for _, run in running.values():
                        run.kill()
        finally:  # after an error in here no run is left behind
            for _, run in running.values():
                run.kill()
    for outcome in waiting:
        outcome.status = "interrupted"


def _record_end(outcome: Outcome, code: int, *, may_restart: bool, stopping: bool) -> None:
    """Set status and error after a run has ended with an exit code."""
    if code == 0 and ended(outcome.folder, outcome.job.config):
        outcome.status, outcome.error = "done", ""
    elif stopping:
        outcome.status = "interrupted"
    else:
        diverged = code == FAILED and has_diverged(outcome.folder)
        restart = may_restart and code != BAD_INPUT and not diverged  # else it would end in the same way
        outcome.status = "waiting" if restart else "diverged" if diverged else "failed"
        outcome.error = f"{_last_line(outcome.folder / LOG)} ({_describe_end(outcome, code)})"


def _describe_end(outcome: Outcome, code: int) -> str:
    if code == 0:
        steps = last_row(outcome.folder).get("env_steps", 0)
        return f"ended early, after {steps:,.0f} of {outcome.job.config.total_env_steps:,} environment steps"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _last_line(path: Path) -> str:
    """Last non-empty line in the last 4 kB of a file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _write_index(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write ``grid.csv``, a list of the runs for people; no code reads it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["folder", "name", "seed", "status", "env_steps", "mean_episode_return"])
    for outcome in outcomes:
        row = last_row(outcome.folder)
        score = row.get("mean_episode_return", math.nan)
        job, steps, shown = outcome.job, f"{row.get('env_steps', 0):.0f}", "" if math.isnan(score) else score
        writer.writerow([outcome.folder.name, job.name, job.seed, outcome.status, steps, shown])
    write_text(folder / _INDEX, text.getvalue())
