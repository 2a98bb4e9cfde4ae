"""Entry point of the command ``anybatch``: runs a command's module, and turns errors into a sentence and exit code."""

from __future__ import annotations

import importlib
import os
import re
import select
import sys
import traceback
import warnings
from collections.abc import Sequence

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from anybatch.errors import AnybatchError, CheckpointError, ConfigError, ScalingWarning, UserCodeError, did_you_mean
from anybatch.presets import PAPER
from anybatch.system.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED
from anybatch.system.launcher import launcher_rank, started_by_launcher
from anybatch.system.signals import exit_beside_hung_threads

COMMANDS = (
    *("train", "resume", "grid", "eval", "watch", "doctor", "reproduce", "report", "scale", "envs", "completion"),
)
"""Commands; each is the function ``main``, which returns the exit code, in the module of this package with its name."""
_PARSE = ("train", "scale", "reproduce")  # they take the command line, the others parsed arguments

# tyro would have to import every command to list them, which takes longer than the page should
_HELP = f"""usage: anybatch COMMAND ...

training
  train PRESET     train; PRESET is {", ".join(PAPER)}, one for
                   control, mujoco or atari such as ppo-mujoco, or a config.yaml
  resume RUN       continue an interrupted run
  grid FILE...     train a list of runs: here, on Ray, or in a queue
results
  eval RUN         evaluate a trained policy; print its mean return
  watch RUN        write a video of a trained policy
  doctor RUN       diagnose a run; check the conditions of the scaling rules
  reproduce        the paper's figures and tables: list, run, status, draw
  report FOLDER... write a self-contained HTML page about results or runs
batch size
  scale PRESET     show the hyperparameters that change with the batch size
installation
  envs             list installed environments, and how to install others
  completion SHELL print a script for completion in bash or zsh
  --version        print the version

anybatch COMMAND --help explains the options of a command."""


_INTEGERS = ConstructorRegistry()
"""Rule by which tyro reads integers: 1e6 is one, as it is in files."""


@_INTEGERS.primitive_rule
def _whole_number(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    def read(words: list[str]) -> int:
        try:
            return int(words[0])
        except ValueError:
            if not float(words[0]).is_integer():
                raise ValueError(f"{words[0]} is not an integer") from None
            return int(float(words[0]))

    if kind.type is not int:
        return None
    return PrimitiveConstructorSpec(1, "INT", read, lambda x: type(x) is int, lambda x: [str(x)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted (resumable)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)  # commands print these findings themselves
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        code = _main(list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        exit_beside_hung_threads(code)
    return code


def _show_warning(message: Warning | str, *_: object) -> None:
    """Print a warning without the line of code that it comes from."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _main(arguments: list[str]) -> int:
    # the user's own environments and encoders, import.path:name; last, so that they shadow nothing
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        try:
            with _INTEGERS:
                return _run(arguments)
        finally:
            sys.stdout.flush()  # also after --help, which raises SystemExit
    except (ConfigError, CheckpointError) as error:
        if launcher_rank() == 0:  # all data-parallel workers have the same error
            print(f"anybatch: {error}", file=sys.stderr)
        return BAD_INPUT
    except (AnybatchError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return FAILED
        worker = f" (worker {launcher_rank()})" if started_by_launcher() else ""
        print(f"anybatch{worker}: {error}", file=sys.stderr)
        if isinstance(error, UserCodeError) and error.__cause__ is not None:
            traceback.print_exception(_users_part(error.__cause__))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP)
        return DONE if arguments else BAD_INPUT
    command, *rest = arguments
    if command == "--version":
        from anybatch._version import __version__

        print(f"anybatch {__version__}")
        return DONE
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        raise ConfigError(f"command is {command!r}, but must be one of {', '.join(COMMANDS)}{hint}")
    for before, word in zip(arguments, rest, strict=False):
        if not word or re.fullmatch(r"--[\w.-]+=", word):  # as a path it would be the current folder
            raise ConfigError(f"the word after {word or before} is empty, perhaps because a variable is not set")
    run = importlib.import_module(f"anybatch.cli.{command}").main
    code: int = run(rest) if command in _PARSE else tyro.cli(run, args=rest, prog=f"anybatch {command}")
    return code


def _reader_is_gone() -> bool:
    """Whether nobody reads the output any more, such as head; then the rest of it, written at the end, goes nowhere."""
    output = select.poll()
    output.register(1, 0)
    if not output.poll(0):  # errors alone
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _users_part(error: BaseException) -> BaseException:
    """An exception without the frames of anybatch that called the user's code."""
    ours, frame = os.path.dirname(os.path.dirname(__file__)), error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    return error.with_traceback(frame)
