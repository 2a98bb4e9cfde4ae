"""Command lines with a preset and an option for each field of the configuration: ``train`` and ``scale``."""

from __future__ import annotations

import dataclasses
import typing
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from anybatch.config import fields
from anybatch.config.effects import without_effect
from anybatch.config.frameworks.tables import explain
from anybatch.config.io import read_config_file
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError, did_you_mean
from anybatch.presets import PRESETS
from anybatch.runs.files import CONFIG
from anybatch.scaling.ppo import follow_epochs
from anybatch.system.launcher import launcher_rank

T = TypeVar("T")

PRESETS_IN_SHORT = "ppo, ppo-ewma, ppg, ppg-ewma; ppo-KIND or ppo-ewma-KIND with KIND control, mujoco or atari"
"""The presets' names, for help pages."""
PRESET = f"one of {', '.join(PRESETS)}, or the path of a config.yaml"
"""Allowed values of the first argument, in words."""
_BOOLS = {"true": True, "false": False}
_HELP_FLAGS = ("-h", "--help")
_PAIRS = [name for name, kind in fields.types().items() if typing.get_origin(kind) is dict]
_SEVERAL = [*_PAIRS, *(name for name, kind in fields.types().items() if typing.get_args(kind)[1:] == (...,))]
"""Fields that take any number of words, of which a second flag would replace those of the first."""
_MAY_BE_NONE = {name for name, kind in fields.types().items() if type(None) in typing.get_args(kind)}

_BOOL_OR_NONE = {name for name in _MAY_BE_NONE if bool in typing.get_args(fields.types()[name])}


def parse(command: str, arguments: list[str], kind: type[T], page: str) -> tuple[str, TrainConfig, T]:
    """Parse the words after such a command; returns preset or file, its configuration, and the parsed arguments.

    ``kind`` is a dataclass of the arguments, whose field ``config`` holds the configuration. ``page`` answers to
    ``--help`` alone; tyro prints ``--help SECTION`` and ``--help all``.

    Raises:
        ConfigError: no such preset or section, an unreadable file, or an option of another framework.
    """
    if arguments and arguments[0] in _HELP_FLAGS:
        arguments = [next(iter(PRESETS)), *arguments]
    if not arguments or arguments[0].startswith("-"):
        place = " as its first word" if set(arguments) & PRESETS.keys() else ""
        raise ConfigError(f"anybatch {command} needs PRESET{place}, {PRESET}")
    preset, *rest = arguments
    base = _load(preset)
    default, prog = kind(config=_without_pairs(base)), f"anybatch {command} {preset}"  # type: ignore[call-arg]
    asked = [rest[index + 1 : index + 2] for index, word in enumerate(rest) if word in _HELP_FLAGS]
    if asked:
        if command == "train" and preset in PRESETS:  # --env.id is required
            base = fields.replace(base, "env.id", tyro.MISSING)
            default = kind(config=_without_pairs(base))  # type: ignore[call-arg]
        _print_help("".join(asked[0]), page, kind, default, prog)
    names = [word[2:].partition("=")[0] for word in rest if word.startswith("--")]
    for name in names:
        if name != "seed" and (meaning := explain(name)):  # that of others is an argument here too
            raise ConfigError(f"--{name} is not an option of anybatch {command}; {meaning}")
        for pairs in (pairs for pairs in _PAIRS if name.startswith(f"{pairs}.")):
            raise ConfigError(
                f"--{name} is not an option: give pairs as --{pairs} NAME VALUE, such as --{pairs} num_levels 500"
            )
        times = [x.replace("-", "_") for x in names].count(field := name.replace("-", "_"))
        if field in _SEVERAL and times > 1:
            raise ConfigError(f"--{name} is given {times} times, but must be given once, with all its values")
    parsed = tyro.cli(kind, args=_with_none(rest), prog=prog, default=default)
    config = _with_pairs_of(base, parsed.config)  # type: ignore[attr-defined]
    if preset in PRESETS:
        base, config = follow_epochs(PRESETS[preset], base, config, given_fields(rest))
    return preset, base, dataclasses.replace(parsed, config=config)  # type: ignore[type-var]


def _with_none(words: Sequence[str]) -> list[str]:
    """The words with ``None``, ``True`` and ``False`` as tyro takes them, for fields that may be None."""
    read, flag = list[str](), ""
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        field = name[2:].replace("-", "_")
        known = {"none": _MAY_BE_NONE, "true": _BOOL_OR_NONE, "false": _BOOL_OR_NONE}
        if field in known.get(value.lower(), ()):
            word = f"{name}={value.capitalize()}" if equals else value.capitalize()
        flag = word
        read.append(word)
    return read


def given_fields(arguments: Sequence[str]) -> set[str]:
    """Full names of the fields of the configuration that a command line sets."""
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return {name for name in fields.names() if f"--{name.replace('_', '-')}" in flags}


def warn_without_effect(config: TrainConfig, given: Collection[str]) -> None:
    """Warn about fields of the command line that have no effect in the configuration that it led to."""
    for sentence in without_effect(config, sorted(given)) if launcher_rank() == 0 else ():
        warnings.warn(sentence, stacklevel=2)


def _without_pairs(config: TrainConfig) -> TrainConfig:
    """The configuration with empty options: of others, tyro would make a flag each, and take no further pairs."""
    for name in _PAIRS:
        config = fields.replace(config, name, {})
    return config


def _with_pairs_of(base: TrainConfig, config: TrainConfig) -> TrainConfig:
    """The parsed configuration with the options of its preset or file, where the command line has no other value."""
    for name in _PAIRS:
        given = {key: _BOOLS.get(str(value).lower(), value) for key, value in fields.get(config, name).items()}
        config = fields.replace(config, name, {**fields.get(base, name), **given})
    return config


def _load(preset: str) -> TrainConfig:
    if preset in PRESETS:
        return PRESETS[preset]()
    if Path(preset).suffix not in (".yaml", ".yml"):
        file = Path(preset).expanduser() / CONFIG
        hint = f"; did you mean {file}?" if file.is_file() else did_you_mean(preset.lower().replace("_", "-"), PRESETS)
        raise ConfigError(f"preset is {preset!r}, but must be {PRESET}{hint}")
    return read_config_file(Path(preset))


def _print_help(topic: str, page: str, kind: type[T], default: T, prog: str) -> None:
    """Print the page for the word after ``--help``, and exit."""
    if not topic or topic.startswith("-"):
        print(page)
        raise SystemExit(0)
    if topic != "all":
        topic = topic.replace("-", "_")
        sections = {**_sections(default.config), **_sections(default)}  # type: ignore[attr-defined]
        if topic not in sections:
            raise ConfigError(
                f"--help {topic} is not a section of options, but must be one of {', '.join(sections)}, or all"
            )
        section = sections[topic]
        fields = [(topic, type(section), dataclasses.field(default=section))]
        kind, default = (made := dataclasses.make_dataclass("Section", fields)), made()
    tyro.cli(kind, args=["--help"], prog=prog, default=default)


def _sections(instance: Any) -> dict[str, Any]:
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return {name: x for name, x in values.items() if dataclasses.is_dataclass(x) and name != "config"}
