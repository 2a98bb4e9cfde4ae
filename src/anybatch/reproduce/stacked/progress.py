"""Counters and rows of R stacked runs, in the columns of progress.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from anybatch.config.schema import TrainConfig
from anybatch.distributed.state import Stateful
from anybatch.errors import DivergenceError
from anybatch.policy_phase import Learner, finite_weights
from anybatch.reproduce.evaluations import Evaluations
from anybatch.reproduce.stacked.evaluation import Evaluator, due
from anybatch.reproduce.stacked.rollouts import Episodes
from anybatch.sampling.rollout import Sampled

Columns = dict[str, np.ndarray]
"""Column name to one number a row; NaN where there is none."""


class StackedRun:
    """The run that the training loop sees: counters that R runs have in common, and some rows of each.

    Rows are evenly spaced, with the last iteration among them. ``episode_return_sum`` and ``episodes`` count from the
    start, so that the mean return of all episodes between two rows follows from their differences. With evaluations
    there is also a row for each of them, with the column ``eval_return``, and one before training.
    """

    iteration_is_open = False
    checkpoint_due = False

    def __init__(
        self,
        config: TrainConfig,
        learner: Learner,
        episodes: Episodes,
        rows: int | None,
        evaluation: tuple[Evaluations, Evaluator] | None = None,
    ) -> None:
        """Start at iteration 0 of runs with a common ``config``; keep about ``rows`` rows of each, or all if None."""
        self.config = config
        self.iteration = self.env_steps = self.gradient_steps = 0
        self.alive = torch.ones(episodes.runs, dtype=torch.bool)
        """(R,) bool, the run has not diverged."""
        iterations = math.ceil(config.total_env_steps / config.iteration_batch) - config.rollout.source.delay
        self._every = 1 if rows is None else max(1, math.ceil(iterations / rows))
        self._learner = learner
        self._episodes = episodes
        self._statistics: dict[str, Any] = {}
        self._rows: list[dict[str, np.ndarray]] = []
        self._kept = [0] * episodes.runs
        self._evaluation = evaluation
        self._before = 0  # environment steps before this iteration
        if evaluation is not None:
            self._add_row({"eval_return": evaluation[1]()})

    @property
    def finished(self) -> bool:
        """Whether the environment steps of the configuration are done."""
        return self.env_steps >= self.config.total_env_steps

    @property
    def progress(self) -> float:
        """Fraction of the environment steps that is done, 0 to 1."""
        return min(1.0, self.env_steps / self.config.total_env_steps)

    def record(self, statistics: Mapping[str, Any], sampled: Sampled) -> None:
        """Count an iteration; the columns of ``statistics`` have a number for each run or one for all."""
        self.iteration += 1
        self._before = self.env_steps
        self.env_steps += sampled.env_steps
        self.gradient_steps += statistics["gradient_steps"]
        # those of an auxiliary phase, NaN elsewhere, wait for the next row
        self._statistics |= {name: x for name, x in statistics.items() if not (isinstance(x, float) and math.isnan(x))}
        self._statistics["gradient_steps"] = self.gradient_steps

    def end_iteration(self, parts: Mapping[str, Stateful], timings: Mapping[str, float]) -> None:
        """Add a row if one is due.

        Raises:
            DivergenceError: no run is finite any more.
        """
        finite = torch.tensor([self._statistics[name] for name in ("advantage_std", "value_loss", "entropy")])
        self.alive &= torch.isfinite(finite).all(0) & finite_weights(self._learner.agent, run_axis=True)
        if not bool(self.alive.any()):
            raise DivergenceError("all runs have diverged")
        evaluated = {}
        if self._evaluation is not None:
            evaluations, evaluator = self._evaluation
            if due(evaluations, self.config.total_env_steps, self._before, self.env_steps):
                evaluated["eval_return"] = evaluator()
        if evaluated or self.finished or self.iteration % self._every == 0:
            self._add_row({**self._statistics, **self._episodes.columns(), **evaluated})
            self._statistics = {}

    def _add_row(self, columns: Mapping[str, Any]) -> None:
        counters = {"iteration": self.iteration, "env_steps": self.env_steps, **columns}
        self._rows.append({name: np.broadcast_to(np.asarray(x), len(self._kept)) for name, x in counters.items()})
        for run in torch.nonzero(self.alive).flatten().tolist():
            self._kept[run] = len(self._rows)

    def columns(self, run: int) -> Columns:
        """The rows of one run, up to its last."""
        rows = self._rows[: self._kept[run]]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([row[name][run] if name in row else math.nan for row in rows]) for name in names}

    def show_status(self, text: str) -> None:
        pass

    def save(self, parts: Mapping[str, Stateful]) -> None:
        pass
