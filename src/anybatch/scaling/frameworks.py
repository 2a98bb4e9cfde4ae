"""Translation of a configuration into another framework's arguments, with a sentence for each missing counterpart.

The tests type the result into Stable-Baselines3's ``PPO`` (or our subclass of it), TorchRL's classes, rsl_rl's runner
and TRL's ``GRPOConfig``; the names of CleanRL's ``ppo.py`` and RLlib's ``PPOConfig`` (new API stack) were checked by
reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anybatch.config import fields
from anybatch.config.frameworks.rows import Code, Row
from anybatch.config.frameworks.tables import FRAMEWORKS
from anybatch.config.schema import TrainConfig


@dataclass(frozen=True)
class Translation:
    """A configuration in another framework's arguments."""

    text: str
    """Text to type there, with the missing counterparts as comments."""
    arguments: dict[str, object]
    """Arguments of all calls, as values that JSON and YAML know."""
    missing: list[str]
    """One sentence for each thing that has no counterpart."""

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
    return Translation("\n".join([*lines, *(f"# {sentence}" for sentence in missing)]), arguments, missing)


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
