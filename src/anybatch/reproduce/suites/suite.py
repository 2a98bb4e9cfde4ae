"""Suites of tasks with their hyperparameters, and the runs that figures need, as data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.reproduce.evaluations import Evaluations

if TYPE_CHECKING:
    from anybatch.reproduce.results import Results

Configs: TypeAlias = Mapping[str, TrainConfig]
"""A configuration for each task."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    variant: str
    """Key of :data:`anybatch.reproduce.style.LABELS`."""
    task: str
    x: int
    """Position within the variant: divisor of the batch size, iterations of delay, or multiple of the environments."""
    config: TrainConfig
    first_seed_only: bool = False
    """One run is enough."""
    single: bool = False
    """Needs the ordinary trainer, for columns that stacked runs do not have."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks, their hyperparameters and the number of repetitions.

    The tasks of an experiment are the keys of its configurations; they are the strata of its tests. By default a suite
    has the batch ladder alone.
    """

    name: str
    about: str
    labels: Mapping[str, str]
    """Names of the tasks in figures."""
    ranges: Mapping[str, tuple[float, float]]
    """Returns of a task that count as 0 and as 1."""
    invariance: Configs
    """PPO-EWMA or PPG-EWMA at the default batch size."""
    staleness: Configs = field(default_factory=dict)
    """The decoupled objective without delay."""
    algorithms: Mapping[str, Configs] = field(default_factory=dict)
    """The four algorithms, by preset."""
    betas: tuple[str, ...] = ()
    """Tasks of ``invariance`` on which Adam's decay rates are varied."""
    grid: str = ""
    """Task of ``invariance`` for the grid of appendix G."""
    scaling_up: Configs = field(default_factory=dict)
    divisors: tuple[int, ...]
    """Factors c by which the batch size is divided, from 1."""
    delays: tuple[int, ...] = ()
    """Iterations of staleness, from 0."""
    grid_factors: tuple[int, ...] = ()
    """Divisors of the centre of mass, and multipliers of the KL coefficient, in appendix G."""
    multiples: tuple[int, ...] = ()
    """Numbers of environments of the scaling-up figure, as multiples of the default."""
    seeds: Mapping[str, int]
    """Number of repetitions by figure, with ``default`` for the others."""
    points: int
    """Points of a stored curve."""
    final_points: int
    """Points at the end of a curve whose mean is the final return."""
    stacked: bool
    """Whether runs are stacked in this process; otherwise they are jobs of a grid."""
    duration: str = ""
    """Time that a stacked suite takes on two cores."""
    evaluations: Evaluations | None = None
    """Evaluations that curves are made of; None takes the episodes of training."""
    ablation_divisors: tuple[int, ...] = ()
    """Divisors at which there are ablations; by default all but 1."""
    cost_rounds: int = 15
    """Number of timings of each algorithm."""
    grid_steps: int | None = None
    """Environment steps of the grid, if they differ from those of ``invariance``."""
    first_seeds: Mapping[str, int] = field(default_factory=lambda: {"default": 1000})
    """Seeds are multiples of this, by figure as in ``seeds``, far from the seeds of the hyperparameter search."""

    def seeds_of(self, figure: str) -> tuple[int, ...]:
        """Seeds of a figure's runs."""
        count = self.seeds.get(figure, self.seeds["default"])
        first = self.first_seeds.get(figure, self.first_seeds["default"])
        return tuple(first * (1 + k) for k in range(count))

    @property
    def ablated(self) -> tuple[int, ...]:
        """Divisors of the batch size at which there are ablations, ascending."""
        return self.ablation_divisors or self.divisors[1:]

    def batch_label(self, divisor: int) -> str:
        """A batch size of the ladder in words: ``16 environments``."""
        counts = {config.env.num_envs // divisor for config in self.invariance.values()}
        if len(counts) > 1:
            return f"1/{divisor} of the environments"
        count = counts.pop()
        return f"{count} environment{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Figure:
    """A figure or table: its runs, its picture, and its numbers in words."""

    name: str
    paper: str
    """Place in the paper."""
    about: str
    tasks: Callable[[Suite], Sequence[str]]
    """Tasks of a suite that the figure shows; none if they were all left out."""
    draw: Callable[[Suite, Results, Path], list[Path]]
    """Write pictures into a folder; returns their paths."""
    summary: Callable[[Suite, Results], list[str]]
    """Paragraphs and tables in Markdown."""
    runs: Callable[[Suite], list[RunGroup]] = lambda suite: []
    """Runs that have to be trained."""
    measure: Callable[[Suite], Results] | None = None
    """Produces the results without runs."""
    has_table: bool = True
    """Whether it has results besides those of the figures in ``reads``."""
    reads: tuple[str, ...] = ()
    """Other figures whose results it shows too."""
    reads_if_trained: tuple[str, ...] = ()
    """Other figures whose results it shows if they are there."""
    column: str = "return"
    """Column of the runs that is stored."""
    aliases: tuple[str, ...] = ()
    """Numbers of the figures and tables of the paper that it reproduces."""


def cut(suite: Suite, games: Sequence[str] = (), seeds: int | None = None, steps: int | None = None) -> Suite:
    """Reduce a suite to the named tasks, fewer repetitions, or fewer environment steps of every run.

    Raises:
        ConfigError: a task that the suite does not have, or a number below 1.
    """
    for name in games:
        if name not in suite.labels:
            raise ConfigError(f"games is {name!r}, but must be among {', '.join(suite.labels)}")
    for option, number in (("seeds", seeds), ("steps", steps)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} is {number}, but must be at least 1")
    if games or seeds is not None or steps is not None:
        suite = replace(suite, duration="")  # that of the whole suite
    if games:
        suite = _select(suite, games)
    if seeds is not None:
        suite = replace(suite, seeds={"default": seeds})
    if steps is not None:
        suite = replace(change(suite, {"total_env_steps": steps}), grid_steps=None)
    return suite


def change(suite: Suite, changes: Mapping[str, Any]) -> Suite:
    """Change fields of all configurations of a suite, as :func:`anybatch.config.io.override` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every change has an effect in every configuration
        return _map_configs(suite, lambda configs: {task: override(x, changes) for task, x in configs.items()})


def shortened(suite: Suite) -> Suite:
    """Two values of everything that is varied, and few points: a suite that shows only that it runs."""
    return replace(
        suite,
        evaluations=suite.evaluations and Evaluations(points=4, episodes=2),
        ablation_divisors=(),
        divisors=(1, 16),
        delays=(0, 1),
        grid_factors=(1, 16),
        multiples=(1, 2),
        points=4,
        final_points=1,
        cost_rounds=1,
        duration="",
    )


def _select(suite: Suite, tasks: Sequence[str]) -> Suite:
    suite = _map_configs(suite, lambda configs: {task: configs[task] for task in configs if task in tasks})
    first = tuple(suite.invariance)[:1]
    return replace(
        suite,
        # the paper varies these on one game; if that is left out, the first remaining one replaces it
        betas=tuple(task for task in suite.betas if task in suite.invariance) or (first if suite.betas else ()),
        grid=suite.grid if suite.grid in suite.invariance or not suite.grid else "".join(first),
    )


def _map_configs(suite: Suite, function: Callable[[Configs], Configs]) -> Suite:
    return replace(
        suite,
        invariance=function(suite.invariance),
        staleness=function(suite.staleness),
        algorithms={name: function(configs) for name, configs in suite.algorithms.items()},
        scaling_up=function(suite.scaling_up),
    )


def group_seeds(suite: Suite, figure: str, group: RunGroup) -> tuple[int, ...]:
    """Seeds of the runs of a group in a figure."""
    return suite.seeds_of(figure)[: 1 if group.first_seed_only else None]


def required_runs(suite: Suite, figures: Sequence[Figure]) -> list[tuple[RunGroup, int]]:
    """Groups and seeds of all runs that figures need, without repetitions of the same configuration and seed."""
    runs: dict[tuple[str, int, bool], tuple[RunGroup, int]] = {}
    for figure in figures:
        for group in figure.runs(suite):
            for seed in group_seeds(suite, figure.name, group):
                runs.setdefault((repr(group.config), seed, group.single), (group, seed))
    return list(runs.values())
