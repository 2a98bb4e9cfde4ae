"""Fields of a configuration by name: full names with dots, and the short names that users may type for them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from anybatch.config.frameworks.tables import explain
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError

T = TypeVar("T")

SHORT = {
    "clip": "policy.clip",
    "discount": "advantage.discount",
    "minibatches": "optimizer.minibatches",
    "num_envs": "env.num_envs",
    "schedule": "optimizer.schedule",
    "step_size": "optimizer.step_size",
    "steps": "rollout.steps",
}
"""Documented short names that other fields end in too."""
_CLOSE = 0.75  # below this difflib suggests unrelated fields


def get(config: Any, name: str) -> Any:
    """Value of a field, or a whole section, by its full name."""
    return operator.attrgetter(name)(config)


def replace(config: T, name: str, value: Any) -> T:
    """Copy of a configuration with another value in the field of that full name; the value is not checked."""
    head, _, rest = name.partition(".")
    inner = replace(getattr(config, head), rest, value) if rest else value
    return dataclasses.replace(config, **{head: inner})  # type: ignore[type-var]


def word(value: Any) -> str:
    """A value as sentences name it: true, none, 0.3, and pairs as ``width 64 depth 2``."""
    if isinstance(value, dict):
        return " ".join(f"{name} {x}" for name, x in value.items())
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@functools.cache
def types(kind: type = TrainConfig) -> dict[str, Any]:
    """Types of all fields by full name, sections included; each section precedes its fields."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        found[name] = hint
        if dataclasses.is_dataclass(hint):
            found |= {f"{name}.{inner}": x for inner, x in types(typing.cast(type, hint)).items()}
    return found


def names() -> list[str]:
    """Full names of all fields that hold a value, that is, without the sections."""
    return [name for name, hint in types().items() if not dataclasses.is_dataclass(hint)]


def resolve(name: str) -> str:
    """Full name of a field or section, from that name with dots or underscores, or its end, like ``source.delay``.

    Raises:
        ConfigError: no field has this name, or several could be meant.
    """
    name = str(name)  # a key in YAML may be a number
    for full in types():
        if name in (full, full.replace(".", "_")):
            return full
    if name in SHORT:
        return SHORT[name]
    matches = [full for full in types() if full.endswith(f".{name}")]
    if matches:  # then fields like optimizer.policy_epochs may be meant by epochs as well
        matches += [full for full in names() if full.endswith(f"_{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name} is ambiguous: it may be {', '.join(matches[:-1])} or {matches[-1]}")
    section, _, last = name.rpartition(".")
    if dataclasses.is_dataclass(types().get(section)):
        raise unknown(last, types(types()[section]), f"{section}.")
    raise unknown(name, [*types(), *(full.split(".")[-1] for full in types())])


def flat(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes by full name, those inside of sections singly; where a name comes twice, the last one counts.

    Raises:
        ConfigError: no field has such a name, or several could be meant.
    """
    found: dict[str, Any] = {}
    for name, value in changes.items():
        full = resolve(name)
        is_section = dataclasses.is_dataclass(types()[full]) and isinstance(value, Mapping)
        inner = flat({f"{full}.{key}": x for key, x in value.items()}) if is_section else {full: value}
        found = {name: x for name, x in found.items() if name not in inner} | inner
    return found


def unknown(name: str, known: Iterable[str], section: str = "", otherwise: str = "") -> ConfigError:
    """Error for a name in a ``section`` (with its dot) that no field has, with the field that is meant if one is close.

    ``known`` names are allowed there; ``otherwise`` is the hint for a name that resembles none.
    """
    hint = explain(name)
    if not hint and (close := difflib.get_close_matches(name, list(known), n=1, cutoff=_CLOSE)):
        hint = f"did you mean {section}{close[0]}?"
    hint = hint or otherwise
    return ConfigError(f"{section}{name} is not a field of the configuration{hint and '; '}{hint}")
