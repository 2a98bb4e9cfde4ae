"""``anybatch completion``: a script that completes commands, presets, options and their values.

tyro has such scripts too, but its bash script starts Python at every key press and does not complete file names in
place of a preset, and its zsh script cannot be sourced.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from typing import Literal

import tyro

from anybatch.cli.main import COMMANDS
from anybatch.presets import PRESETS

FIRST = {
    "train": PRESETS,
    "scale": PRESETS,
    "reproduce": ("list", "run", "status", "draw"),
    "completion": ("bash", "zsh"),
}
"""Words that may follow a command."""


def main(shell: Literal["bash", "zsh"], /) -> int:
    """Print a script that completes anybatch's commands and options in a shell.

    For this session: source <(anybatch completion bash)

    For every session: put that line into ~/.bashrc.

    Args:
        shell: Shell that the script is for.
    """
    print(script(shell))
    return 0


def script(shell: Literal["bash", "zsh"]) -> str:
    """Completion script; words that it does not know are completed as file names."""
    flags, values = [], []
    for command in COMMANDS:
        page = _help(command)
        lines = re.findall(r"^[^\w-]*(?:-h, )?((?:--[a-z][\w.-]*(?:, )?)+)", page, re.M)
        words = " ".join(lines).replace(",", "").split()
        flags.append(f'    {command}) words="{" ".join(words)}" ;;')
        choices = re.findall(r"^[^\w-]*(--[\w.-]+) \{((?!None\})[\w,-]+)\}", page, re.M)
        values += [f'    "{command} {flag}") words="{words.replace(",", " ")}" ;;' for flag, words in choices]
    first = [f'    {command}) words="{" ".join(words)}" ;;' for command, words in FIRST.items()]
    text = _BASH.format(*("\n".join(lines) for lines in (values, flags, first)), commands=" ".join(COMMANDS))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def _help(command: str) -> str:
    """Help of a command with all its options; of reproduce, that of ``run``, whose options the others share."""
    arguments = ["run", "--help"] if command == "reproduce" else ["--help"]
    module = importlib.import_module(f"anybatch.cli.{command}")
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        tyro.cli(getattr(module, "Arguments", module.main), args=arguments)
    return re.sub(r"\x1b\[[\d;]*m", "", output.getvalue())


_BASH = """_anybatch() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=""
  case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  elif [ -z "$words" ] && [ "${{cur:0:1}}" = "-" ]; then
    case "$command" in
{}
    esac
  elif [ -z "$words" ] && [ "$COMP_CWORD" -eq 2 ]; then
    case "$command" in
{}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _anybatch anybatch"""
