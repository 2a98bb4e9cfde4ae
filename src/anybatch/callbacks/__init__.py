"""Hooks into training: evaluation, early stopping, metrics of your own."""

from __future__ import annotations

from anybatch.callbacks.callback import Callback
from anybatch.callbacks.context import RunContext
from anybatch.callbacks.evaluation import KeepBest, PeriodicEvaluation, StopAt

__all__ = ["Callback", "KeepBest", "PeriodicEvaluation", "RunContext", "StopAt"]
