"""``anybatch envs``: which environments can be trained on here."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import tyro

from anybatch.envs.installed import EnvFamily, catalog
from anybatch.errors import ConfigError

_MOST_IDS = 6  # of a family, where neither a word nor --all asks for more


@dataclass(frozen=True)
class EnvsArguments:
    """List the environments that are installed, and what would install the others."""

    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Only ids that contain all of these words, in any case of letters."""
    family: Literal["all", "procgen", "gym", "envpool"] = "all"
    """Only ids with this prefix."""
    all: bool = False
    """Every id, also of large families; without it those are counted."""


def envs_command(arguments: list[str]) -> int:
    """``anybatch envs``: print the families; returns the exit code.

    Raises:
        ConfigError: no environment fits the words.
    """
    asked = tyro.cli(EnvsArguments, args=arguments, prog="anybatch envs")
    families = [_chosen(family, asked.words) for family in catalog() if asked.family in ("all", family.prefix)]
    if asked.words:
        families = [family for family in families if family.ids]
        if not families:
            raise ConfigError(f"no environment's id contains {' and '.join(asked.words)}; anybatch envs lists families")
    width = min(shutil.get_terminal_size().columns, 120)
    print("\n".join(_lines(families, width, everything=asked.all or bool(asked.words))))
    if not asked.words:
        print("\nand every function of yours that makes a Gymnasium environment: import.path:function")
    return 0


def _chosen(family: EnvFamily, words: Iterable[str]) -> EnvFamily:
    ids = tuple(name for name in family.ids if all(word.lower() in name.lower() for word in words))
    return EnvFamily(family.prefix, family.name, ids, family.missing)


def _lines(families: list[EnvFamily], width: int, *, everything: bool) -> Iterable[str]:
    for family in families:
        state = f"not installed: {family.missing}" if family.missing else f"{len(family.ids)} installed"
        yield f"{family.prefix}, {family.name}: {state}"
        if family.missing and not everything:
            continue
        if family.prefix == "procgen" and not everything:
            yield "    procgen:GAME-MODE with one of"
            yield from _wrapped([f"{game}-{{{modes}}}" for game, modes in _modes(family.ids)], width)
        elif everything or len(family.ids) <= _MOST_IDS:
            yield from _wrapped(family.ids, width)
        else:
            examples = ", ".join(family.ids[:: max(1, len(family.ids) // 3)][:3])
            yield f"    {examples}, ... (--all lists them)"


def _modes(ids: Iterable[str]) -> list[tuple[str, str]]:
    """Procgen's ids, a game each with its modes: coinrun-easy, coinrun-hard to (coinrun, easy,hard)."""
    games: dict[str, list[str]] = {}
    for name in ids:
        game, _, mode = name.removeprefix("procgen:").partition("-")
        games.setdefault(game, []).append(mode)
    return [(game, ",".join(modes)) for game, modes in games.items()]


def _wrapped(words: Iterable[str], width: int) -> list[str]:
    return textwrap.wrap(
        "  ".join(words),
        width,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
