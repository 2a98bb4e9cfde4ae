"""Pruning of Optuna's trials while they train (extra ``anybatch[optuna]``)."""

from __future__ import annotations

import math
from typing import Any

from anybatch.callbacks.callback import Callback
from anybatch.callbacks.context import RunContext
from anybatch.callbacks.evaluation import value_of


class OptunaPruning(Callback):
    """Reports a column to an Optuna trial, and ends the run if the study's pruner asks for it.

    The step of a report is the number of environment steps. Training then raises ``optuna.TrialPruned``, after its last
    checkpoint, which an objective passes on to Optuna:

    >>> def objective(trial: optuna.Trial) -> float:
    ...     config = ppo_ewma("gym:CartPole-v1", step_size=trial.suggest_float("step_size", 1e-4, 1e-2, log=True))
    ...     config = override(config, {"eval.every": 10_000})
    ...     run = train(config, f"runs/trial-{trial.number}", callbacks=[OptunaPruning(trial)]).run_dir
    ...     return evaluate(load_policy(run)).mean
    """

    def __init__(self, trial: Any, column: str = "eval_return") -> None:
        """Begin.

        Args:
            trial: an ``optuna.Trial``.
            column: of progress.csv; rows in which it is empty are not reported.
        """
        self._trial, self._column = trial, column

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        value = value_of(row, self._column)
        if math.isnan(value):
            return
        self._trial.report(value, run.env_steps)
        if self._trial.should_prune():
            run.stop(f"{self._beginning}{self._column} is {value:.4g}")

    def end(self, run: RunContext) -> None:
        reason = run.stop_reason or ""  # which a checkpoint keeps: a pruned run that is resumed stays pruned
        if reason.startswith(self._beginning) and run.error is None:
            from optuna import TrialPruned

            raise TrialPruned(reason)

    @property
    def _beginning(self) -> str:
        return f"Optuna has pruned trial {self._trial.number}: "
