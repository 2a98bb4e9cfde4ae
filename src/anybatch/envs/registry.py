"""Ids of environments given as Python callables, since a configuration is plain text."""

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
    import gymnasium  # only here, to keep presets light
    from gymnasium.envs.registration import EnvSpec

    if isinstance(env, EnvSpec):
        raise ConfigError(f"env is a specification; give its id, 'gym:{env.id}', or a function that makes it")
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv) or not callable(env):
        raise ConfigError(
            f"env is a {type(env).__name__}, but must be an id as text, or a function or class that makes an "
            "environment, so that anybatch can make several"
        )
    module = getattr(env, "__module__", None) or type(env).__module__
    name = getattr(env, "__qualname__", None) or type(env).__qualname__
    base = f"{module}:{name}"
    number, env_id = 1, base
    while env_id in _registered and _registered[env_id] is not env:
        number += 1
        env_id = f"{base}#{number}"
    _registered[env_id] = env
    return env_id


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
        hint = f"; did you mean 'gym:{env_id}'?" if re.search(r"-v\d+$", name) else f"; it must be {FORMS}"
        raise ConfigError(f"env.id is {env_id!r}, read as import.path:function, but {error}{hint}") from error
    if not callable(function):
        raise ConfigError(f"env.id is {env_id!r}, which is a {type(function).__name__} and not a function")
    result: Callable[..., Any] = function
    return result


FORMS = (
    "procgen:GAME-MODE, gym:ID, gym:MODULE:ID (which imports MODULE first), envpool:ID, or import.path:function (in "
    "Python also a callable) that makes a Gymnasium environment"
)
"""The forms of an environment id, in words."""
