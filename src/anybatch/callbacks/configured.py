"""The callbacks that a configuration asks for."""

from __future__ import annotations

from anybatch.callbacks.callback import Callback
from anybatch.callbacks.evaluation import KeepBest, PeriodicEvaluation, StopAt
from anybatch.config.schema import TrainConfig


def callbacks_of(config: TrainConfig) -> list[Callback]:
    """The callbacks that ``config`` asks for; those of the user come after them."""
    if config.eval.every is None:
        return []
    callbacks: list[Callback] = [PeriodicEvaluation(config.eval)]
    if config.eval.keep_best:
        callbacks.append(KeepBest())
    if config.eval.stop_at is not None:
        callbacks.append(StopAt(config.eval.stop_at))
    return callbacks
