"""The form of a table: a framework's arguments for the fields of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anybatch.config.schema import TrainConfig


class Code(str):
    """A value that is an expression in the user's program, not a constant."""


@dataclass(frozen=True)
class Row:
    """One argument of a framework."""

    names: str
    """Its name, then other spellings, separated by spaces."""
    field: str = ""
    """Our field by full name; empty if there is none."""
    value: Callable[[TrainConfig], object] | None = None
    """Value for a configuration; None takes the field's value."""
    meaning: str = ""
    """Their number in terms of our fields, where it is not the field itself."""
    when: Callable[[TrainConfig], bool] = lambda config: True
    """Whether a configuration needs it."""


@dataclass(frozen=True)
class Framework:
    """A framework's arguments."""

    title: str
    """Name in sentences."""
    calls: dict[str, tuple[Row, ...]]
    """Arguments by the text before them, a function or a command, with the names of ``classes`` in braces."""
    notes: Callable[[TrainConfig], Iterator[str]]
    """One sentence for each property of a configuration without a counterpart."""
    known: tuple[Row, ...] = ()
    """Arguments that are explained but not printed."""
    flags: bool = False
    """Arguments are flags of a command, ``--name value`` on one line."""
    imports: Callable[[TrainConfig], list[str]] = lambda config: []
    """Lines before the calls."""
    classes: Callable[[TrainConfig], dict[str, str]] = lambda config: {}
    """Classes of the calls, by the name in braces."""
