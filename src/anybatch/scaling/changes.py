"""Changes of a configuration as a list that can be printed: field, before, after, by which rule, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from anybatch.config.schema import TrainConfig

Value: TypeAlias = int | float | tuple[float, float]
"""What a scaled field holds."""

ASKED, YOURS = "as asked", "yours"
"""The rule of a change that the user asked for, and of a value that was set by hand in place of a rule's."""


@dataclass(frozen=True)
class Change:
    """One field that scaling changed."""

    field: str
    """Full name with dots."""
    before: Value
    """Value before the change."""
    after: Value
    """Value after it."""
    rule: str
    """What was done to the number, like "/ sqrt(16)" or "x 16"; or "as asked", or "yours"."""
    why: str
    """Why, in a few words; empty where it was asked for."""


def apply_changes(config: TrainConfig, changes: Iterable[Change]) -> TrainConfig:
    """The configuration with every change made."""
    for change in changes:
        config = _with(config, change.field.split("."), change.after)
    return config


def keep_yours(config: TrainConfig, changes: Iterable[Change], yours: Mapping[str, Value]) -> list[Change]:
    """The changes with values that were chosen by hand in place of those that a rule gives.

    Args:
        config: before the changes.
        changes: what the rules say.
        yours: values by full field name.
    """
    kept = {change.field: change for change in changes}
    for field, value in yours.items():
        before = get_field(config, field)
        rule = f"the rule gives {show(kept[field].after)}" if field in kept else "no rule asks for a change"
        kept[field] = Change(field, before, value, YOURS, f"set by you; {rule}")
    return list(kept.values())


def show(value: Value) -> str:
    """A field's value as short text: 3.125e-05; 0.9995885, 0.9999961."""
    if isinstance(value, tuple):
        return ", ".join(f"{x:.7g}" for x in value)
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def get_field(config: Any, field: str) -> Any:
    """The value of a field by its full name with dots."""
    for part in field.split("."):
        config = getattr(config, part)
    return config


def _with(section: Any, path: list[str], value: Value) -> Any:
    head, *rest = path
    return dataclasses.replace(section, **{head: _with(getattr(section, head), rest, value) if rest else value})
