"""The options of a command, read from its dataclass: for short help pages and for shell completion.

The command line itself is :mod:`tyro`'s; a test holds what is found here to what tyro offers.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tyro

GENERAL = "run"
"""Group of the options that belong to no section."""


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    flag: str
    """As it is typed: --env.num-envs."""
    group: str
    """Its section, env or rollout.source; :data:`GENERAL` for those without one."""
    help: str
    """What it means, the text under the field."""
    default: Any
    """The field's value in the preset or dataclass; dataclasses.MISSING where it has to be given."""
    choices: tuple[str, ...] = ()
    """The values that it takes, where they can be listed."""
    boolean: bool = False
    """Takes no value; --no-NAME is its opposite."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and its opposite if it has one."""
        if not self.boolean:
            return (self.flag,)
        section, dot, name = self.flag[2:].rpartition(".")
        return (self.flag, f"--{section}{dot}no-{name}")


def options(kind: type, instance: Any = None) -> list[Option]:
    """Every option of a command.

    Args:
        kind: the command's dataclass.
        instance: where defaults are taken from; None takes the class's own.
    """
    return list(_options(kind, instance, ""))


def groups(kind: type) -> dict[str, str]:
    """What each group of options is about, its dataclass's docstring, by name; without :data:`GENERAL`."""
    return dict(_groups(kind, ""))


def field_help(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, its bases' included; fields without one are missing."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_field_help(base)
    return found


@functools.cache
def _own_field_help(kind: type) -> dict[str, str]:
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    found = {}
    for statement, after in itertools.pairwise(body):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and documented:
            found[statement.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def _options(kind: type, instance: Any, section: str) -> Iterator[Option]:
    texts = field_help(kind)
    for field, hint, config in _fields(kind):
        default = _default(field, instance)
        name = _name(field, config)
        if dataclasses.is_dataclass(hint):
            inner = typing.cast(type, hint)
            yield from _options(inner, None if default is dataclasses.MISSING else default, _join(section, name))
        elif tyro.conf.Positional not in config:
            yield Option(
                flag="--" + _join(section, name).replace("_", "-"),
                group=section or GENERAL,
                help=texts.get(field.name, ""),
                default=default,
                choices=_choices(hint),
                boolean=hint is bool,
            )


def _groups(kind: type, section: str) -> Iterator[tuple[str, str]]:
    for field, hint, config in _fields(kind):
        if dataclasses.is_dataclass(hint):
            path, inner = _join(section, _name(field, config)), typing.cast(type, hint)
            if path:
                yield path, field_help(kind).get(field.name) or inspect.cleandoc(inner.__doc__ or "").split("\n\n")[0]
            yield from _groups(inner, path)


def _fields(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Any, tuple[Any, ...]]]:
    """Every field with its type and what Annotated adds to that."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, config = hints[field.name], ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, config = hint.__origin__, hint.__metadata__
        yield field, hint, config


def _name(field: dataclasses.Field[Any], config: tuple[Any, ...]) -> str:
    names = [name for x in config if (name := getattr(x, "name", None)) is not None]
    return names[0] if names else field.name


def _default(field: dataclasses.Field[Any], instance: Any) -> Any:
    if instance is not None:
        return getattr(instance, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _choices(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and bool in typing.get_args(hint):
        return ("True", "False", "None")
    return ()


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section and name else section or name
