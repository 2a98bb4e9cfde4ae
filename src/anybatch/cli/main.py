"""The command line: ``anybatch COMMAND ...``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from anybatch.config.io import read_config_file
from anybatch.config.schema import TrainConfig
from anybatch.errors import AnybatchError, CheckpointError, ConfigError
from anybatch.presets import PRESETS
from anybatch.scaling.options import TrainScaling
from anybatch.system.launcher import launcher_rank, started_by_launcher
from anybatch.system.signals import exit_beside_hung_threads

if TYPE_CHECKING:
    from anybatch.training import TrainResult

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_HELP = """usage: anybatch COMMAND ...

training
  train PRESET     train; PRESET is {presets}, or a config.yaml
  resume RUN       go on with an interrupted run
  grid FILE...     train a list of runs: here, on a Ray cluster, or as commands for a queue
looking at runs
  eval RUN         play episodes with a trained policy and print their mean return
  watch RUN        write a video of a trained policy
  doctor RUN       say what is wrong with a run, and whether the scaling rules hold for it
  reproduce        the paper's figures and tables: list, run, status, draw
  report FOLDER... a self-contained HTML page about results or runs
batch size
  scale PRESET     show what has to change with the batch size
this installation
  envs             list the environments that are installed, and what would install the others
  completion SHELL print what completes commands and options in bash or zsh
  --version        print the version

Every command explains its options with --help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted (resumable)."""
    code = _main(list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        exit_beside_hung_threads(code)
    return code


def _main(arguments: list[str]) -> int:
    # environments and encoders of one's own, import.path:name; last, to shadow nothing
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP.format(presets=", ".join(PRESETS)))
        return DONE if arguments else BAD_INPUT
    if arguments[0] == "--version":
        from anybatch._version import __version__

        print(f"anybatch {__version__}")
        return DONE
    command = _COMMANDS.get(arguments[0])
    try:
        if command is None:
            raise ConfigError(f"command is {arguments[0]!r}, but must be one of {', '.join(_COMMANDS)}")
        return command(arguments[1:])
    except (ConfigError, CheckpointError) as error:
        if launcher_rank() == 0:  # it is the same for all data-parallel workers
            print(f"anybatch: {error}", file=sys.stderr)
        return BAD_INPUT
    except (AnybatchError, OSError) as error:
        who = f" (worker {launcher_rank()})" if started_by_launcher() else ""
        print(f"anybatch{who}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


@dataclass(frozen=True)
class TrainArguments:
    """Train a policy."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run folder; by default runs/PRESET-ENV-seedN."""
    seed: int = 0
    """Every random choice of the run follows from it."""
    scaling: TrainScaling = field(default_factory=TrainScaling)
    go_on: bool = False
    """Go on with the run that out holds if it is this one, and do nothing if it is finished."""
    quiet: bool = False
    """Show no progress."""


def _train(arguments: list[str]) -> int:
    name, rest = _first(arguments, "train", f"PRESET, one of {', '.join(PRESETS)}, or the path of a config.yaml")
    base = _preset(name)
    _explain("train", rest, TrainArguments, TrainArguments(config=base))
    parsed = tyro.cli(
        TrainArguments,
        args=rest,
        prog=f"anybatch train {name}",
        default=TrainArguments(config=base),
    )
    from anybatch.cli.scaling import report, scale_to_batch
    from anybatch.config.validation import validate
    from anybatch.distributed.collectives import joined_process_group, on_main
    from anybatch.training import train

    config, changes = scale_to_batch(base, parsed.config, rest, parsed.scaling)
    if changes and launcher_rank() == 0:
        print(f"{report(base, validate(config), changes)}\nto train without this: --scaling.off")
    if parsed.go_on:
        from anybatch.grid.run_folder import train_or_resume

        if parsed.out is None:
            raise ConfigError("--go-on needs --out, the folder to go on in")
        return _ended(train_or_resume(config, parsed.out, parsed.seed, quiet=parsed.quiet, changes=changes))
    with joined_process_group():
        out = parsed.out or on_main(lambda: _free_folder(name, config, parsed.seed))
        return _ended(train(config, out, parsed.seed, quiet=parsed.quiet, changes=changes))


@dataclass(frozen=True)
class ResumeArguments:
    """Go on with an interrupted run from its newest checkpoint."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    total_env_steps: int | None = None
    """Train up to this many environment steps instead of what the run's config.yaml says."""
    quiet: bool = False
    """Show no progress."""


def _resume(arguments: list[str]) -> int:
    parsed = tyro.cli(ResumeArguments, args=arguments, prog="anybatch resume")
    from anybatch.training import resume

    return _ended(resume(parsed.run, total_env_steps=parsed.total_env_steps, quiet=parsed.quiet))


@dataclass(frozen=True)
class EvalArguments:
    """Play complete episodes with a trained policy; Procgen runs on a limited set of levels also play unseen ones."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    episodes: int = 100
    """Episodes to play."""
    seed: int = 0
    """Seed of environments and actions."""
    greedy: bool = False
    """Take the most likely action instead of sampling."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto."""


def _eval(arguments: list[str]) -> int:
    parsed = tyro.cli(EvalArguments, args=arguments, prog="anybatch eval")
    from anybatch.runs.evaluation import evaluate, load_policy, unseen_levels

    policy = load_policy(parsed.run, device=parsed.device)
    unseen = unseen_levels(policy.config.env)
    label = "mean return" if unseen is None else "mean return on training levels"
    print(f"{label}: {evaluate(policy, None, parsed.episodes, parsed.seed, greedy=parsed.greedy)}")
    if unseen is not None:
        elsewhere = evaluate(policy, unseen, parsed.episodes, parsed.seed, greedy=parsed.greedy)
        print(f"mean return on unseen levels: {elsewhere}")
    return DONE


@dataclass(frozen=True)
class WatchArguments:
    """Write a video of a trained policy."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    video: Path = Path("anybatch.mp4")
    """File to write, .mp4 or .gif."""
    episodes: int = 1
    """Episodes to play."""
    seed: int = 0
    """Seed of environment and actions."""
    fps: int = 15
    """Frames a second."""


def _watch(arguments: list[str]) -> int:
    parsed = tyro.cli(WatchArguments, args=arguments, prog="anybatch watch")
    from anybatch.runs.evaluation import load_policy
    from anybatch.runs.video import record

    policy = load_policy(parsed.run, device="cpu")
    frames = record(policy, parsed.video, episodes=parsed.episodes, seed=parsed.seed, fps=parsed.fps)
    print(f"wrote {frames} frames to {parsed.video}")
    return DONE


def _scale(arguments: list[str]) -> int:
    name, rest = _first(arguments, "scale", f"PRESET, one of {', '.join(PRESETS)}, or the path of a config.yaml")
    from anybatch.cli.scaling import ScaleArguments, scale_command

    base = _preset(name)
    _explain("scale", rest, ScaleArguments, ScaleArguments(config=base))
    return scale_command(name, base, rest)


def _grid(arguments: list[str]) -> int:
    from anybatch.cli.grid import grid_command

    return grid_command(arguments)


def _doctor(arguments: list[str]) -> int:
    from anybatch.cli.scaling import doctor_command

    return doctor_command(arguments)


def _envs(arguments: list[str]) -> int:
    from anybatch.cli.envs import envs_command

    return envs_command(arguments)


def _completion(arguments: list[str]) -> int:
    from anybatch.cli.completion import completion_command

    return completion_command(arguments, argument_classes(), tuple(PRESETS))


def argument_classes() -> dict[str, type]:
    """The dataclass behind the options of every command, by the command's name."""
    from anybatch.cli.completion import CompletionArguments
    from anybatch.cli.envs import EnvsArguments
    from anybatch.cli.grid import GridArguments
    from anybatch.cli.reproduce import ReportArguments, RunArguments
    from anybatch.cli.scaling import DoctorArguments, ScaleArguments

    return {
        "train": TrainArguments,
        "resume": ResumeArguments,
        "grid": GridArguments,
        "eval": EvalArguments,
        "watch": WatchArguments,
        "doctor": DoctorArguments,
        "scale": ScaleArguments,
        "reproduce": RunArguments,  # of its first command; the others take some of these
        "report": ReportArguments,
        "envs": EnvsArguments,
        "completion": CompletionArguments,
    }


def _reproduce(arguments: list[str]) -> int:
    from anybatch.cli.reproduce import reproduce_command

    return reproduce_command(arguments)


def _report(arguments: list[str]) -> int:
    from anybatch.cli.reproduce import report_command

    return report_command(arguments)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "grid": _grid,
    "eval": _eval,
    "watch": _watch,
    "scale": _scale,
    "doctor": _doctor,
    "reproduce": _reproduce,
    "report": _report,
    "envs": _envs,
    "completion": _completion,
}


def _explain(command: str, arguments: list[str], kind: type, defaults: object) -> None:
    """Print the help page that ``arguments`` ask for and stop; tyro prints the page with all options."""
    from anybatch.cli.help import help_page

    page = help_page(command, arguments, kind, defaults)
    if page is not None:
        print(page)
        raise SystemExit(DONE)
    asked = [index for index, argument in enumerate(arguments) if argument in ("-h", "--help")]
    if asked:  # for all options, by the word that follows
        del arguments[asked[0] + 1]


def _first(arguments: list[str], command: str, what: str) -> tuple[str, list[str]]:
    """Split the leading word off; ``--help`` alone explains the first preset."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        return next(iter(PRESETS)), arguments
    raise ConfigError(f"anybatch {command} needs {what}")


def _preset(name: str) -> TrainConfig:
    if name in PRESETS:
        return PRESETS[name]()
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"preset is {name!r}, but must be one of {', '.join(PRESETS)}, or the path of a config.yaml")
    return read_config_file(path)


def _free_folder(name: str, config: TrainConfig, seed: int) -> Path:
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(name).stem}-{config.env.id.split(':')[-1]}-seed{seed}")
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 10_000))
    return next(path for path in candidates if not path.exists())


def _ended(result: TrainResult) -> int:
    if launcher_rank() != 0:
        return INTERRUPTED if result.interrupted else DONE
    if result.interrupted:
        print(f"stopped at {result.env_steps:,} environment steps; go on with: anybatch resume {result.run_dir}")
        return INTERRUPTED
    print(f"done: {result.env_steps:,} steps; the last 100 episodes returned {result.mean_episode_return:.2f}")
    print(f"wrote {result.run_dir}")
    return DONE
