"""Translation of a configuration into another framework's arguments, with sentences about missing counterparts.

The tests type the result into Stable-Baselines3's ``PPO`` (or our subclass of it), TorchRL's classes, rsl_rl's runner
and TRL's ``GRPOConfig``; the names of CleanRL's ``ppo.py`` and RLlib's ``PPOConfig`` (new API stack) were checked by
reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from anybatch.config import fields
from anybatch.config.effects import without_effect
from anybatch.config.frameworks.rows import Code, Row
from anybatch.config.frameworks.tables import FRAMEWORKS
from anybatch.config.schema import TrainConfig

_PLAIN = TrainConfig()
_OTHERS = (
    *("model.", "env.frame_stack", "env.action_mask", "env.bootstrap_truncated"),
    *("policy.max_importance_ratio", "policy.importance", "optimizer.kl_factor", "precision"),
)
"""Sections and fields that no table translates, or few."""


@dataclass(frozen=True)
class Translation:
    """A configuration in another framework's arguments."""

    text: str
    """Text to type there, with the missing counterparts as comments."""
    arguments: dict[str, object]
    """Arguments of all calls, as values that JSON and YAML know."""
    missing: list[str]
    """Sentences about fields without a counterpart. Fields of networks and environments are among them if they differ
    from the defaults."""

    def __str__(self) -> str:
        return self.text


def translate(config: TrainConfig, framework: str) -> Translation:
    """Express a configuration in another framework's arguments.

    Args:
        config: scaled or not.
        framework: a key of :data:`anybatch.config.frameworks.tables.FRAMEWORKS`.
    """
    table = FRAMEWORKS[framework]
    lines, arguments = table.imports(config), dict[str, object]()
    for start, rows in table.calls.items():
        values = {row.names.split()[0]: _value(config, row) for row in rows if row.when(config)}
        if not values:
            continue
        if table.flags:
            values = {name.replace("_", "-"): value for name, value in values.items()}
            lines.append(" ".join([start, *(_flag(name, value) for name, value in values.items())]))
        else:
            start = start.format(**table.classes(config))
            lines += [f"{start}(", *(f"    {name}={_code(value)}," for name, value in values.items()), ")"]
        for name, value in values.items():
            arguments.setdefault(name, _plain(value))  # the collector's environment is that of the call before
    missing = list(table.notes(config))
    named = {row.field for rows in table.calls.values() for row in rows if row.when(config)}
    if others := _others(config, lambda name: name in named or any(name in sentence for sentence in missing)):
        missing.append(f"{'; '.join(others)}: not translated; choose their equivalents in that framework")
    return Translation("\n".join([*lines, *(f"# {sentence}" for sentence in missing)]), arguments, missing)


def _others(config: TrainConfig, is_named: Callable[[str], bool]) -> list[str]:
    """Fields among ``_OTHERS`` that have an effect and differ from the defaults, with their values."""
    differing = [x for x in fields.names() if x.startswith(_OTHERS) and fields.get(config, x) != fields.get(_PLAIN, x)]
    return [
        f"{name} {fields.word(fields.get(config, name))}"
        for name in differing
        if not is_named(name) and not without_effect(config, [name])
    ]


def _value(config: TrainConfig, row: Row) -> object:
    return _short(row.value(config) if row.value else fields.get(config, row.field))


def _short(value: object) -> object:
    """The value with seven significant digits."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: _short(x) for name, x in value.items()}
    return type(value)(map(_short, value)) if isinstance(value, (list, tuple)) else value


def _code(value: object) -> str:
    """A value as Python source."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, dict):
        return "dict(" + ", ".join(f"{name}={_code(x)}" for name, x in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_code, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return 'float("inf")' if value == math.inf else repr(value)


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return _code(value) if isinstance(value, Code) or value == math.inf else value
