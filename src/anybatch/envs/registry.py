"""Environments given as Python callables: their ids in a configuration, which is plain text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from anybatch.errors import ConfigError

_registered: dict[str, Callable[..., Any]] = {}


def environment_id(env: str | Callable[..., Any]) -> str:
    """The id of an environment: a string as it is, a callable as ``import.path:function``.

    A callable is remembered under its id while this Python process lives. In another process, when a run is resumed or
    evaluated, it is found by its import path; one without (a lambda, a function of a notebook) has to be named again
    with ``environment_id`` first.
    """
    if isinstance(env, str):
        return env
    module = getattr(env, "__module__", None) or type(env).__module__
    name = getattr(env, "__qualname__", None) or type(env).__qualname__
    base = f"{module}:{name}"
    number, found = 1, base
    while found in _registered and _registered[found] is not env:
        number += 1
        found = f"{base}#{number}"
    _registered[found] = env
    return found


def find_environment(env_id: str) -> Callable[..., Any]:
    """The callable behind ``import.path:function``.

    Raises:
        ConfigError: it is not remembered in this process and cannot be imported.
    """
    if env_id in _registered:
        return _registered[env_id]
    module, _, name = env_id.partition(":")
    if "<" in name or "#" in name:
        raise ConfigError(
            f"env.id is {env_id!r}, a function without an import path that this process does not know; "
            "define it in a module, or pass it to anybatch.envs.registry.environment_id first"
        )
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
        raise ConfigError(f"env.id is {env_id!r}, which is no environment id: it must be {FORMS}")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"env.id is {env_id!r}, read as import.path:function, but {error}; it must be {FORMS}"
        ) from error
    if not callable(function):
        raise ConfigError(f"env.id is {env_id!r}, which is a {type(function).__name__} and not a function")
    result: Callable[..., Any] = function
    return result


FORMS = (
    "procgen:GAME-MODE, gym:ID, envpool:ID, or import.path:function (in Python also a callable) that makes a Gymnasium "
    "environment"
)
"""The forms of an environment id, in words."""
