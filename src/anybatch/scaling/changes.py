"""Changes of a configuration as a list that can be printed: field, before, after, rule, and reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from anybatch.config import fields
from anybatch.config.schema import TrainConfig

Value: TypeAlias = int | float | str | tuple[float, float] | None
"""Value of a scaled field; None where an option like ``optimizer.kl_stop`` is off, text for ``policy.proximal``."""

ASKED, BY_HAND = "as asked", "by hand"
"""Rules of a change that was asked for, and of a value that replaces a rule's."""


@dataclass(frozen=True)
class Change:
    """Change of one field."""

    field: str
    """Full name with dots."""
    before: Value
    """Value before the change."""
    after: Value
    """Value after it."""
    rule: str
    """Operation on the number, like "/ sqrt(16)" or "x 16"; or "as asked", "by hand", or "from PPO"."""
    why: str
    """Reason in a few words; empty if the change was asked for."""


def apply_changes(config: TrainConfig, changes: Iterable[Change]) -> TrainConfig:
    """Configuration after all changes."""
    for change in changes:
        config = fields.replace(config, change.field, change.after)
    return config


def with_overrides(config: TrainConfig, changes: Iterable[Change], overrides: Mapping[str, Value]) -> list[Change]:
    """Changes of ``config`` in which values set by hand, by full field name, replace those of the rules."""
    result = {change.field: change for change in changes}
    for field, value in overrides.items():
        why = f"the rule gives {show(result[field].after)}" if field in result else "no rule applies"
        result[field] = Change(field, fields.get(config, field), value, BY_HAND, why)
    return list(result.values())


def show(value: Any) -> str:
    """Short text of a value: 3.125e-05; 0.9995885, 0.9999961; none; linear."""
    if isinstance(value, tuple) and all(isinstance(x, float) for x in value):
        return ", ".join(f"{x:.7g}" for x in value)
    return f"{value:.6g}" if isinstance(value, float) else fields.word(value)
