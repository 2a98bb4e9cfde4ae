"""Grids: many runs from a list, with a bound on how many train at once, each in a folder that its content names.

A job is a configuration and a seed. Its folder's name holds a hash of both and of the version of anybatch, so what is
there is either this very run, finished or to be gone on with, or nothing; results of different configurations cannot
mix. Every launcher runs the same command, ``anybatch train FILE --go-on``, in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from anybatch._version import __version__
from anybatch.config.io import to_dict, to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError
from anybatch.system.atomic_files import write_text
from anybatch.system.signals import Interrupted, Interrupts

JOB, LOG, INDEX = "job.yaml", "log.txt", "grid.csv"
_POLL_SECONDS = 0.2
_BAD_INPUT = 2  # exit code; trying again would not help

Status: TypeAlias = Literal["waiting", "running", "done", "failed", "interrupted"]
"""How far a job is."""
LauncherName: TypeAlias = Literal["local", "ray", "print"]
"""Where jobs run."""


@dataclass(frozen=True)
class Job:
    """One run of a grid."""

    config: TrainConfig
    seed: int = 0
    """The run's seed."""
    name: str = ""
    """For the table only; what a run is, and where it is kept, depends on the configuration and the seed alone."""

    @property
    def address(self) -> str:
        """Name of the run's folder: environment and seed for people, then what makes it unique."""
        content = json.dumps([__version__, self.seed, to_dict(self.config)], sort_keys=True)
        env = re.sub(r"[^A-Za-z0-9.]+", "-", self.config.env.id.split(":")[-1]).strip("-")
        return f"{env}-seed{self.seed}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    @property
    def label(self) -> str:
        """What the table calls it."""
        return f"{self.name} seed {self.seed}" if self.name else self.address


@dataclass
class Outcome:
    """A job, where its run is, and how far it has come."""

    job: Job
    folder: Path
    """The run folder: progress.csv, checkpoints, and log.txt with what the run printed."""
    status: Status = "waiting"
    """How far the job is."""
    starts: int = 0
    """How often it was started by this call; 0 if it was done before."""
    error: str = ""
    """Why it failed: the last line that it printed, and the exit code."""

    @property
    def command(self) -> list[str]:
        """Arguments of ``anybatch`` that train the run, go on with it, or do nothing if it is done."""
        file = str(self.folder / JOB)
        return ["train", file, "--seed", str(self.job.seed), "--out", str(self.folder), "--go-on", "--quiet"]


@dataclass(frozen=True)
class GridResult:
    """How a grid ended."""

    outcomes: list[Outcome] = field(default_factory=list)
    """One for each different job, in the order of the list."""

    @property
    def exit_code(self) -> int:
        """0 all done, 1 some failed, 130 interrupted (the same call goes on)."""
        found = {outcome.status for outcome in self.outcomes}
        return 1 if "failed" in found else 130 if found - {"done"} else 0


class Running(Protocol):
    """A run that was started."""

    def exit_code(self) -> int | None:
        """Of ``anybatch train``, or minus the signal that ended it; None while it runs."""

    def stop(self) -> None:
        """Ask it to write a checkpoint and end."""

    def kill(self) -> None:
        """End it at once."""


class Launcher(Protocol):
    """Starts runs somewhere."""

    processes: int
    """Most runs at once."""

    def start(self, outcome: Outcome, slot: int) -> Running:
        """Start a job; ``slot`` is a number below ``processes`` that no other running job has."""

    def close(self) -> None:
        """Free what was opened."""


class Display(Protocol):
    """Shows how a grid is doing."""

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Called several times a second."""

    def close(self, outcomes: Sequence[Outcome]) -> None:
        """The grid has ended."""


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
    """Train every job of a list; what is done is skipped, what was interrupted goes on.

    Ctrl-C and SIGTERM stop the runs with a checkpoint each; the same call goes on later. A run that fails or is killed
    is started again from its newest checkpoint, at most ``restarts`` times, unless its configuration is at fault.

    Args:
        jobs: what to train; pairs of a configuration and a seed will do. Repetitions count once.
        folder: holds one run folder a job, and ``grid.csv``, which lists them. With Ray on several machines it must be
            on a file system that they share.
        launcher: ``local`` processes, ``ray``, or ``print``: one shell command a line on standard output, nothing run.
        processes: most runs at once; by default one a core, or what the Ray cluster has room for.
        restarts: how often each run may be started again.
        address: of the Ray cluster; by default RAY_ADDRESS, or Ray on this machine.
        quiet: show nothing.

    Returns:
        One outcome a job; a run that failed does not raise.

    Raises:
        ConfigError: a job's configuration makes no sense, or another argument does not.
        AnybatchError: Ray is not installed.
    """
    outcomes = plan(jobs, folder)
    if launcher == "print":
        from anybatch.grid.launchers import shell_command

        for outcome in outcomes:
            if outcome.status != "done":
                print(shell_command(outcome), flush=True)
        return GridResult(outcomes)
    from anybatch.grid.launchers import make_launcher
    from anybatch.grid.table import make_display

    if restarts < 0:
        raise ConfigError(f"restarts is {restarts}, but must be at least 0")
    if all(outcome.status == "done" for outcome in outcomes):
        _finish(outcomes, Path(folder), make_display(outcomes, quiet=quiet))
        return GridResult(outcomes)
    started = make_launcher(launcher, processes, address)
    display = make_display(outcomes, quiet=quiet)
    try:
        _run(outcomes, started, display, restarts)
    finally:
        started.close()
        _finish(outcomes, Path(folder), display)
    return GridResult(outcomes)


def plan(jobs: Iterable[Job | tuple[TrainConfig, int]], folder: str | Path) -> list[Outcome]:
    """Make the run folders of a grid with a job file each, and see which runs are done.

    Raises:
        ConfigError: a job makes no sense, or a folder cannot be written.
    """
    from anybatch.grid.job import finished

    distinct = {job.address: job for job in (j if isinstance(j, Job) else Job(*j) for j in jobs)}
    if not distinct:
        raise ConfigError("the grid has no jobs")
    for job in distinct.values():
        if job.seed < 0:
            raise ConfigError(f"seed is {job.seed}, but must be at least 0")
        validate(job.config)
    outcomes = [Outcome(job, Path(folder).absolute() / address) for address, job in distinct.items()]
    for outcome in outcomes:
        path = outcome.folder / JOB
        if not path.exists():
            try:
                outcome.folder.mkdir(parents=True, exist_ok=True)
                write_text(path, to_yaml(outcome.job.config, anybatch=__version__, seed=outcome.job.seed))
            except OSError as error:
                raise ConfigError(
                    f"the grid's folder is {str(folder)!r}, which cannot be written: {error.strerror}"
                ) from error
        if finished(outcome.folder, outcome.job.config):
            outcome.status = "done"
    _write_index(outcomes, Path(folder))
    return outcomes


def _run(outcomes: Sequence[Outcome], launcher: Launcher, display: Display, restarts: int) -> None:
    waiting = deque(outcome for outcome in outcomes if outcome.status != "done")
    running: dict[int, tuple[Outcome, Running]] = {}
    stopping = False
    with Interrupts(patience=60.0) as interrupts:
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
                if code is None:
                    continue
                del running[slot]
                _judge(outcome, code, may_restart=outcome.starts <= restarts, stopping=stopping)
                if outcome.status == "waiting":
                    waiting.append(outcome)
            display.update(outcomes)
            try:
                interrupts.check()
            except Interrupted:  # a second signal, or a run that does not end: its last checkpoint stays
                for _, run in running.values():
                    run.kill()
    for outcome in waiting:
        outcome.status = "interrupted"


def _judge(outcome: Outcome, code: int, *, may_restart: bool, stopping: bool) -> None:
    """What a run's end means."""
    if code == 0:
        outcome.status, outcome.error = "done", ""
    elif stopping:
        outcome.status = "interrupted"
    else:
        outcome.status = "waiting" if may_restart and code != _BAD_INPUT else "failed"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        outcome.error = f"{last_line(outcome.folder / LOG)} ({how})"


def last_line(path: Path) -> str:
    """The last line with text in it, of the file's last 4 kB."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _finish(outcomes: Sequence[Outcome], folder: Path, display: Display) -> None:
    display.close(outcomes)
    _write_index(outcomes, folder)


def _write_index(outcomes: Sequence[Outcome], folder: Path) -> None:
    """List the runs of this call; for people, nothing reads it."""
    from anybatch.grid.job import last_row

    lines = ["folder,name,seed,status,env_steps,mean_episode_return"]
    for outcome in outcomes:
        row = last_row(outcome.folder)
        steps, score = row.get("env_steps", 0.0), row.get("mean_episode_return", math.nan)
        name = outcome.job.name.replace('"', '""')
        shown = "" if math.isnan(score) else repr(score)
        lines.append(f'{outcome.folder.name},"{name}",{outcome.job.seed},{outcome.status},{steps:.0f},{shown}')
    write_text(Path(folder) / INDEX, "\n".join(lines) + "\n")
