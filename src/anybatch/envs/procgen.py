"""The 16 Procgen games, from EnvPool."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from anybatch.envs.envpool import EnvPoolVectorEnv, check_options, import_envpool, make_spec, task_ids
from anybatch.errors import ConfigError, EnvError, install_command

NORMALIZATION: dict[str, tuple[float, float]] = {
    "bigfish": (0.0, 40.0),
    "bossfight": (0.5, 13.0),
    "caveflyer": (2.0, 13.4),
    "chaser": (0.5, 14.2),
    "climber": (1.0, 12.6),
    "coinrun": (5.0, 10.0),
    "dodgeball": (1.5, 19.0),
    "fruitbot": (-0.5, 27.2),
    "heist": (2.0, 10.0),
    "jumper": (1.0, 10.0),
    "leaper": (1.5, 10.0),
    "maze": (4.0, 10.0),
    "miner": (1.5, 20.0),
    "ninja": (2.0, 10.0),
    "plunder": (3.0, 30.0),
    "starpilot": (1.5, 35.0),
}
"""Returns in hard mode with normalised return 0 and 1."""

GAMES: tuple[str, ...] = tuple(NORMALIZATION)
"""The names of the games."""

MODES: tuple[str, ...] = ("easy", "hard", "extreme", "memory", "exploration")
"""The distributions of levels; no game has all of them."""

_RENDER_SIZE = 512
_RESERVED = frozenset({"env_name", "distribution_mode", "channel_first"})


def normalized_return(game: str, value: float) -> float:
    """(value - min) / (max - min) with the hard-mode range of `game`; raises ConfigError for an unknown game."""
    if game not in NORMALIZATION:
        raise ConfigError(f"{game!r} is not a Procgen game: {', '.join(GAMES)}.")
    low, high = NORMALIZATION[game]
    return (value - low) / (high - low)


def modes(game: str) -> list[str]:
    """The modes that EnvPool has for `game`."""
    known = set(task_ids())
    return [mode for mode in MODES if _task_id(game, mode) in known]


def list_procgen() -> list[str]:
    """All GAME-MODE names."""
    return [f"{game}-{mode}" for game in GAMES for mode in modes(game)]


def name_of(task_id: str) -> str:
    """GAME-MODE of an EnvPool id; empty if it is none of Procgen."""
    return {_task_id(game, mode): f"{game}-{mode}" for game in GAMES for mode in MODES}.get(task_id, "")


def make_procgen(
    name: str,
    seeds: Sequence[int],
    *,
    env_id: str,
    options: Mapping[str, Any],
    threads: int = 0,
    rendering: bool = False,
) -> EnvPoolVectorEnv:
    """Make a copy of the game `name`, GAME or GAME-MODE (default hard), for each of N seeds.

    Observations (N, 64, 64, 3) uint8, 15 actions.

    Raises ConfigError for an unknown game, mode or option, and EnvError if EnvPool or Qt is missing.
    """
    task_id = resolve(name, env_id)
    checked = check_options(options, make_spec(task_id, env_id), env_id, reserved=_RESERVED)
    return EnvPoolVectorEnv(
        task_id,
        seeds,
        env_id=env_id,
        options={**checked, "channel_first": False},  # the native layout, which EnvPool need not transpose
        threads=threads,
        bootstrap_truncated=False,  # the paper's code treats timeouts as terminal
        render_size=_RENDER_SIZE,
        rendering=rendering,
    )


def resolve(name: str, env_id: str) -> str:
    """EnvPool's id for GAME or GAME-MODE; raises ConfigError if there is none, EnvError if Procgen is missing."""
    game, _, mode = name.partition("-")
    if game not in GAMES:
        close = difflib.get_close_matches(game.lower(), GAMES, n=1)
        hint = f"; did you mean {'procgen:' + '-'.join([close[0], *([mode] if mode else [])])!r}?" if close else "."
        raise ConfigError(f"env.id is {env_id!r}, but Procgen's games are {', '.join(GAMES)}{hint}")
    mode = mode or "hard"
    allowed = modes(game)
    if mode not in allowed:
        close = difflib.get_close_matches(mode.lower(), allowed, n=1)
        hint = f"; did you mean 'procgen:{game}-{close[0]}'?" if close else "."
        raise ConfigError(f"env.id is {env_id!r}, but the modes of {game} are {', '.join(allowed)}{hint}")
    require_qt()
    return _task_id(game, mode)


def _task_id(game: str, mode: str) -> str:
    return f"{game.capitalize()}{mode.capitalize()}-v0"


def require_qt() -> None:
    """Raise EnvError, with the remedies, if EnvPool is missing or its Procgen does not load."""
    import_envpool()
    module = importlib.import_module("envpool.procgen")
    try:
        if "ProcgenEnvSpec" not in vars(module):
            importlib.reload(module)  # envpool was imported before anybatch could load Qt
        module.ProcgenEnvSpec  # noqa: B018 - raises the error of its import
    except (ImportError, AttributeError, RuntimeError) as error:
        raise EnvError(
            f"Procgen needs Qt 5: {install_command('procgen')} (which includes PyQt5-Qt5), or install the "
            f"system's Qt 5 package, such as libqt5gui5 on Debian and Ubuntu. Loading it failed with: {error}"
        ) from error
