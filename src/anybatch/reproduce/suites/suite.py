"""What the figures are drawn from: suites of tasks with their hyperparameters, and runs as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError

if TYPE_CHECKING:
    from anybatch.reproduce.results import Results

Configs: TypeAlias = Mapping[str, TrainConfig]
"""A configuration for each task."""


@dataclass(frozen=True)
class Cell:
    """Runs that differ in their seed alone: a curve of a figure."""

    variant: str
    """What was changed; :data:`anybatch.reproduce.style.LABELS` has the words."""
    task: str
    x: int
    """Place on the figure's ladder: what the batch is divided by, iterations of delay, or environments."""
    config: TrainConfig
    first_seed_only: bool = False
    """One run is enough."""
    single: bool = False
    """Needs the ordinary trainer, for columns that stacked runs do not have."""


@dataclass(frozen=True)
class Suite:
    """Tasks, their hyperparameters and how often everything is repeated.

    Every experiment says for itself which tasks it takes place on: the keys of its configurations, which are the strata
    of the tests.
    """

    name: str
    about: str
    labels: Mapping[str, str]
    """What a task is called in figures."""
    ranges: Mapping[str, tuple[float, float]]
    """Returns of a task that count as 0 and as 1."""
    invariance: Configs
    """At the default batch size, with the EWMA."""
    staleness: Configs
    """At no delay, with the decoupled objective."""
    algorithms: Mapping[str, Configs]
    """The four algorithms, by the name of their preset."""
    betas: tuple[str, ...]
    """Tasks of ``invariance`` on which Adam's decay rates are varied."""
    grid: str
    """The task of ``invariance`` for the grid of appendix G."""
    scaling_up: Configs
    divisors: tuple[int, ...]
    """The batch ladder c, from 1."""
    delays: tuple[int, ...]
    """Iterations of staleness, from 0."""
    grid_factors: tuple[int, ...]
    """What the centre of mass is divided by, and the KL coefficient multiplied with."""
    multiples: tuple[int, ...]
    """Environments of the scaling-up figure, as multiples of the default."""
    seeds: Mapping[str, int]
    """Repetitions by figure; ``default`` for those that are not named."""
    points: int
    """Points of a curve that are kept."""
    final_points: int
    """Points at the end whose mean is the final return."""
    stacked: bool
    """Runs are stacked in this process; else each is one of a grid of processes."""
    cost_rounds: int = 15
    """How often each algorithm is timed."""
    grid_steps: int | None = None
    """Environment steps of the grid, if they are not those of ``invariance``."""
    first_seeds: Mapping[str, int] = field(default_factory=lambda: {"default": 1000})
    """Seeds are multiples of this, by figure as for ``seeds``: far from those that hyperparameters were chosen on."""

    def seeds_of(self, figure: str) -> tuple[int, ...]:
        """The seeds of a figure's runs."""
        count = self.seeds.get(figure, self.seeds["default"])
        first = self.first_seeds.get(figure, self.first_seeds["default"])
        return tuple(first * (1 + k) for k in range(count))


@dataclass(frozen=True)
class Figure:
    """A figure or table: its runs, its picture, and what it shows in words."""

    name: str
    paper: str
    """Where it is in the paper."""
    about: str
    cells: Callable[[Suite], list[Cell]]
    draw: Callable[[Suite, Results, Path], list[Path]]
    """Writes pictures into a folder."""
    summary: Callable[[Suite, Results], list[str]]
    """Paragraphs and tables in Markdown, with the numbers."""
    reads: tuple[str, ...] = ()
    """Other figures whose results it reads besides its own."""
    column: str = "return"
    """The column that its curves show."""
    measure: Callable[[Suite], Results] | None = None
    """Makes its results without runs."""
    own: bool = True
    """Whether it has results of its own."""


@dataclass(frozen=True)
class Cut:
    """What is left out of a suite."""

    games: tuple[str, ...] = ()
    """Tasks to keep; all if empty."""
    seeds: int | None = None
    """Repetitions."""
    steps: int | None = None
    """Environment steps of every run."""


def cut(suite: Suite, what: Cut) -> Suite:
    """A suite of fewer tasks, repetitions or steps.

    Raises:
        ConfigError: a task that the suite does not have, or a number below 1.
    """
    for name in what.games:
        if name not in suite.labels:
            raise ConfigError(f"games is {name!r}, but must be among {', '.join(suite.labels)}")
    for option, number in (("seeds", what.seeds), ("steps", what.steps)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} is {number}, but must be at least 1")
    if what.games:
        suite = _keep(suite, what.games)
    if what.seeds is not None:
        suite = replace(suite, seeds={"default": what.seeds})
    if what.steps is not None:
        suite = change(suite, {"total_env_steps": what.steps})
        suite = replace(suite, grid_steps=None)
    return suite


def change(suite: Suite, changes: Mapping[str, Any]) -> Suite:
    """The suite with fields of all its configurations changed, as :func:`anybatch.config.io.override` does."""
    return each(suite, lambda config: override(config, changes))


def each(suite: Suite, function: Callable[[TrainConfig], TrainConfig]) -> Suite:
    """The suite with every configuration replaced by ``function`` of it."""

    def every(configs: Configs) -> Configs:
        return {task: function(config) for task, config in configs.items()}

    return replace(
        suite,
        invariance=every(suite.invariance),
        staleness=every(suite.staleness),
        algorithms={name: every(configs) for name, configs in suite.algorithms.items()},
        scaling_up=every(suite.scaling_up),
    )


def _keep(suite: Suite, tasks: Sequence[str]) -> Suite:
    def kept(configs: Configs) -> Configs:
        return {task: config for task, config in configs.items() if task in tasks}

    invariance = kept(suite.invariance)
    return replace(
        suite,
        invariance=invariance,
        staleness=kept(suite.staleness),
        algorithms={name: kept(configs) for name, configs in suite.algorithms.items()},
        scaling_up=kept(suite.scaling_up),
        # the paper varies these on one game; where that is left out, the first that is left takes its place
        betas=tuple(task for task in suite.betas if task in invariance) or tuple(invariance)[:1],
        grid=suite.grid if suite.grid in invariance or not invariance else next(iter(invariance)),
    )


def job_seeds(suite: Suite, figure: str, cell: Cell) -> tuple[int, ...]:
    """The seeds of a cell's runs in a figure."""
    seeds = suite.seeds_of(figure)
    return seeds[:1] if cell.first_seed_only else seeds


@dataclass(frozen=True)
class Work:
    """What has to be trained for some figures."""

    jobs: list[tuple[Cell, int]] = field(default_factory=list)
    """Cells with a seed, without repetitions of the same configuration and seed."""

    @property
    def env_steps(self) -> int:
        """Environment steps of all of them."""
        return sum(cell.config.total_env_steps for cell, _ in self.jobs)


def work_of(suite: Suite, figures: Sequence[Figure]) -> Work:
    """Every run that figures need, once."""
    found: dict[tuple[str, int, bool], tuple[Cell, int]] = {}
    for figure in figures:
        for cell in figure.cells(suite):
            for seed in job_seeds(suite, figure.name, cell):
                found.setdefault((repr(cell.config), seed, cell.single), (cell, seed))
    return Work(list(found.values()))
