"""The errors that a user of anybatch can cause, each one clear sentence."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST_SHOWN = 100  # characters of a value in a message


class AnybatchError(Exception):
    """Base of every error that anybatch raises on purpose; its text is one sentence for the user."""


class ConfigError(AnybatchError, ValueError):
    """A setting that is out of range or does not fit another; the text names field, value and what is allowed."""


class EnvError(AnybatchError, RuntimeError):
    """An environment that cannot be made, or that broke its contract while it ran."""


class CheckpointError(AnybatchError, RuntimeError):
    """A run folder or checkpoint that is missing, foreign or damaged."""


class DivergenceError(AnybatchError, RuntimeError):
    """Training produced a loss, a reward or an advantage that is not finite."""


class WorkerError(AnybatchError, RuntimeError):
    """Another data-parallel worker has died, hangs, or computes something else."""


class ScalingWarning(UserWarning):
    """A condition of batch size-invariance that a scaled configuration does not meet."""


def shown(value: Any) -> str:
    """A value as an error message shows it: its ``repr``, cut to 100 characters."""
    text = _repr.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


_repr = reprlib.Repr()  # computes no more of a large value than it shows
_repr.maxlevel, _repr.maxstring, _repr.maxother, _repr.maxlong = 3, _MOST_SHOWN, _MOST_SHOWN, _MOST_SHOWN
