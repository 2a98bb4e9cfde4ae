"""The commands ``anybatch reproduce`` and ``anybatch report``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from anybatch.errors import ConfigError

if TYPE_CHECKING:
    from anybatch.reproduce.results import ResultsFolder
    from anybatch.reproduce.suites.suite import Figure, Suite

_STEPS_PER_SECOND = 4000.0

_HELP = """usage: anybatch reproduce COMMAND ...

  list             the figures and tables, and where in the paper they are
  run NAME|all     train what is not trained yet, gather it, draw
  status           how much of everything is there
  draw NAME|all    draw again, from the tables

Every command explains its options with --help."""


@dataclass(frozen=True)
class Selection:
    """Which suite, how much of it, and where results are kept."""

    suite: Literal["laptop", "procgen"] = "laptop"
    """Small networks on small tasks, minutes on two cores; or the paper's runs on Procgen."""
    budget: Literal["smoke", "full"] = "full"
    """full, or hardly a step of everything to see that it runs."""
    games: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK...")] = ()
    """Only these tasks."""
    seeds: int | None = None
    """Repetitions of every run; by default the figure's own number."""
    steps: int | None = None
    """Environment steps of every run."""
    out: Path | None = None
    """Folder of the results; by default runs/reproduce-SUITE, or runs/reproduce-SUITE-smoke."""

    def chosen(self) -> Suite:
        """The suite."""
        from anybatch.reproduce.registry import SUITES
        from anybatch.reproduce.suites.suite import Cut, cut

        return cut(SUITES[self.suite, self.budget](), Cut(self.games, self.seeds, self.steps))

    def folder(self) -> ResultsFolder:
        """Folder of the results."""
        from anybatch.reproduce.results import ResultsFolder

        ending = "-smoke" if self.budget == "smoke" else ""
        return ResultsFolder(self.out or Path("runs") / f"reproduce-{self.suite}{ending}")


@dataclass(frozen=True)
class RunArguments:
    """Train what is not trained yet, gather it into tables, and draw; what was interrupted goes on."""

    figure: tyro.conf.Positional[str]
    """all, or a name from `anybatch reproduce list`."""
    selection: Annotated[Selection, tyro.conf.arg(name="")] = field(default_factory=Selection)
    dry_run: bool = False
    """Say what it would take, and do nothing."""
    steps_per_second: float = _STEPS_PER_SECOND
    """Environment steps a second at which a GPU trains PPO on Procgen: an assumption of --dry-run's GPU-hours."""
    launcher: Literal["local", "ray", "print", "here"] = "local"
    """For Procgen: processes here, a Ray cluster, commands on standard output, or one after another in this process."""
    processes: int | None = None
    """Runs, or stacks of runs, at the same time; by default one a core."""


@dataclass(frozen=True)
class DrawArguments:
    """Draw again, from the tables in the folder."""

    figure: tyro.conf.Positional[str]
    """all, or a name from `anybatch reproduce list`."""
    selection: Annotated[Selection, tyro.conf.arg(name="")] = field(default_factory=Selection)


@dataclass(frozen=True)
class StatusArguments:
    """How much of everything is there."""

    selection: Annotated[Selection, tyro.conf.arg(name="")] = field(default_factory=Selection)


def reproduce_command(arguments: list[str]) -> int:
    """``anybatch reproduce list | run | status | draw``."""
    commands: dict[str, Callable[[list[str]], int]] = {"list": _list, "run": _run, "status": _status, "draw": _draw}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if arguments else 2
    if arguments[0] not in commands:
        raise ConfigError(f"reproduce needs one of {', '.join(commands)}, not {arguments[0]!r}")
    return commands[arguments[0]](arguments[1:])


def _list(arguments: list[str]) -> int:
    if arguments:
        raise ConfigError(f"reproduce list takes no arguments, not {' '.join(arguments)}")
    from anybatch.reproduce.registry import listing

    print(listing())
    return 0


def _run(arguments: list[str]) -> int:
    parsed = tyro.cli(RunArguments, args=arguments, prog="anybatch reproduce run")
    suite, folder = parsed.selection.chosen(), parsed.selection.folder()
    figures = _figures(suite, parsed.figure)
    if parsed.dry_run:
        return _dry_run(suite, figures, parsed)
    from anybatch.reproduce.manifest import Command, add_command, processor_seconds
    from anybatch.reproduce.report import write_report
    from anybatch.reproduce.run import is_done, train_all, write_table
    from anybatch.reproduce.suites.suite import required_runs

    began = time.monotonic()
    trained = sum(not is_done(suite, cell, seed, folder) for cell, seed in required_runs(suite, figures))
    complete = train_all(
        suite,
        figures,
        folder,
        launcher=parsed.launcher,
        processes=parsed.processes or (None if parsed.launcher == "ray" else os.cpu_count() or 1),
        on_done=lambda done, total: _show(done, total, began),
    )
    if not complete:
        if parsed.launcher == "print":
            return 0
        print("not all runs are done; the same command goes on", file=sys.stderr)
        return 1
    for figure in figures:
        write_table(suite, figure, folder)
    command = Command(["reproduce", "run", *arguments], trained, time.monotonic() - began, processor_seconds())
    add_command(folder.path, command, suite, figures)
    _draw_all(suite, figures, folder)
    print(f"report: {write_report([folder.path])}")
    return 0


def _show(done: int, total: int, began: float) -> None:
    print(f"{done} of {total} runs, {time.monotonic() - began:.0f} s", flush=True)


def _dry_run(suite: Suite, figures: list[Figure], parsed: RunArguments) -> int:
    from anybatch.reproduce.estimate import estimate, table

    if parsed.steps_per_second <= 0:
        raise ConfigError(f"steps-per-second is {parsed.steps_per_second}, but must be above 0")
    print(f"{suite.name}: {suite.about}")
    print(table(suite, figures, parsed.steps_per_second))
    if suite.stacked:
        print("on two cores: minutes, see results/laptop")
        return 0
    total = estimate(suite, figures, parsed.steps_per_second)
    print(
        f"GPU-hours take {parsed.steps_per_second:,.0f} environment steps a second for PPO on one GPU "
        "(--steps-per-second), and more for the others as their passes are more; small batches are slower.\n"
        f"While it trains, a run of PPG also keeps up to {total.phase_gb:,.0f} GB of a phase's observations in memory "
        "or on disk."
    )
    return 0


def _draw(arguments: list[str]) -> int:
    parsed = tyro.cli(DrawArguments, args=arguments, prog="anybatch reproduce draw")
    suite = parsed.selection.chosen()
    figures = _figures(suite, parsed.figure)
    _draw_all(suite, figures if parsed.figure == "all" else figures[-1:], parsed.selection.folder())
    return 0


def _figures(suite: Suite, name: str) -> list[Figure]:
    """A figure with what it reads, or all, as far as the suite has tasks for them."""
    from anybatch.reproduce.registry import figures_of, with_tasks

    asked = figures_of(name)
    kept = with_tasks(suite, asked)
    if name != "all" and asked[-1] not in kept:
        raise ConfigError(f"games leaves no task for {name}: it has none of the named tasks")
    if left_out := [figure.name for figure in asked if figure not in kept]:
        print(f"no task among the games named, left out: {', '.join(left_out)}", file=sys.stderr)
    return kept


def _draw_all(suite: Suite, figures: list[Figure], folder: ResultsFolder) -> None:
    from anybatch.reproduce.registry import FIGURES
    from anybatch.reproduce.run import draw_figure, write_claims

    for figure in figures:
        for path in draw_figure(suite, figure, folder, FIGURES):
            print(path)
    print(write_claims(suite, folder))


def _status(arguments: list[str]) -> int:
    parsed = tyro.cli(StatusArguments, args=arguments, prog="anybatch reproduce status")
    from anybatch.reproduce.registry import FIGURES, with_tasks
    from anybatch.reproduce.run import is_done
    from anybatch.reproduce.suites.suite import required_runs

    suite, folder = parsed.selection.chosen(), parsed.selection.folder()
    for figure in with_tasks(suite, list(FIGURES.values())):
        jobs = required_runs(suite, [figure])
        done = sum(is_done(suite, cell, seed, folder) for cell, seed in jobs)
        drawn = "table" if folder.table(figure.name).exists() else "no table"
        print(f"{figure.name:15} {done:5} of {len(jobs):5} runs, {drawn}")
    return 0


@dataclass(frozen=True)
class ReportArguments:
    """One self-contained HTML page: figures, tables, commands, seeds, versions, machine."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders that `anybatch reproduce run` made, or run folders; by default runs/reproduce-laptop."""
    out: Path | None = None
    """File to write; by default report.html in the first folder."""


def report_command(arguments: list[str]) -> int:
    """``anybatch report [FOLDERS...]``."""
    parsed = tyro.cli(ReportArguments, args=arguments, prog="anybatch report")
    from anybatch.reproduce.report import write_report

    folders = list(parsed.folders) or [Path("runs") / "reproduce-laptop"]
    print(f"wrote {write_report(folders, parsed.out)}")
    return 0
