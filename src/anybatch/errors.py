"""The errors that a user of anybatch can cause, each one clear sentence."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_MOST_SHOWN = 100  # characters of a value in a message


class AnybatchError(Exception):
    """Base of every error that anybatch raises on purpose; its text is one sentence for the user."""


class ConfigError(AnybatchError, ValueError):
    """A setting that is out of range or does not fit another; the text names field, value and allowed values."""


class EnvError(AnybatchError, RuntimeError):
    """An environment that cannot be made, or that broke its contract while it ran."""


class UserCodeError(EnvError):
    """An exception, or ``sys.exit()``, in an environment, encoder or callback of the user; ``__cause__`` is it."""

    def locate(self, place: str) -> None:
        """Put a place, such as the environment's number and step, in front of the text."""
        self.args = (f"{place}: {self}",)


class CheckpointError(AnybatchError, RuntimeError):
    """A run folder or checkpoint that is missing, foreign or damaged."""


class DivergenceError(AnybatchError, RuntimeError):
    """Training produced a loss, a reward or an advantage that is not finite."""


class WorkerError(AnybatchError, RuntimeError):
    """Another data-parallel worker has died, hangs, or computes something else."""


class ScalingWarning(UserWarning):
    """A condition of batch size-invariance that a scaled configuration does not meet."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. Like KeyboardInterrupt, it is not caught by ``except Exception``."""


def user_code_error(error: BaseException, what: str) -> BaseException:
    """The error to raise from an exception of user code: interrupts and anybatch's errors are passed on as they are."""
    if isinstance(error, KeyboardInterrupt | AnybatchError):
        return error
    text = f": {error}" if str(error) else ""
    return UserCodeError(f"{what} raised {type(error).__name__}{text}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End of a sentence about a name that is not ``known``: the one that is meant, if one is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def install_command(extra: str) -> str:
    """Command that installs an extra of anybatch, which is not on PyPI yet."""
    return f"pip install '.[{extra}]' in a checkout of anybatch"


def no_ray_cluster(address: str | None, error: Exception) -> str:
    """Sentence for an ``address`` at which there is no Ray cluster; None is that of RAY_ADDRESS."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"no Ray cluster answers at {'RAY_ADDRESS' if address is None else repr(address)}: {reason}"


def shown(value: Any) -> str:
    """A value as an error message shows it: its ``repr``, cut to 100 characters."""
    text = _repr.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


_repr = reprlib.Repr()  # computes no more of a large value than it shows
_repr.maxlevel, _repr.maxstring, _repr.maxother, _repr.maxlong = 3, _MOST_SHOWN, _MOST_SHOWN, _MOST_SHOWN
