"""``anybatch train``: train a policy, after adjusting what depends on a changed batch."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from anybatch.cli.configured import PRESETS_IN_SHORT, given_fields, parse, warn_without_effect
from anybatch.cli.scale import report
from anybatch.config import fields
from anybatch.config.io import read_yaml
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import check_integer, validate
from anybatch.errors import ConfigError
from anybatch.presets import PRESETS, environments_for
from anybatch.runs.files import CONFIG
from anybatch.runs.trust import require_trust
from anybatch.scaling.changes import Change
from anybatch.scaling.options import TrainScaling
from anybatch.scaling.tuned_at import TunedAt, carry
from anybatch.system.exit_codes import DONE, INTERRUPTED
from anybatch.system.launcher import launcher_rank

if TYPE_CHECKING:
    from anybatch.training import TrainResult

_HELP = f"""usage: anybatch train PRESET [OPTIONS]

{textwrap.fill(f"Train a policy. PRESET is {PRESETS_IN_SHORT}; or a config.yaml.", 80, break_on_hyphens=False)}

  --env.id ID          required: procgen:GAME-MODE, gym:ID, envpool:ID, or
                       import.path:function for your own environment
  --env.num-envs N     parallel environments; dependent settings are adjusted
  --tuned-at.num-envs N  environments your hyperparameters were tuned with,
                       if not those of PRESET; they are scaled from there
  --total-env-steps N  environment steps to train for
  --init-from RUN      start from a run's weights; PRESET can then be omitted
  --out DIR            run folder (default: runs/PRESET-ENV-seedN)
  --seed N             seed of the run (default: that of config.yaml, or 0)
  --precision P        auto, fp32 or bf16; --device D: auto, cpu, cuda, cuda:N

all options: --help all; or --help SECTION, with SECTION one of
  env, model           environment; networks
  observation          normalisation of observations
  rollout, reward      length and source of rollouts; reward normalisation
  advantage, policy    advantage estimation; objective and proximal policy
  optimizer, aux       optimiser and minibatches; auxiliary phase (PPG)
  eval, log            evaluation while training; logs
  scaling, tuned-at    adjustments to a changed batch; batch of the tuning"""


@dataclass(frozen=True)
class Arguments:
    """Train a policy."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run folder; by default runs/PRESET-ENV-seedN."""
    seed: int | None = None
    """Seed of every random choice of the run; None means that of a run's config.yaml, or 0."""
    tuned_at: TunedAt = field(default_factory=TunedAt)
    from_ppo: bool = False
    """The hyperparameters are those of plain PPO: use the EWMA that limits the policy as strongly."""
    scaling: TrainScaling = field(default_factory=TrainScaling)
    init_from: Path | None = None
    """Run whose weights, statistics and optimiser are the start; without PRESET its config.yaml is used too."""
    go_on: bool = False
    """Continue the run in --out if its configuration is the same; do nothing if it has finished."""
    trust_code: bool = False
    """Import the Python code (import.path:function) named in a config.yaml from somebody else."""
    quiet: bool = False
    """Show no progress."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    given_preset, arguments = arguments[:1], _with_preset(arguments)
    preset, base, parsed = parse("train", arguments, Arguments, _HELP)
    if preset in PRESETS:
        if "env.id" not in given_fields(arguments):
            raise ConfigError(
                f"anybatch train {preset} needs an environment: --env.id, for example {environments_for(preset)}; "
                "anybatch envs lists those that are installed"
            )
    else:
        given = {
            name for name in ("env.id", "model.encoder") if fields.get(parsed.config, name) != fields.get(base, name)
        }
        require_trust(parsed.config, Path(preset).expanduser(), trust_code=parsed.trust_code, given=given)
    from anybatch.distributed.collectives import joined_process_group, on_main
    from anybatch.training import train

    config, changes = _scaled(base, parsed, given_fields(arguments))
    warn_without_effect(config, given_fields(arguments))
    # a run's file repeats the run; as the start of another one it does not
    repeats = [preset] == given_preset and preset not in PRESETS
    recorded = read_yaml(Path(preset).expanduser()) if repeats else {}
    seed = check_integer("seed", recorded.get("seed", 0), at_least=0) if parsed.seed is None else parsed.seed
    start = recorded.get("init_from")
    if start is not None and parsed.init_from is None and launcher_rank() == 0:
        print(
            f"{preset} belongs to a run that began from {start}, but this run begins from scratch; to repeat that "
            f"run, add --init-from {shlex.quote(str(start))}",
            file=sys.stderr,
        )
    keywords: dict[str, Any] = {"quiet": parsed.quiet, "changes": changes, "init_from": parsed.init_from}
    if parsed.go_on:
        from anybatch.grid.run_folder import train_or_resume

        if parsed.out is None:
            raise ConfigError("--go-on needs --out, the folder of the run to continue")
        return finish(train_or_resume(config, parsed.out, seed, **keywords))
    with joined_process_group():
        if parsed.out is not None:
            return finish(train(config, parsed.out, seed, **keywords))
        out = on_main(lambda: _new_folder(preset, config, seed))
        try:
            return finish(train(config, out, seed, **keywords))
        finally:
            with contextlib.suppress(OSError):  # a folder with something in it stays
                out.rmdir()


def _with_preset(arguments: list[str]) -> list[str]:
    """The command line with the configuration of the run in --init-from as PRESET if it has none."""
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
            name, _, value = word.partition("=")
            if name in ("--init-from", "--init_from") and (value or following):
                return [str(Path(value or following).expanduser() / CONFIG), *arguments]
    return arguments


def _scaled(base: TrainConfig, parsed: Arguments, given: Collection[str]) -> tuple[TrainConfig, list[Change]]:
    """Adjust the hyperparameters that depend on the batch, and print the changes.

    The batch of ``base``, the preset or file, is the reference unless --tuned-at names another, so the config.yaml of
    a run trains again without changes.
    """
    options, tuned_at = parsed.scaling, parsed.tuned_at
    if options.off:
        if tuned_at.numbers() or parsed.from_ppo:
            raise ConfigError(
                "--tuned-at and --from-ppo ask for scaled hyperparameters, but --scaling.off turns scaling off: use "
                "one or the other"
            )
        return parsed.config, []
    carried = carry(base, parsed.config, given, tuned_at, options, ppo=parsed.from_ppo)
    validate(carried.config)
    if launcher_rank() == 0:
        lines = [report(carried)] if carried.changes else carried.notes
        if carried.changes and not (tuned_at.numbers() or parsed.from_ppo):
            lines.append("to train without these changes, add --scaling.off")
        for line in lines:
            print(line)
    return carried.config, carried.changes


def finish(result: TrainResult) -> int:
    """Print how training ended; returns the exit code."""
    if launcher_rank() != 0:
        return INTERRUPTED if result.interrupted else DONE
    if result.interrupted:
        folder = shlex.quote(str(result.run_dir))
        print(f"stopped at {result.env_steps:,} environment steps; to continue: anybatch resume {folder}")
        return INTERRUPTED
    steps = f"{result.env_steps:,} steps"
    ended = f"done: {steps}" if result.stopped is None else f"ended after {steps}: {result.stopped}"
    mean = f"mean return of the last 100 episodes: {result.mean_episode_return:.2f}"
    print(f"{ended}; {'no episode ended' if math.isnan(result.mean_episode_return) else mean}")
    print(f"wrote {result.run_dir}")
    return DONE


def _new_folder(preset: str, config: TrainConfig, seed: int) -> Path:
    """Create the run folder with the default name, or that name with a number if it is taken."""
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(preset).stem}-{config.env.id.split(':')[-1]}-seed{seed}")
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 10_000))
    for path in candidates:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be created: {error.strerror}") from error
    raise ConfigError(f"all default names like {stem} are taken: choose a folder with --out")
