"""The errors that a user of anybatch can cause, each one clear sentence."""

from __future__ import annotations


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
