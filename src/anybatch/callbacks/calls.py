"""Calls of a run's callbacks: on worker 0, in order, with errors that name the callback."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from anybatch.callbacks.callback import Callback
from anybatch.callbacks.context import RunContext
from anybatch.distributed.collectives import from_main, is_main, on_main
from anybatch.distributed.state import State
from anybatch.envs.contract import user_code
from anybatch.errors import ConfigError, Interrupted, shown
from anybatch.runs.progress import Row
from anybatch.runs.run import Run

# exact types: the unpickler that runs no code refuses classes derived from them, and larger integers
_DICTIONARIES = (dict, OrderedDict, Counter)
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)
_LARGEST = 2**63 - 1


class Callbacks:
    """The callbacks of a run as the run calls them; every worker makes every call, and worker 0 does the work.

    A request to stop, an interrupt and an error of anybatch reach all workers.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run, context: RunContext) -> None:
        """Begin with callbacks that have not been started."""
        self._named = _named(callbacks)
        self._any = from_main(bool(callbacks))  # the others may have been given none
        self._run = run
        self._context = context
        self._started: list[Callback] = []
        self.repeatable = True
        """Whether an interrupted :meth:`after_iteration` may be called again, because no callback has returned."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the callbacks; end them when the block has ended, however it ends."""

        def start(callback: Callback) -> None:
            self._started.append(callback)
            callback.start(self._context)

        interrupted = None
        try:
            self._call("start", start)
            yield
        except Interrupted as request:
            interrupted = request
        except BaseException as error:
            if is_main():
                self._end_after(error)
            raise
        self._end()
        if interrupted is not None:
            raise interrupted

    def after_iteration(self, row: Row) -> None:
        """Show every callback the row, to which it may add columns.

        Raises:
            Interrupted: a stop of the run was overdue; :attr:`repeatable` tells whether this may be called again.
        """

        def show(callback: Callback) -> None:
            before = dict(row)
            callback.after_iteration(self._context, row)
            _check_row(before, row, name_of(callback))

        self._call("after_iteration", show)

    def checkpoint(self, path: Path | None) -> None:
        """Tell every callback of a checkpoint; ``path`` is None on other workers than 0."""

        def tell(callback: Callback) -> None:
            assert path is not None
            callback.checkpoint(self._context, path)

        self._call("checkpoint", tell)

    def state_dict(self) -> State:
        """State of each callback by its name; on worker 0."""
        states = {}
        for name, callback in self._named.items():
            with self._naming(callback, "state_dict"):
                states[name] = callback.state_dict()
            where = f"state_dict() of the callback {name}"
            if not isinstance(states[name], dict):
                raise ConfigError(f"{where} is a {type(states[name]).__name__}, but must be a dictionary")
            _check_plain(states[name], where)
        return states

    def load_state_dict(self, states: State) -> list[str]:
        """Restore :meth:`state_dict`; returns a sentence for each callback that has gone or is new."""
        for name, callback in self._named.items():
            if name in states:
                with self._naming(callback, "load_state_dict"):
                    callback.load_state_dict(states[name])
        gone = [name for name, state in states.items() if state and name not in self._named]
        sentences = [
            f"the checkpoint has the state of a callback {name}, which was not passed this time" for name in gone
        ]
        # their state may not exist before start(); an evaluation that begins now is no loss
        stateful = (name for name, x in self._named.items() if type(x).state_dict is not Callback.state_dict)
        new = [name for name in stateful if name not in states and not _is_ours(self._named[name])]
        return sentences + [
            f"the callback {name} starts from scratch: the checkpoint does not contain its state" for name in new
        ]

    def _call(self, method: str, call: Callable[[Callback], None]) -> None:
        """Call all on worker 0, and end with the same outcome on every worker."""

        def call_all() -> tuple[str | None, bool, bool]:
            repeatable = True
            try:
                for callback in self._named.values():
                    with self._naming(callback, method):
                        call(callback)
                    repeatable = False
            except Interrupted:
                return self._context.stop_reason, True, repeatable
            return self._context.stop_reason, False, repeatable

        if self._any:
            self._run.stopped, interrupted, self.repeatable = on_main(call_all, patient=True)
            if interrupted:
                raise Interrupted

    def _end(self) -> None:
        """End the callbacks on worker 0; each is ended, whatever another one raises."""

        def end(callback: Callback) -> None:
            with self._naming(callback, "end"):
                callback.end(self._context)

        def end_all() -> None:
            with contextlib.ExitStack() as last_first:
                for callback in reversed(self._started):
                    last_first.callback(end, callback)

        if self._any:
            on_main(end_all, patient=True)

    def _end_after(self, error: BaseException) -> None:
        """End the callbacks after an error, which matters more than theirs."""
        self._context.error = error
        for callback in self._started:
            try:
                with self._naming(callback, "end"):
                    callback.end(self._context)
            except Exception as another:
                self._context.message(f"after {type(error).__name__}: {another}")

    @contextlib.contextmanager
    def _naming(self, callback: Callback, method: str) -> Iterator[None]:
        """Name the callback in an error of a user's callback; the library's own raise what they mean."""
        if _is_ours(callback):
            yield
            return
        with user_code(f"{method} of the callback {name_of(callback)}"):
            yield


def list_of_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """The callbacks of an iterable, which can be a generator.

    Raises:
        ConfigError: something else is among them, or it is no iterable.
    """
    if not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks is {shown(callbacks)}, but must be a list of callbacks")
    found = list(callbacks)
    for callback in found:
        if not isinstance(callback, Callback):
            what = f"the class {callback.__name__}" if isinstance(callback, type) else shown(callback)
            raise ConfigError(
                f"callbacks contains {what}, but must contain objects of classes derived from "
                "anybatch.callbacks.Callback"
            )
    return found


def _is_ours(callback: Callback) -> bool:
    """Whether the library defines a callback, and no user."""
    return type(callback).__module__.startswith("anybatch.")


def name_of(callback: Callback) -> str:
    """The name of a callback in messages and checkpoints."""
    return type(callback).__name__


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by a name that is the same in a resumed run; the second one of a class gets a number."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name, number = name_of(callback), 1
        while name in named:
            number += 1
            name = f"{name_of(callback)} {number}"
        named[name] = callback
    return named


def _check_row(before: Row, row: Row, name: str) -> None:
    """Raise ConfigError unless a callback has only added columns that hold numbers."""
    for column, value in before.items():
        if row.get(column, before) is not value:
            raise ConfigError(f"the callback {name} has changed the column {column}, but may only add new columns")
    for column in [column for column in row if column not in before]:
        if not isinstance(column, str) or not column.isprintable() or not column:
            raise ConfigError(f"the callback {name} has added the column {shown(column)}; names must be printable text")
        if not _is_number(row[column]):
            raise ConfigError(
                f"the callback {name} gives {shown(row[column])} for the column {column}, which is not a number"
            )


def _is_number(value: Any) -> bool:
    """Whether progress.csv takes a value: Python's, NumPy's or PyTorch's numbers, or None."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return value is None or (not isinstance(value, str) and isinstance(float(value), float))
    return False


def _check_plain(value: Any, where: str) -> None:
    """Raise ConfigError for what could be saved and not be loaded again, because loading runs no code."""
    if type(value) in _DICTIONARIES:
        for key, inner in value.items():
            if type(key) not in (str, int):
                raise ConfigError(f"{where} has the key {shown(key)}, but keys must be text or integers")
            _check_plain(inner, f"{where}, {key}")
    elif type(value) in (list, tuple):
        for inner in value:
            _check_plain(inner, where)
    elif type(value) is int and abs(value) > _LARGEST:
        raise ConfigError(f"{where} is {shown(value)}, but integers must have at most 64 bits")
    elif type(value) not in _PLAIN:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise ConfigError(
            f"{where} is a {kind}, but must be tensors and plain values, nested in dictionaries and lists; "
            "a NumPy array becomes a tensor by torch.from_numpy, a number by float() or int()"
        )
