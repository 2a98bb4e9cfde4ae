"""``anybatch train``: train a policy, after adjusting what depends on a changed batch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from anybatch.cli.configured import parse
from anybatch.cli.main import DONE, INTERRUPTED
from anybatch.cli.scale import report
from anybatch.config import fields
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError
from anybatch.presets import PRESETS
from anybatch.runs.trust import require_trust
from anybatch.scaling.changes import Change, apply_changes
from anybatch.scaling.options import TrainScaling
from anybatch.scaling.rescaling import FIELDS, rescale
from anybatch.system.launcher import launcher_rank

if TYPE_CHECKING:
    from anybatch.training import TrainResult

_HELP = f"""usage: anybatch train PRESET [OPTIONS]

{textwrap.fill(f"Train a policy. PRESET is {', '.join(PRESETS)}, or a config.yaml.", 80)}

  --env.id ID          procgen:GAME-MODE, gym:ID, envpool:ID, or
                       import.path:function for your own environment
  --env.num-envs N     parallel environments; other numbers follow this one
  --total-env-steps N  environment steps to train for
  --out DIR            run folder (default: runs/PRESET-ENV-seedN)
  --seed N             seed of the run (default: 0)
  --precision P        auto, fp32 or bf16
  --device D           auto, cpu, cuda or cuda:N

all options: --help all; or --help SECTION, with SECTION one of
  env, model           environment; networks
  observation          normalisation of observations
  rollout, reward      length and source of rollouts; reward normalisation
  advantage, policy    advantage estimation; objective and proximal policy
  optimizer, aux       optimiser and minibatches; auxiliary phase (PPG)
  eval, log            evaluation while training; logs
  scaling              adjustments to a changed batch"""


@dataclass(frozen=True)
class Arguments:
    """Train a policy."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run folder; by default runs/PRESET-ENV-seedN."""
    seed: int = 0
    """Seed of every random choice of the run."""
    scaling: TrainScaling = field(default_factory=TrainScaling)
    go_on: bool = False
    """Continue the run in --out if it is the same one; do nothing if it is finished."""
    trust_code: bool = False
    """Import the Python code (import.path:function) that a config.yaml of somebody else names."""
    quiet: bool = False
    """Show no progress."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    preset, base, parsed = parse("train", arguments, Arguments, _HELP)
    if preset not in PRESETS:
        given = {
            name for name in ("env.id", "model.encoder") if fields.get(parsed.config, name) != fields.get(base, name)
        }
        require_trust(parsed.config, Path(preset), trust_code=parsed.trust_code, given=given)
    from anybatch.distributed.collectives import joined_process_group, on_main
    from anybatch.training import train

    config, changes = scale_to_batch(base, parsed.config, arguments, parsed.scaling)
    if changes and launcher_rank() == 0:
        print(f"{report(base, validate(config), changes)}\nto train without these changes: --scaling.off")
    if parsed.go_on:
        from anybatch.grid.run_folder import train_or_resume

        if parsed.out is None:
            raise ConfigError("--go-on needs --out, the folder of the run to continue")
        return finish(train_or_resume(config, parsed.out, parsed.seed, quiet=parsed.quiet, changes=changes))
    with joined_process_group():
        out = parsed.out or on_main(lambda: _free_folder(preset, config, parsed.seed))
        return finish(train(config, out, parsed.seed, quiet=parsed.quiet, changes=changes))


def scale_to_batch(
    base: TrainConfig, config: TrainConfig, arguments: Sequence[str], options: TrainScaling
) -> tuple[TrainConfig, list[Change]]:
    """Adjust what depends on the batch, if the command line has changed the batch of the preset or file.

    The batch of ``base``, the preset or file, is the reference, so the config.yaml of a run trains again without
    changes. ``config`` is the same after the command line; values given in ``arguments`` replace those of the rules.

    Returns:
        The configuration to train, and the changes; none if scaling is off or the batch is the base's.
    """
    batch, followers = FIELDS[:4], FIELDS[4:]
    asked = {name: fields.get(config, name) for name in batch if fields.get(config, name) != fields.get(base, name)}
    if options.off or not asked:
        return config, []
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    by_hand = {name: fields.get(config, name) for name in followers if f"--{name.replace('_', '-')}" in flags}
    overrides = {name: value for name, value in by_hand.items() if value is not None}
    # the rules start from the base's numbers, but from the user's choice of optimiser, proximal policy and so on
    start = apply_changes(config, [Change(name, 0, fields.get(base, name), "", "") for name in FIELDS])
    keywords = options.keywords() | {"staleness": options.staleness and base.stale}  # a fresh base has no age to keep
    return rescale(start, *(asked.get(name) for name in batch), overrides=overrides, **keywords)


def finish(result: TrainResult) -> int:
    """Print how training ended; returns the exit code."""
    if launcher_rank() != 0:
        return INTERRUPTED if result.interrupted else DONE
    if result.interrupted:
        print(f"stopped at {result.env_steps:,} environment steps; to continue: anybatch resume {result.run_dir}")
        return INTERRUPTED
    steps = f"{result.env_steps:,} steps"
    ended = f"done: {steps}" if result.stopped is None else f"ended after {steps}: {result.stopped}"
    print(f"{ended}; mean return of the last 100 episodes: {result.mean_episode_return:.2f}")
    print(f"wrote {result.run_dir}")
    return DONE


def _free_folder(preset: str, config: TrainConfig, seed: int) -> Path:
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(preset).stem}-{config.env.id.split(':')[-1]}-seed{seed}")
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 10_000))
    return next(path for path in candidates if not path.exists())
