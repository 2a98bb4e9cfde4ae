"""Configurations as nested dictionaries and YAML, and changes to single fields by name."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionary of plain values."""
    plain = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, tuple):
            value = list(value)
        plain[field.name] = value
    return plain


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that :func:`to_dict` turned into ``values``; missing fields take their defaults.

    Raises:
        ConfigError: an unknown field, or a value of the wrong kind.
    """
    return _build(TrainConfig, values, "")


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error


def read_config_file(path: Path) -> TrainConfig:
    """The configuration in a run's config.yaml, or in a file like it; version and seed, if there, are left out.

    Raises:
        ConfigError: it cannot be read, or holds no configuration.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold fields and sections")
    return from_dict({name: value for name, value in values.items() if name not in ("anybatch", "seed")})


def to_yaml(config: TrainConfig, **extra: Any) -> str:
    """YAML text with every field, preceded by ``extra`` top-level entries (the seed, say)."""
    return yaml.safe_dump({**extra, **to_dict(config)}, sort_keys=False)


def override(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Change fields by name.

    Args:
        config: what to start from.
        changes: new values by field name (``num_envs``; one that aux has too, like ``step_size``, means the other),
            by full name with dots or underscores (``"rollout.steps"``, ``rollout_steps``, ``aux_step_size``), or by
            section with a dictionary of its fields (``optimizer={"step_size": 1e-3}``).

    Raises:
        ConfigError: a name that does not exist or is ambiguous, or a value of the wrong kind.
    """
    for name, value in changes.items():
        path = _resolve(name)
        section = _at(config, path)
        if dataclasses.is_dataclass(section) and isinstance(value, Mapping):
            config = override(config, {f"{path}.{key}": inner for key, inner in value.items()})
        else:
            config = _replace(config, path.split("."), value, path)
    return config


def field_names(kind: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, sections included."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from field_names(hints[field.name], f"{prefix}{field.name}.")


@functools.cache
def _all_names() -> tuple[str, ...]:
    return tuple(field_names())


def _resolve(name: str) -> str:
    names = _all_names()
    for full in names:
        if name in (full, full.replace(".", "_")):
            return full
    matches = [full for full in names if full.endswith("." + name)]
    matches = [full for full in matches if not full.startswith("aux.")] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name} is ambiguous: it may be {' or '.join(matches)}")
    close = difflib.get_close_matches(name, [*names, *(full.split(".")[-1] for full in names)], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{name} is not a field of the configuration{hint}")


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _replace(section: Any, path: list[str], value: Any, full: str) -> Any:
    head, *rest = path
    if rest:
        value = _replace(getattr(section, head), rest, value, full)
    else:
        value = _convert(typing.get_type_hints(type(section))[head], value, full)
    return dataclasses.replace(section, **{head: value})


def _build(kind: type[T], values: Any, prefix: str) -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'the configuration'} must be a section with fields, not {values!r}")
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else f"; known are {', '.join(sorted(known))}"
            raise ConfigError(f"{prefix}{name} is not a field of the configuration{hint}")
    return kind(**{name: _convert(hints[name], value, prefix + name) for name, value in values.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    """Check a plain value against a field's type; integers are accepted for floats, lists for tuples."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return (
            value if isinstance(value, typing.cast(type, kind)) else _build(typing.cast(type, kind), value, name + ".")
        )
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        exact = [option for option in options if option in (bool, int, float, str) and type(value) is option]
        for option in exact or options:
            try:
                return _convert(option, value, name)
            except ConfigError:
                continue
        raise ConfigError(f"{name} is {value!r}, but must be {' or '.join(_words(option) for option in options)}")
    if origin is tuple:
        inner = typing.get_args(kind)
        if not isinstance(value, (list, tuple)) or len(value) != len(inner):
            raise ConfigError(f"{name} is {value!r}, but must be {len(inner)} values")
        return tuple(_convert(option, item, name) for option, item in zip(inner, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {value!r}, but must be pairs of a name and a value")
        return {str(key): _convert(typing.get_args(kind)[1], item, f"{name}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float) and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        with contextlib.suppress(ValueError):
            value = float(value)
        if kind is float and isinstance(value, float):
            return value
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, kind) and not (kind is not bool and isinstance(value, bool)):
        return value
    raise ConfigError(f"{name} is {value!r}, but must be {_words(kind)}")


def _words(kind: Any) -> str:
    known = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "none"}
    return known.get(kind, str(kind))
