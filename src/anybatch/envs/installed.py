"""Catalog of environments by family, with the commands that install missing ones."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from dataclasses import dataclass

import gymnasium

from anybatch.envs.procgen import GAMES, MODES, list_procgen, require_qt
from anybatch.errors import EnvError, install_command

_PROCGEN = install_command("procgen")
# Gymnasium's own families by the module of their code: the package they import, and the command that installs it.
_GYM_NEEDS = {
    "box2d": ("Box2D", "pip install 'gymnasium[box2d]'"),
    "mujoco": ("mujoco", "pip install 'gymnasium[mujoco]'"),
    "phys2d": ("jax", "pip install 'gymnasium[jax]'"),
    "tabular": ("jax", "pip install 'gymnasium[jax]'"),
}


@dataclass(frozen=True)
class EnvFamily:
    """Environments that need the same packages."""

    prefix: str
    """procgen, gym or envpool: the part of their ids before the colon."""
    name: str
    """Family, such as classic_control or atari."""
    ids: tuple[str, ...]
    """Their complete ids, sorted; if the family is not installed, those that are known anyway."""
    missing: str = ""
    """The command that installs them; empty if they are installed."""


def catalog() -> list[EnvFamily]:
    """List all families: Procgen, then Gymnasium's registry, then EnvPool.

    A family counts as installed if the packages that it needs can be imported; nothing is started.
    """
    return [_procgen(), *_gym(), *_envpool()]


def _procgen() -> EnvFamily:
    try:
        require_qt()
        return EnvFamily("procgen", "16 games", tuple(f"procgen:{name}" for name in list_procgen()))
    except EnvError:
        names = (f"procgen:{game}-{mode}" for game in GAMES for mode in MODES[:2])  # every game has easy and hard
        return EnvFamily("procgen", "16 games", tuple(names), _PROCGEN)


def _gym() -> list[EnvFamily]:
    ids_by_name: dict[str, list[str]] = defaultdict(list)
    for name, spec in gymnasium.registry.items():
        if isinstance(spec.entry_point, str):  # others raise an error that names the package they have moved to
            ids_by_name[_gym_family(spec.entry_point)].append(f"gym:{name}")
    families = []
    for name, ids in sorted(ids_by_name.items()):
        module, command = _GYM_NEEDS.get(name, ("", ""))
        absent = module and importlib.util.find_spec(module) is None
        families.append(EnvFamily("gym", name, tuple(sorted(ids)), command if absent else ""))
    return families


def _gym_family(entry_point: str) -> str:
    parts = entry_point.partition(":")[0].split(".")
    return parts[2] if parts[:2] == ["gymnasium", "envs"] and len(parts) > 2 else parts[0]


def _envpool() -> list[EnvFamily]:
    try:
        from anybatch.envs.envpool import task_families

        families = task_families()
    except EnvError:
        return [EnvFamily("envpool", "all families", (), _PROCGEN)]
    return [
        EnvFamily("envpool", family, tuple(f"envpool:{name}" for name in names))
        for family, names in families.items()
        if family != "procgen"  # these are procgen:GAME-MODE here
    ]
