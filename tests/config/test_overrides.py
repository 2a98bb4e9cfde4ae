"""The names that editors complete are those of the configuration."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from anybatch.config import fields
from anybatch.config.overrides import Overrides
from anybatch.config.schedules import SCHEDULES
from anybatch.errors import ConfigError
from anybatch.presets import PRESETS, ppo, ppo_mujoco


def expected() -> dict[str, Any]:
    """Sections and the shortest name of each field, and also the full one where a short name is only our choice."""
    names: dict[str, Any] = {}
    for full, hint in fields.types().items():
        if full in ("env", "env.id") or (dataclasses.is_dataclass(hint) and "." in full):
            continue  # the environment is the first argument
        if dataclasses.is_dataclass(hint):
            names[full] = Mapping[str, Any]
            continue
        short, kind = full.rpartition(".")[2], hint
        if full in SCHEDULES.values():
            kind = str | Callable[[float], float]
        if full == "model.encoder":
            kind = str | type[Any]
        try:
            unique = fields.resolve(short) == full
        except ConfigError:
            unique = False
        if unique:
            names[short] = kind
        if not unique or short in fields.SHORT:
            names[full.replace(".", "_")] = kind
    return names


def test_every_field_is_named_with_its_type() -> None:
    found, wanted = typing.get_type_hints(Overrides), expected()
    assert {name: x for name, x in wanted.items() if found.get(name) != x} == {}, "to be added to config/overrides.py"
    assert set(found) - set(wanted) == set(), "to be removed from config/overrides.py"


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_signatures_name_the_fields(preset: Callable[..., Any]) -> None:
    parameters = inspect.signature(preset).parameters
    assert list(parameters) == ["env", *Overrides.__annotations__, "overrides"]
    config = preset()
    for name, parameter in parameters.items():
        if name not in ("env", "overrides"):
            assert parameter.default == fields.get(config, fields.resolve(name)), name


def test_defaults_are_those_of_the_preset() -> None:
    assert inspect.signature(ppo).parameters["num_envs"].default == 256
    assert inspect.signature(ppo_mujoco).parameters["num_envs"].default == 1
