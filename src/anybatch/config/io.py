"""Configurations as nested dictionaries and YAML, and changes to single fields by name."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import types
import typing
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from anybatch.config import fields, schedules
from anybatch.config.effects import without_effect
from anybatch.config.encoders import encoder_path
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError, shown

T = TypeVar("T")

OTHER_ENTRIES = ("anybatch", "seed", "signature", "init_from")
"""Entries of a run's config.yaml besides the configuration: version, seed, mark of its owner, start."""

_MOST_BYTES = 1_000_000


def to_dict(config: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """Nested dictionary of plain values, except for the fields and sections ``without``, given by full name."""
    plain = {}
    for name in (field.name for field in dataclasses.fields(config) if field.name not in without):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value, [full.removeprefix(f"{name}.") for full in without if full.startswith(f"{name}.")])
        elif isinstance(value, tuple):
            value = list(value)
        plain[name] = value
    return plain


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that :func:`to_dict` turned into ``values``; missing fields take their defaults.

    Raises:
        ConfigError: an unknown field, or a value of the wrong kind.
    """
    return _build(TrainConfig, values, "")


def read_yaml(path: Path) -> Any:
    """Content of a YAML file.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.load(_read_text(path), _Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, and without aliases, with which a few bytes can describe gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name), which anybatch does not read")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.YAMLError(
                    f"it has {shown(key.value)} twice, the second time in line {key.start_mark.line + 1}"
                )
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read_text(path: Path) -> str:
    """Text of a regular file, which a pipe or a device is not: reading that might never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"it is a {'folder' if path.is_dir() else 'pipe or device'}")
    if path.stat().st_size > _MOST_BYTES:
        raise OSError(f"it is larger than {_MOST_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")


def read_config_file(path: str | Path) -> TrainConfig:
    """Configuration in a run's config.yaml or a similar file; entries for version, seed and signature are ignored.

    Raises:
        ConfigError: the file cannot be read, or holds no configuration.
    """
    try:
        values = read_yaml(Path(path).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must contain fields and sections")
    return from_dict({name: value for name, value in values.items() if name not in OTHER_ENTRIES})


def to_yaml(config: TrainConfig, **extra: Any) -> str:
    """YAML text with every field, after ``extra`` top-level entries such as the seed."""
    return yaml.safe_dump({**extra, **to_dict(config)}, sort_keys=False)


def override(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Change fields by name.

    Args:
        config: the configuration to start from.
        changes: new values by field name (``num_envs``), by full name with dots or underscores (``"rollout.steps"``,
            ``rollout_steps``, ``aux_step_size``), or by section with a dictionary of its fields
            (``optimizer={"step_size": 1e-3}``). A name that ends several fields is refused, except for the short
            names of :data:`anybatch.config.fields.SHORT`: ``step_size`` is ``optimizer.step_size``.
            A schedule may be a function, see :func:`anybatch.config.schedules.tabulate`, and an encoder a class.
            A new ``env.options``, ``eval.options`` or ``model.options`` replaces all options.

    Warns about a change that has no effect beside the other fields.

    Raises:
        ConfigError: a name that does not exist or is ambiguous, or a value of the wrong kind.
    """
    before, changed = config, fields.flat(changes)
    for full, value in changed.items():
        config = fields.replace(config, full, converted(full, value))
    for sentence in without_effect(config, [x for x in changed if fields.get(config, x) != fields.get(before, x)]):
        warnings.warn(sentence, stacklevel=2)
    return config


def converted(full: str, value: Any) -> Any:
    """The value of a field, by full name, as the configuration holds it.

    Raises:
        ConfigError: it is of the wrong kind.
    """
    if full in schedules.SCHEDULES.values() and callable(value):
        value = schedules.tabulate(full, value)
    if full == "env.id" and callable(value):
        raise ConfigError(f"env.id is {shown(value)}, but must be text here; pass it as env to a preset")
    if full == "model.encoder" and not isinstance(value, str):
        value = encoder_path(value)
    return _convert(fields.types()[full], value, full)


def _build(kind: type[T], values: Any, prefix: str) -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{prefix.rstrip('.') or 'the configuration'} must be a section with fields, not {shown(values)}"
        )
    hints = typing.get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise fields.unknown(str(name), hints, prefix, otherwise=f"known are {', '.join(sorted(hints))}")
    return kind(**{name: _convert(hints[name], value, prefix + name) for name, value in values.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    """Check a plain value against a field's type; integers are accepted for floats, lists for tuples."""
    if getattr(value, "ndim", None) == 0:  # NumPy's numbers, of which float64 is a float that prints otherwise
        value = value.item()
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        section = typing.cast(type, kind)
        return value if isinstance(value, section) else _build(section, value, name + ".")
    if origin is typing.Literal:
        for choice in typing.get_args(kind):
            if isinstance(value, str) and value == choice:
                return choice  # not the value, which may be of a subclass of str
        raise ConfigError(f"{name} is {shown(value)}, but must be one of {', '.join(typing.get_args(kind))}")
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if type(None) in options and str not in options and isinstance(value, str) and value.lower() == "none":
            return None  # as on the command line; YAML's word is null
        exact = [option for option in options if option in (bool, int, float, str) and type(value) is option]
        for option in exact or options:
            try:
                return _convert(option, value, name)
            except ConfigError:
                continue
        raise ConfigError(f"{name} is {shown(value)}, but must be {' or '.join(_words(option) for option in options)}")
    if origin is tuple:
        inner = typing.get_args(kind)
        if inner[-1] is Ellipsis:  # any number of them
            inner = inner[:1] * len(value) if isinstance(value, (list, tuple)) else inner[:1]
        if not isinstance(value, (list, tuple)) or len(value) != len(inner):
            raise ConfigError(f"{name} is {shown(value)}, but must be {_words(kind)}")
        return tuple(_convert(option, item, name) for option, item in zip(inner, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {shown(value)}, but must be pairs of a name and a value")
        return {str(key): _convert(typing.get_args(kind)[1], item, f"{name}.{key}") for key, item in value.items()}
    if kind in (int, float) and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is not bool:
        if kind is float and isinstance(value, numbers.Real):
            try:
                return float(value)
            except OverflowError:
                raise ConfigError(f"{name} is {shown(value)}, but must be a number below 1.8e308") from None
        if kind is int and isinstance(value, numbers.Integral):
            return int(value)  # NumPy's too
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, str):
        return str.__str__(value)  # plain text, also of NumPy's strings and of enumerations
    if type(value) is kind:
        return value
    raise ConfigError(f"{name} is {shown(value)}, but must be {_words(kind)}")


def _words(kind: Any) -> str:
    known = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "none"}
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        return "a list of values" if inner[-1] is Ellipsis else f"{len(inner)} values"
    return known.get(kind, str(kind))
