"""Ids of environments given as Python callables, since a configuration is plain text."""

from __future__ import annotations

import functools
import importlib
import re
import secrets
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from anybatch.config.encoders import is_in_main
from anybatch.errors import ConfigError, user_code_error

_unnamed: dict[str, Callable[..., Any]] = {}
_MAIN = ("__main__", "__mp_main__")  # another program in every process; the second in children of multiprocessing


class GivenEnvironment:
    """A vector environment of tensors that exists already, as a callable that returns it.

    Simulators of which a process can have only one are passed as objects.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def __call__(self, num_envs: int) -> Any:
        """The environment, whatever number is asked for."""
        return self.env


def is_tensor_env(env: Any) -> bool:
    """Whether an object is a vector of environments of tensors, see :class:`anybatch.envs.tensor.TensorEnv`."""
    return all(hasattr(env, name) for name in ("device", "num_envs", "reset", "step")) and not isinstance(env, type)


def hides_tensor_env(env: Any) -> bool:
    """Whether an object is a wrapper of Gymnasium around a tensor environment, whose attributes it does not have."""
    import gymnasium

    wrappers = gymnasium.Wrapper | gymnasium.vector.VectorWrapper
    return isinstance(env, wrappers) and not is_tensor_env(env) and is_tensor_env(env.unwrapped)


def words_for_hidden(env: Any) -> str:
    """Description of such a wrapper, and the object to use instead."""
    return (
        f"a {type(env).__name__} around a tensor environment, which hides its device and num_envs, as gym.make "
        "returns it: use env.unwrapped"
    )


def given_environments(env_id: str) -> int | None:
    """The number of environments of an object that was passed; None for an id that makes any number."""
    env = _unnamed.get(env_id)
    return int(env.env.num_envs) if isinstance(env, GivenEnvironment) else None


def environment_id(env: str | Callable[..., Any]) -> str:
    """The id of an environment: a string as it is, a callable as ``import.path:function`` if that names it.

    A vector environment of tensors may be passed as an object.

    Importing the path must give the very same object. For other callables (a lambda, a partial, a method of an object,
    a function whose name is that of the function it wraps, anything in ``__main__``) the id holds a ``#``: this process
    remembers the callable, and any other process has to be given it again.

    Raises:
        ConfigError: it is neither a string nor callable.
    """
    if isinstance(env, str):
        return env
    import gymnasium  # only here, to keep presets light
    from gymnasium.envs.registration import EnvSpec

    if isinstance(env, EnvSpec):
        raise ConfigError(f"env is a specification; give its id, 'gym:{env.id}', or a function that creates it")
    if is_tensor_env(env):
        return _remembered(GivenEnvironment(env), f"{type(env).__module__}:{type(env).__qualname__}")
    if hides_tensor_env(env):
        raise ConfigError(f"env is {words_for_hidden(env)}")
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv) or not callable(env):
        raise ConfigError(
            f"env is a {type(env).__name__}, but must be an id as text, or a function or class that creates an "
            "environment, so that anybatch can create several"
        )
    module = str(getattr(env, "__module__", None) or type(env).__module__)
    name = str(getattr(env, "__qualname__", None) or type(env).__qualname__)
    path = f"{module}:{name}"
    if _is_at(env, module, name):
        return path
    return _remembered(env, path)


def _remembered(env: Callable[..., Any], path: str) -> str:
    """The id of a callable that no import path names; made when it is seen first."""
    for known, other in _unnamed.items():
        if _same(other, env):
            return known
    env_id = f"{path}#{_process_token()}-{len(_unnamed) + 1}"
    _unnamed[env_id] = env
    return env_id


def is_importable(env_id: str) -> bool:
    """Whether other processes can make the environment from its id alone."""
    return not {"#", "<"} & set(env_id)


def check_importable(env_id: str, encoder: str, who: str) -> None:
    """Raise a ConfigError if other processes cannot import the environment or the encoder; ``who`` they are."""
    if not is_importable(env_id):
        raise ConfigError(
            f"env.id is {env_id!r}, a callable without an import path, which {who} cannot find; move it to the top "
            "level of a module"
        )
    if is_in_main(encoder):
        raise ConfigError(
            f"model.encoder is {encoder!r}, a class of this program, which {who} cannot find; move it to a module"
        )


def is_known(env_id: str) -> bool:
    """Whether this process remembers the callable, or finds it by its import path."""
    return is_importable(env_id) or env_id in _unnamed


def find_environment(env_id: str) -> Callable[..., Any]:
    """The callable behind ``import.path:function``.

    Raises:
        ConfigError: it cannot be imported, or is not remembered in this process.
    """
    if env_id in _unnamed:
        return _unnamed[env_id]
    if not is_importable(env_id):
        raise ConfigError(
            f"env.id is {env_id!r}, a callable of another process that cannot be imported by name; pass it again in "
            "Python, as env of resume, load_policy or evaluate"
        )
    module, _, name = env_id.partition(":")
    if module in _MAIN:
        raise ConfigError(
            f"env.id is {env_id!r}, but {module} means a different program in every process; pass the callable itself, "
            "or move it to a module"
        )
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
        raise ConfigError(f"env.id is {env_id!r}, but must be {FORMS}")
    check_not_standard(module, env_id)
    try:
        function = _attribute(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = f"; did you mean 'gym:{env_id}'?" if re.search(r"-v\d+$", name) else f"; it must be {FORMS}"
        raise ConfigError(f"env.id is {env_id!r}, read as import.path:function, but {error}{hint}") from error
    except BaseException as error:
        raise user_code_error(error, f"importing {module}, for env.id {env_id!r},") from error
    if not callable(function):
        raise ConfigError(f"env.id is {env_id!r}, which is a {type(function).__name__}, but must be a function")
    check_not_standard(_home(function), env_id)
    result: Callable[..., Any] = function
    return result


def check_not_standard(module: str, env_id: str) -> None:
    """Raise ConfigError for a module of Python itself: it makes no environments, and may do harm (``os:system``)."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"env.id is {env_id!r}, but {module} belongs to Python's standard library, which contains no environments"
        )


def _home(function: Any) -> str:
    """The module that defines a callable; that of its type for an object or a method without one."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


FORMS = (
    "procgen:GAME-MODE, gym:ID, gym:MODULE:ID (which imports MODULE first), envpool:ID, or import.path:function (in "
    "Python also a callable) that creates a Gymnasium environment"
)
"""The forms of an environment id, in words."""


def _attribute(module: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def _is_at(env: Callable[..., Any], module: str, name: str) -> bool:
    """Whether a program that imports the path gets `env`."""
    loaded = sys.modules.get(module)
    if module in _MAIN or getattr(loaded, "__spec__", None) is None:  # a module without a spec is in no file
        return False
    try:
        return _same(_attribute(loaded, name), env)
    except AttributeError:
        return False


def _same(a: Any, b: Any) -> bool:
    """Whether two callables are one object; Python makes the object of a method anew at every access."""
    if isinstance(a, GivenEnvironment) and isinstance(b, GivenEnvironment):
        return a.env is b.env
    if isinstance(a, MethodType) and isinstance(b, MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    return a is b


@functools.cache
def _process_token() -> str:
    """Distinguishes the ids of this process from those that another one has recorded."""
    return secrets.token_hex(4)
