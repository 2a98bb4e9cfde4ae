"""Help that fits a screen for commands with many options: the usual ones, and the others a group at a time."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from anybatch.cli.options import GENERAL, Option, groups, options
from anybatch.errors import ConfigError

_WIDTH = 80
_HELP_FLAGS = ("-h", "--help")
_GENERAL_TEXT = "Length of the run, device, precision, and what is in no other group."
_USUAL = {
    "train": ("--env.id", "--env.num-envs", "--total-env-steps", "--out", "--seed", "--precision", "--device"),
    "scale": ("--divide-batch-by", "--to.num-envs", "--to.rollout-steps", "--to.minibatches", "--format", "--for"),
}


def help_page(command: str, arguments: Sequence[str], kind: type, instance: Any) -> str | None:
    """The page that the command line asks for.

    Args:
        command: train or scale.
        arguments: what follows it; ``--help`` asks for the short page, ``--help GROUP`` for a group.
        kind: the command's dataclass.
        instance: where defaults are taken from.

    Returns:
        The text; None if no help is asked for, or all of it (``--help all``), which is tyro's to print.

    Raises:
        ConfigError: there is no such group.
    """
    asked = [index for index, argument in enumerate(arguments) if argument in _HELP_FLAGS]
    if not asked:
        return None
    following = arguments[asked[0] + 1 : asked[0] + 2]
    if not following or following[0].startswith("-"):
        return _short_page(command, kind, instance)
    if following[0] == "all":
        return None
    return _group_page(following[0], kind, instance)


def _short_page(command: str, kind: type, instance: Any) -> str:
    found = {option.flag: option for option in options(kind, instance)}
    about = textwrap.wrap((kind.__doc__ or "").split("\n\n")[0], _WIDTH)
    lines = [f"usage: anybatch {command} PRESET [OPTIONS]", "", *about, ""]
    lines += [_line(flag, found[flag].help) for flag in _USUAL[command]]
    lines += ["", f"all {len(found)} options: --help all; a group of them: --help GROUP, with GROUP one of"]
    everything = {GENERAL: _GENERAL_TEXT, **groups(kind)}
    lines += [_line(name, text) for name, text in everything.items() if "." not in name]  # rollout.source is in rollout
    return "\n".join(lines)


def _group_page(group: str, kind: type, instance: Any) -> str:
    about = {GENERAL: _GENERAL_TEXT, **groups(kind)}
    if group not in about:
        raise ConfigError(f"--help {group} names no group of options; there are {', '.join(about)}, and all")
    chosen = [x for x in options(kind, instance) if x.group == group or x.group.startswith(f"{group}.")]
    lines = [f"{group}: {about[group]}", ""]
    for option in chosen:
        lines.append(f"  {', '.join(option.flags)}{_values(option)}")
        lines += textwrap.wrap(option.help, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"  {name:<18} {textwrap.shorten(text, _WIDTH - 21, placeholder=' ...')}"


def _values(option: Option) -> str:
    choices = f" {{{','.join(option.choices)}}}" if option.choices else ""
    if option.default in (dataclasses.MISSING, {}):
        return choices
    default = option.default
    words = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{choices} [{words}]"
