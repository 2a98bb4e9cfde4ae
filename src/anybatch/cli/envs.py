"""``anybatch envs``: list of environments."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from anybatch.errors import ConfigError

if TYPE_CHECKING:
    from anybatch.envs.installed import EnvFamily

_MAX_IDS = 6  # per family, unless a word or --all asks for more


def main(
    words: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[WORD...]", help_behavior_hint="")] = (),
    /,
    family: Literal["all", "procgen", "gym", "envpool"] = "all",
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """List the installed environments, and the commands that install the others.

    Args:
        words: List only ids that contain all of these words, ignoring case.
        family: List only ids with this prefix.
        all: List every id, including those of large families, which are otherwise only counted.

    Raises:
        ConfigError: no environment matches the words.
    """
    from anybatch.envs.installed import catalog

    families = [_matching(x, words) for x in catalog() if family in ("all", x.prefix)]
    if words:
        families = [x for x in families if x.ids]
        if not families:
            raise ConfigError(f"no environment's id contains {' and '.join(words)}; anybatch envs lists families")
    width = min(shutil.get_terminal_size().columns, 120)
    print("\n".join(_lines(families, width, everything=all or bool(words))))
    if not words:
        print("\nand your own Gymnasium environments, as import.path:function")
    return 0


def _matching(family: EnvFamily, words: Iterable[str]) -> EnvFamily:
    ids = tuple(name for name in family.ids if all(word.lower() in name.lower() for word in words))
    return dataclasses.replace(family, ids=ids)


def _lines(families: list[EnvFamily], width: int, *, everything: bool) -> Iterable[str]:
    for family in families:
        state = f"not installed: {family.missing}" if family.missing else f"{len(family.ids)} installed"
        yield f"{family.prefix}, {family.name}: {state}"
        if family.missing and not everything:
            continue
        if family.prefix == "procgen" and not everything:
            yield "    procgen:GAME-MODE with one of"
            yield from _wrapped([f"{game}-{{{modes}}}" for game, modes in _modes(family.ids)], width)
        elif everything or len(family.ids) <= _MAX_IDS:
            yield from _wrapped(family.ids, width)
        else:
            examples = ", ".join(family.ids[:: max(1, len(family.ids) // 3)][:3])
            yield f"    {examples}, ... (--all lists them)"


def _modes(ids: Iterable[str]) -> list[tuple[str, str]]:
    """Modes of each Procgen game: coinrun-easy, coinrun-hard gives (coinrun, easy,hard)."""
    games: dict[str, list[str]] = {}
    for name in ids:
        game, _, mode = name.removeprefix("procgen:").partition("-")
        games.setdefault(game, []).append(mode)
    return [(game, ",".join(modes)) for game, modes in games.items()]


def _wrapped(words: Iterable[str], width: int) -> list[str]:
    lines = textwrap.wrap("  ".join(words), width - 4, break_long_words=False, break_on_hyphens=False)
    return [f"    {line}" for line in lines]
