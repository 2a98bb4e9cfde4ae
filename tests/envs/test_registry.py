"""Ids of callables: recorded only where an import gives the very same object."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anybatch.envs.registry import environment_id, find_environment, is_importable, is_known
from anybatch.errors import ConfigError

MODULE = """
import functools
import gymnasium


class Env(gymnasium.Env):
    class Inner:
        pass

    @classmethod
    def build(cls):
        return cls()

    @staticmethod
    def plain():
        return Env()

    def method(self):
        return self


class Child(Env):
    pass


class Factory:
    def __call__(self):
        return Env()

    def make(self):
        return Env()


def function():
    return Env()


def loud(make):
    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        return make(*args, **kwargs)
    return wrapper


@loud
def decorated():
    return Env()


wrapped_class = loud(Env)  # its name is that of the class
renamed = function
partial = functools.partial(Env)
instance = Factory()
unnamed = lambda: Env()


def local():
    def inner():
        return Env()
    return inner
"""


@pytest.fixture
def mod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "envs_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("envs_of_a_test")
    del sys.modules["envs_of_a_test"]


@pytest.mark.parametrize(
    ("get", "path"),
    [
        (lambda m: m.Env, "Env"),
        (lambda m: m.Env.Inner, "Env.Inner"),
        (lambda m: m.Env.build, "Env.build"),
        (lambda m: m.Env.plain, "Env.plain"),
        (lambda m: m.function, "function"),
        (lambda m: m.renamed, "function"),
        (lambda m: m.decorated, "decorated"),
    ],
)
def test_what_an_import_finds_is_recorded(get: Callable[[Any], Any], path: str, mod: Any) -> None:
    env_id = environment_id(get(mod))
    assert env_id == f"envs_of_a_test:{path}" and is_importable(env_id)
    code = f"from anybatch.envs.registry import find_environment; print(find_environment({env_id!r}))"
    other = subprocess.run([sys.executable, "-c", code], cwd=Path(mod.__file__).parent, capture_output=True, text=True)
    assert path in other.stdout, other.stderr


@pytest.mark.parametrize(
    "get",
    [
        lambda m: m.wrapped_class,
        lambda m: m.partial,
        lambda m: m.instance,
        lambda m: m.unnamed,
        lambda m: m.local(),
        lambda m: m.Factory().make,
        lambda m: m.Child.build,  # its name is Env.build, which makes another environment
        lambda m: functools.partial(m.function),
    ],
)
def test_what_an_import_does_not_find_is_remembered_here_only(get: Callable[[Any], Any], mod: Any) -> None:
    env = get(mod)
    env_id = environment_id(env)
    assert not is_importable(env_id) and is_known(env_id)
    assert find_environment(env_id) is env
    assert environment_id(env) == env_id
    code = f"from anybatch.envs.registry import find_environment; find_environment({env_id!r})"
    other = subprocess.run([sys.executable, "-c", code], cwd=Path(mod.__file__).parent, capture_output=True, text=True)
    assert "ConfigError" in other.stderr and "pass it again" in other.stderr


def test_a_method_has_one_id(mod: Any) -> None:
    factory = mod.Factory()
    assert environment_id(factory.make) == environment_id(factory.make)
    assert environment_id(factory.make) != environment_id(mod.Factory().make)


def test_a_name_that_means_something_else_by_now(mod: Any) -> None:
    old = mod.Env
    importlib.reload(mod)
    assert environment_id(mod.Env) == "envs_of_a_test:Env"
    assert find_environment(environment_id(old)) is old is not mod.Env


def test_main_is_another_program_everywhere(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "from anybatch.envs.registry import environment_id, find_environment, is_importable\n"
        "class Env: pass\n"
        "assert not is_importable(environment_id(Env)) and find_environment(environment_id(Env)) is Env\n"
        "print(environment_id(Env))\n"
    )
    first, second = (
        subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert first != second  # else a program would take its own class for that of another one
    with pytest.raises(ConfigError, match="__main__ means a different program"):
        find_environment("__main__:Env")


def test_a_module_that_is_in_no_file() -> None:
    module = types.ModuleType("made_up")
    exec("class Env: pass", module.__dict__)
    module.Env.__module__ = "made_up"
    sys.modules["made_up"] = module
    try:
        assert not is_importable(environment_id(module.Env))
    finally:
        del sys.modules["made_up"]
