"""The callbacks of a run: those that its configuration asks for, and those of the user."""

from __future__ import annotations

from collections.abc import Iterable

from anybatch.callbacks.callback import Callback
from anybatch.callbacks.calls import list_of_callbacks
from anybatch.callbacks.evaluation import KeepBest, PeriodicEvaluation, StopAt
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.runs.files import BEST, CHECKPOINTS


def callbacks_of(config: TrainConfig, given: Iterable[Callback]) -> list[Callback]:
    """The callbacks that ``config`` asks for, and then those of the user.

    Raises:
        ConfigError: something else is among them, or two of them keep a best policy.
    """
    callbacks = [*_asked_for(config), *list_of_callbacks(given)]
    if sum(isinstance(callback, KeepBest) for callback in callbacks) > 1:
        raise ConfigError(
            f"callbacks contains two KeepBest, which would write the same file, {CHECKPOINTS}/{BEST}: give one, and "
            "set eval.keep_best false if eval.every is set"
        )
    return callbacks


def _asked_for(config: TrainConfig) -> list[Callback]:
    if config.eval.every is None:
        return []
    callbacks: list[Callback] = [PeriodicEvaluation(config.eval)]
    if config.eval.keep_best:
        callbacks.append(KeepBest())
    if config.eval.stop_at is not None:
        callbacks.append(StopAt(config.eval.stop_at))
    return callbacks
