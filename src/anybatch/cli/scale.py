"""``anybatch scale``: hyperparameters for another batch size, as a table, a configuration, or for another framework."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
import yaml

from anybatch.cli.configured import parse
from anybatch.config.io import to_dict, to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError
from anybatch.presets import PRESETS
from anybatch.scaling.changes import Change
from anybatch.scaling.conditions import validity
from anybatch.scaling.findings import Finding
from anybatch.scaling.frameworks import translate
from anybatch.scaling.options import Adjustments
from anybatch.scaling.rescaling import rescale, scale, table

_HELP = f"""usage: anybatch scale PRESET [OPTIONS]

Show which hyperparameters change with the batch size, without training.
{textwrap.fill(f"PRESET is {', '.join(PRESETS)}, or a config.yaml.", 80, break_on_hyphens=False)}

  --divide-batch-by C  divide both batches by C, by the number of environments
  --to.num-envs N      or name the new numbers: environments,
  --to.rollout-steps N   timesteps per rollout,
  --to.minibatches N     minibatches per epoch
  --format F           table, json, or yaml (anybatch train takes the YAML file)
  --for FRAMEWORK      print arguments of sb3, cleanrl, rllib, trl, torchrl or rsl_rl

Fields like --env.num-envs describe where the hyperparameters were tuned.

all options: --help all; or --help SECTION, with SECTION one of
  to, scaling          new batch; adjustments to it
  env, observation, model, rollout, reward, advantage, policy, optimizer
  aux, log"""


@dataclass(frozen=True)
class Target:
    """The new batch; numbers that are left out stay."""

    num_envs: int | None = None
    """Environments, summed over all workers."""
    rollout_steps: int | None = None
    """Timesteps per rollout."""
    minibatches: int | None = None
    """Minibatches per epoch."""
    workers: int | None = None
    """Data-parallel workers; by default they follow the environments."""


@dataclass(frozen=True)
class Arguments:
    """Show which hyperparameters change with the batch size, without training.

    Options like --env.num-envs describe where the hyperparameters were tuned.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    divide_batch_by: float | None = None
    """Divide both batches by this, by the number of environments; below 1 it enlarges them."""
    to: Target = field(default_factory=Target)
    scaling: Adjustments = field(default_factory=Adjustments)
    format: Literal["table", "json", "yaml"] = "table"
    """A table, JSON, or YAML that `anybatch train FILE.yaml` takes."""
    framework: Annotated[
        Literal["anybatch", "sb3", "cleanrl", "rllib", "trl", "torchrl", "rsl_rl"], tyro.conf.arg(name="for")
    ] = "anybatch"
    """Print the arguments of another framework: as text to type there, JSON, or YAML."""


def main(arguments: list[str]) -> int:
    """Run the command: print the scaled hyperparameters; returns the exit code."""
    _, _, parsed = parse("scale", arguments, Arguments, _HELP)
    tuned = parsed.config
    config, changes = _scaled(tuned, parsed)
    findings = validity(validate(config), tuned)
    if parsed.framework != "anybatch":
        print(_translated(config, findings, parsed), end="")
    elif parsed.format == "json":
        content = {"changes": _plain(changes), "findings": _plain(findings), "config": to_dict(config)}
        print(json.dumps(content, indent=2))
    elif parsed.format == "yaml":
        print("".join(f"# {line}\n" for line in report(tuned, config, changes).splitlines()) + to_yaml(config), end="")
    else:
        print(report(tuned, config, changes))
    return 0


def report(before: TrainConfig, after: TrainConfig, changes: Sequence[Change]) -> str:
    """The two batches, the table of changes, and unmet conditions of invariance."""
    batches = (
        f"iteration batch {before.iteration_batch:,} -> {after.iteration_batch:,} samples, "
        f"optimisation batch {before.optimization_batch:,g} -> {after.optimization_batch:,g}"
    )
    return "\n".join([batches, table(changes), *map(str, validity(after, before))])


def _translated(config: TrainConfig, findings: Sequence[Finding], parsed: Arguments) -> str:
    translation = translate(config, parsed.framework)
    if parsed.format == "table":
        return "".join(f"{line}\n" for line in (translation, *(f"# {finding}" for finding in findings)))
    if parsed.format == "json":
        content = {
            "framework": parsed.framework,
            "arguments": translation.arguments,
            "no_counterpart": translation.missing,
            "findings": _plain(findings),
        }
        return json.dumps(content, indent=2) + "\n"
    notes = "".join(f"# {line}\n" for line in (*translation.missing, *findings))
    return notes + yaml.safe_dump(translation.arguments, sort_keys=False)


def _plain(rows: Sequence[Change] | Sequence[Finding]) -> list[dict[str, object]]:
    return [dataclasses.asdict(row) for row in rows]


def _scaled(tuned: TrainConfig, parsed: Arguments) -> tuple[TrainConfig, list[Change]]:
    keywords, to = parsed.scaling.keywords(), parsed.to
    if parsed.divide_batch_by is None:
        if to == Target():
            raise ConfigError("anybatch scale needs --divide-batch-by, or --to.num-envs and the other --to options")
        return rescale(tuned, to.num_envs, to.rollout_steps, to.minibatches, to.workers, **keywords)
    if to != Target(workers=to.workers) or keywords.pop("rule") != "paper":
        raise ConfigError("--divide-batch-by goes with --to.workers alone; use --to.num-envs and the others without it")
    return scale(tuned, parsed.divide_batch_by, workers=to.workers, **keywords)
