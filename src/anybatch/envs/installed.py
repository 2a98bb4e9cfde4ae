"""Which environments are installed, in groups, and what is missing for the others."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from dataclasses import dataclass

import gymnasium

from anybatch.envs.procgen import GAMES, MODES, list_procgen, require_qt
from anybatch.errors import EnvError

_PROCGEN = "pip install 'anybatch[procgen]'"
# Gymnasium's own families by the module that their code is in: what they import, and the extra that brings it.
_GYM_NEEDS = {
    "box2d": ("Box2D", "pip install 'gymnasium[box2d]'"),
    "mujoco": ("mujoco", "pip install 'gymnasium[mujoco]'"),
    "phys2d": ("jax", "pip install 'gymnasium[jax]'"),
    "tabular": ("jax", "pip install 'gymnasium[jax]'"),
}


@dataclass(frozen=True)
class EnvGroup:
    """Environments that come and go together."""

    prefix: str
    """procgen, gym or envpool: what stands before the colon of their ids."""
    name: str
    """Family, such as classic_control or atari."""
    ids: tuple[str, ...]
    """Their complete ids, sorted; of what is not installed only those that are known all the same."""
    missing: str = ""
    """The command that installs what they need; empty if nothing is missing."""


def catalog() -> list[EnvGroup]:
    """All groups: Procgen, then Gymnasium's registry, then EnvPool.

    An id counts as installed if what its family needs can be imported; nothing is started.
    """
    return [_procgen(), *_gym(), *_envpool()]


def _procgen() -> EnvGroup:
    try:
        require_qt()
        return EnvGroup("procgen", "16 games", tuple(f"procgen:{name}" for name in list_procgen()))
    except EnvError:
        names = (f"procgen:{game}-{mode}" for game in GAMES for mode in MODES[:2])  # every game has easy and hard
        return EnvGroup("procgen", "16 games", tuple(names), _PROCGEN)


def _gym() -> list[EnvGroup]:
    families: dict[str, list[str]] = defaultdict(list)
    for name, spec in gymnasium.registry.items():
        if isinstance(spec.entry_point, str):  # the others only raise an error that says where they have gone
            families[_gym_family(spec.entry_point)].append(f"gym:{name}")
    groups = []
    for family, ids in sorted(families.items()):
        module, command = _GYM_NEEDS.get(family, ("", ""))
        absent = module and importlib.util.find_spec(module) is None
        groups.append(EnvGroup("gym", family, tuple(sorted(ids)), command if absent else ""))
    return groups


def _gym_family(entry_point: str) -> str:
    parts = entry_point.partition(":")[0].split(".")
    return parts[2] if parts[:2] == ["gymnasium", "envs"] and len(parts) > 2 else parts[0]


def _envpool() -> list[EnvGroup]:
    try:
        from anybatch.envs.envpool import task_families

        families = task_families()
    except EnvError:
        return [EnvGroup("envpool", "all families", (), _PROCGEN)]
    return [
        EnvGroup("envpool", family, tuple(f"envpool:{name}" for name in names))
        for family, names in families.items()
        if family != "procgen"  # these are procgen:GAME-MODE here
    ]
