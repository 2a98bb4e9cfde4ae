"""``anybatch completion SHELL``: a script that completes commands, presets, options and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import tyro

from anybatch.cli.options import options

Shell = Literal["bash", "zsh"]
"""Shells that a script can be printed for."""


@dataclass(frozen=True)
class CompletionArguments:
    """Print a script that completes anybatch's commands and options in a shell.

    For this session: source <(anybatch completion bash); for good, that line in ~/.bashrc.
    """

    shell: tyro.conf.Positional[Shell]
    """The shell to print it for."""


def completion_command(arguments: list[str], kinds: Mapping[str, type], presets: Sequence[str]) -> int:
    """``anybatch completion SHELL``: print the script; returns the exit code.

    Args:
        arguments: the command line.
        kinds: the dataclass of every command.
        presets: what ``train`` and ``scale`` take first.
    """
    asked = tyro.cli(CompletionArguments, args=arguments, prog="anybatch completion")
    print(script(asked.shell, kinds, presets))
    return 0


def script(shell: Shell, kinds: Mapping[str, type], presets: Sequence[str]) -> str:
    """The completion script; arguments as for :func:`completion_command`. What it has no words for are files."""
    flags, values = [], []
    for command, kind in kinds.items():
        found = options(kind)
        names = " ".join(["--help", *(flag for option in found for flag in option.flags)])
        flags.append(f'    {command}) words="{names}" ;;')
        limited = [(option.flag, " ".join(option.choices)) for option in found if option.choices]
        values += [f'    "{command} {flag}") words="{choices}" ;;' for flag, choices in limited]
    first = "".join(f'    {command}) words="{" ".join(presets)}" ;;\n' for command in ("train", "scale"))
    first += f'    reproduce) words="list run status draw" ;;\n    completion) words="{" ".join(get_args(Shell))}" ;;\n'
    text = _BASH.format(commands=" ".join(kinds), first=first, values="\n".join(values), flags="\n".join(flags))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


_BASH = """_anybatch() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=""
  case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  elif [ -z "$words" ] && [ "${{cur:0:1}}" = "-" ]; then
    case "$command" in
{flags}
    esac
  elif [ -z "$words" ] && [ "$COMP_CWORD" -eq 2 ]; then
    case "$command" in
{first}    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _anybatch anybatch"""
