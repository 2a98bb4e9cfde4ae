"""Hooks into training: evaluation, early stopping, metrics of your own."""

from __future__ import annotations

from anybatch.callbacks.callback import Callback
from anybatch.callbacks.context import RunContext
from anybatch.callbacks.evaluation import KeepBest, PeriodicEvaluation, StopAt
from anybatch.callbacks.pruning import OptunaPruning

__all__ = ["Callback", "KeepBest", "OptunaPruning", "PeriodicEvaluation", "RunContext", "StopAt"]
