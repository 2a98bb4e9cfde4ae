"""``anybatch reproduce``: the paper's figures and tables."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from anybatch.errors import ConfigError
from anybatch.system.exit_codes import INTERRUPTED
from anybatch.system.start_up import exit_on_signals

if TYPE_CHECKING:
    from anybatch.reproduce.results import ResultsFolder
    from anybatch.reproduce.suites.suite import Figure, Suite


_CONTINUE = "not all runs are done; to continue, repeat the command"


@dataclass(frozen=True, kw_only=True)
class SuiteArguments:
    """A suite and the folder of its results."""

    suite: Literal["laptop", "ladder", "mujoco", "procgen"] = "laptop"
    """laptop: every figure on small tasks; ladder: all batch sizes on many small tasks; mujoco: all batch sizes on
    four MuJoCo tasks; procgen: the paper's runs."""
    budget: Literal["smoke", "quick", "full"] = "full"
    """full; quick: fewer seeds and ablations (ladder); smoke: a few steps of everything, as a check."""
    games: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK...")] = ()
    """Only these tasks."""
    out: Path | None = None
    """Folder of the results; by default runs/reproduce-SUITE, with -BUDGET unless that is full."""

    def chosen(self) -> Suite:
        """Suite, restricted to the selection."""
        from anybatch.reproduce.registry import SUITES
        from anybatch.reproduce.suites.suite import cut

        if (self.suite, self.budget) not in SUITES:
            budgets = " or ".join(budget for suite, budget in SUITES if suite == self.suite)
            raise ConfigError(f"budget is {self.budget}, but suite {self.suite} has {budgets}")
        return cut(SUITES[self.suite, self.budget](), self.games, None, None)

    def results(self) -> ResultsFolder:
        """Folder of the results."""
        from anybatch.reproduce.manifest import check_suite
        from anybatch.reproduce.results import ResultsFolder

        ending = "" if self.budget == "full" else f"-{self.budget}"
        path = (self.out or Path("runs") / f"reproduce-{self.suite}{ending}").expanduser()
        if path.exists() and not path.is_dir():
            raise ConfigError(f"out is {str(path)!r}, which is a file, but must be a folder")
        check_suite(path, self.suite)
        return ResultsFolder(path)


@dataclass(frozen=True, kw_only=True)
class StatusArguments(SuiteArguments):
    """Print how many runs of each figure are done."""

    seeds: int | None = None
    """Repetitions of every run; by default that of the figure."""
    steps: int | None = None
    """Environment steps of every run."""

    def chosen(self) -> Suite:
        """Suite, restricted to the selection."""
        from anybatch.reproduce.suites.suite import cut

        return cut(super().chosen(), (), self.seeds, self.steps)


@dataclass(frozen=True, kw_only=True)
class DrawArguments(SuiteArguments):
    """Draw the figures again from the tables."""

    figure: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """all, or a name from `anybatch reproduce list`."""


@dataclass(frozen=True, kw_only=True)
class RunArguments(DrawArguments, StatusArguments):
    """Train the missing runs, then write tables and figures."""

    dry_run: bool = False
    """Only print an estimate of the work."""
    steps_per_second: float = 27_300.0  # estimate.MEASURED_STEPS_PER_SECOND, which imports PyTorch
    """Environment steps per second of PPO on Procgen on a GPU, for the GPU-hours of --dry-run; as on one H200."""
    launcher: Literal["local", "ray", "print", "here"] = "local"
    """For Procgen: processes on this machine, a Ray cluster, print the commands, or train in this process (here)."""
    processes: int | None = None
    """Maximum number of runs, or stacks of runs, at once; by default one per core."""


@dataclass(frozen=True)
class ListArguments:
    """List the figures and tables, and their places in the paper."""


Arguments = (
    Annotated[ListArguments, tyro.conf.subcommand("list")]
    | Annotated[RunArguments, tyro.conf.subcommand("run")]
    | Annotated[StatusArguments, tyro.conf.subcommand("status")]
    | Annotated[DrawArguments, tyro.conf.subcommand("draw")]
)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    names = ("list", "run", "status", "draw")
    if not arguments or arguments[0] not in (*names, "-h", "--help"):
        given = f", not {arguments[0]!r}" if arguments else ""
        raise ConfigError(f"anybatch reproduce needs one of {', '.join(names)}{given}")
    about = "Reproduce the paper's figures and tables."
    match tyro.cli(Arguments, args=arguments, prog="anybatch reproduce", description=about):
        case RunArguments() as parsed:
            return _run(parsed, arguments)
        case DrawArguments() as parsed:
            suite = parsed.chosen()
            figures = _figures(suite, parsed)
            _draw(suite, figures if parsed.figure == "all" else figures[-1:], parsed.results())
        case StatusArguments() as parsed:
            _print_status(parsed.chosen(), parsed.results())
        case _:
            from anybatch.reproduce.registry import listing

            print(listing())
    return 0


def _run(parsed: RunArguments, arguments: list[str]) -> int:
    suite, folder = parsed.chosen(), parsed.results()
    figures = _figures(suite, parsed)
    if parsed.processes is not None and parsed.processes < 1:
        raise ConfigError(f"processes is {parsed.processes}, but must be at least 1")
    if suite.stacked and parsed.launcher != "local":
        raise ConfigError(f"launcher is {parsed.launcher}, but the suite {suite.name} trains on this machine: local")
    if parsed.dry_run:
        return _dry_run(suite, figures, parsed)
    from anybatch.reproduce.manifest import add_command
    from anybatch.reproduce.report import write_report
    from anybatch.reproduce.run import check_tables, is_done, train_all, write_table
    from anybatch.reproduce.suites.suite import required_runs

    check_tables(suite, figures, folder)

    if suite.stacked:  # stacks that are being trained are abandoned
        exit_on_signals(_CONTINUE)
    began = time.monotonic()
    trained = sum(not is_done(suite, group, seed, folder) for group, seed in required_runs(suite, figures))
    try:
        code = train_all(
            suite,
            figures,
            folder,
            launcher=parsed.launcher,
            processes=parsed.processes or (None if parsed.launcher == "ray" else os.cpu_count() or 1),
            on_done=lambda done, total: print(f"{done} of {total} runs, {time.monotonic() - began:.0f} s", flush=True),
        )
    except KeyboardInterrupt:
        print(_CONTINUE, file=sys.stderr)
        raise
    if parsed.launcher == "print":
        return 0
    if code:
        failed = f"runs failed, see log.txt in their folders in {folder.runs}; {_CONTINUE}"
        print(_CONTINUE if code == INTERRUPTED else failed, file=sys.stderr)
        return code
    for figure in figures:
        write_table(suite, figure, folder)
    add_command(folder.path, suite, figures, ["reproduce", *arguments], trained, time.monotonic() - began)
    _draw(suite, figures, folder)
    print(f"report: {write_report([folder.path])}")
    return 0


def _dry_run(suite: Suite, figures: list[Figure], parsed: RunArguments) -> int:
    from anybatch.reproduce.estimate import estimate, table

    if not 0 < parsed.steps_per_second < math.inf:
        raise ConfigError(f"steps-per-second is {parsed.steps_per_second}, but must be above 0 and finite")
    print(f"{suite.name}: {suite.about}")
    print(table(suite, figures, parsed.steps_per_second))
    if suite.stacked:
        if parsed.figure == "all" and suite.duration:
            print(f"on two cores: {suite.duration}")
        return 0
    total = estimate(suite, figures, parsed.steps_per_second)
    print(
        f"GPU-hours: {parsed.steps_per_second:,.0f} environment steps per second of PPO with 256 environments on one "
        "GPU (--steps-per-second; by default measured on an H200), more for algorithms with more network passes and "
        "for smaller batches, by the rates measured there.\nDuring training, a run of PPG stores up to "
        f"{total.phase_gb:,.0f} GB of observations in memory or on disk."
    )
    return 0


def _figures(suite: Suite, parsed: DrawArguments) -> list[Figure]:
    """A figure with those that it reads, or all; without figures for which the suite has no tasks."""
    from anybatch.reproduce.registry import figures_of

    asked, name = figures_of(parsed.figure), parsed.figure
    lacking = f"suite {suite.name} has no task for" if not parsed.games else "none of the chosen games is a task of"
    kept = [figure for figure in asked if figure.tasks(suite)]
    if not kept or (name != "all" and asked[-1] not in kept):
        raise ConfigError(f"{lacking} {name}")
    if left_out := [figure.name for figure in asked if figure not in kept]:
        print(f"left out, because {lacking} them: {', '.join(left_out)}", file=sys.stderr)
    return kept


def _draw(suite: Suite, figures: list[Figure], folder: ResultsFolder) -> None:
    from anybatch.reproduce.run import draw_figure, write_claims

    for figure in figures:
        for path in draw_figure(suite, figure, folder):
            print(path)
    print(write_claims(suite, folder))


def _print_status(suite: Suite, folder: ResultsFolder) -> None:
    from anybatch.reproduce.registry import FIGURES
    from anybatch.reproduce.run import is_done
    from anybatch.reproduce.suites.suite import required_runs

    for figure in FIGURES.values():
        if figure.tasks(suite):
            runs = required_runs(suite, [figure])
            done = sum(is_done(suite, group, seed, folder) for group, seed in runs)
            drawn = "table" if folder.table(figure.name).exists() else "no table"
            print(f"{figure.name:15} {done:5} of {len(runs):5} runs, {drawn}")
