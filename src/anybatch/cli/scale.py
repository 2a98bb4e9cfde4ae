"""``anybatch scale``: hyperparameters for another batch size, as a table, a configuration, or for another framework."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
import yaml

from anybatch.cli.configured import PRESETS_IN_SHORT, given_fields, parse, warn_without_effect
from anybatch.config.io import to_dict, to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError
from anybatch.scaling.changes import Change
from anybatch.scaling.conditions import validity
from anybatch.scaling.findings import Finding
from anybatch.scaling.frameworks import translate
from anybatch.scaling.options import Adjustments
from anybatch.scaling.rescaling import table
from anybatch.scaling.tuned_at import BATCH, Carried, TunedAt, carry, divide

_HELP = f"""usage: anybatch scale PRESET [OPTIONS]

Show the hyperparameters that change with the batch size, without training.
{textwrap.fill(f"PRESET is {PRESETS_IN_SHORT}; or a config.yaml.", 80, break_on_hyphens=False)}

  --env.num-envs N     environments of the new batch; likewise --rollout.steps,
                       --optimizer.minibatches and --workers
  --divide-batch-by C  or divide both batches by C (the environments)
  --tuned-at.num-envs N  batch at which the hyperparameters were tuned, if it is
                       not the preset's; likewise --tuned-at.rollout-steps, ...
  --from-ppo           the hyperparameters are those of plain PPO: derive the
                       EWMA that limits the policy as strongly
  --format F           table, json, or yaml (anybatch train takes the YAML file)
  --for FRAMEWORK      arguments of sb3, cleanrl, rllib, torchrl, trl, rsl_rl

all options: --help all; or --help SECTION, with SECTION one of
  tuned-at, scaling    batch of the hyperparameters; adjustments to the new one
  env, observation, model, rollout, reward, advantage, policy, optimizer
  aux, log"""


@dataclass(frozen=True)
class Arguments:
    """Show the hyperparameters that change with the batch size, without training."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    divide_batch_by: float | None = None
    """Divide both batches by this, by the number of environments; below 1 it enlarges them."""
    tuned_at: TunedAt = field(default_factory=TunedAt)
    from_ppo: bool = False
    """The hyperparameters are those of plain PPO: use the EWMA that limits the policy as strongly."""
    scaling: Adjustments = field(default_factory=Adjustments)
    format: Literal["table", "json", "yaml"] = "table"
    """A table, JSON, or YAML that `anybatch train FILE.yaml` reads."""
    framework: Annotated[
        Literal["anybatch", "sb3", "cleanrl", "rllib", "trl", "torchrl", "rsl_rl"], tyro.conf.arg(name="for")
    ] = "anybatch"
    """Print the arguments of another framework: as text to type there, JSON, or YAML."""


def main(arguments: list[str]) -> int:
    """Run the command: print the scaled hyperparameters; returns the exit code."""
    _, base, parsed = parse("scale", arguments, Arguments, _HELP)
    carried = _carried(base, parsed, given_fields(arguments))
    warn_without_effect(carried.config, given_fields(arguments))
    config, findings = carried.config, validity(validate(carried.config), carried.tuned)
    if parsed.framework != "anybatch":
        print(_translated(config, [*findings, *carried.notes], parsed), end="")
    elif parsed.format == "json":
        content = {"changes": _plain(carried.changes), "findings": _plain(findings), "notes": carried.notes}
        print(_json({**content, "config": to_dict(config)}))
    elif parsed.format == "yaml":
        print("".join(f"# {line}\n" for line in report(carried).splitlines()) + to_yaml(config), end="")
    else:
        print(report(carried))
    return 0


def report(carried: Carried) -> str:
    """The two batches, the table of changes, unmet conditions of invariance, and what was assumed."""
    before, after = carried.tuned, carried.config
    batches = (
        f"iteration batch {before.iteration_batch:,} -> {after.iteration_batch:,} samples, "
        f"optimisation batch {before.optimization_batch:,g} -> {after.optimization_batch:,g}"
    )
    return "\n".join([batches, table(carried.changes), *map(str, validity(after, before)), *carried.notes])


def _translated(config: TrainConfig, findings: Sequence[Finding | str], parsed: Arguments) -> str:
    translation = translate(config, parsed.framework)
    if parsed.format == "table":
        return "".join(f"{line}\n" for line in (translation, *(f"# {finding}" for finding in findings)))
    if parsed.format == "json":
        content = {
            "framework": parsed.framework,
            "arguments": translation.arguments,
            "no_counterpart": translation.missing,
            "findings": _plain([x for x in findings if isinstance(x, Finding)]),
            "notes": [x for x in findings if isinstance(x, str)],
        }
        return f"{_json(content)}\n"
    notes = "".join(f"# {line}\n" for line in (*translation.missing, *findings))
    return notes + yaml.safe_dump(translation.arguments, sort_keys=False)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """``value`` with infinite numbers as text, as the configuration reads them: JSON has none."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(rows: Sequence[Change] | Sequence[Finding]) -> list[dict[str, object]]:
    return [dataclasses.asdict(row) for row in rows]


def _carried(base: TrainConfig, parsed: Arguments, given: Collection[str]) -> Carried:
    common = base, parsed.config, given
    if parsed.divide_batch_by is not None:
        return divide(*common, parsed.divide_batch_by, parsed.tuned_at, parsed.scaling, ppo=parsed.from_ppo)
    if not (set(BATCH) & set(given) or parsed.tuned_at.numbers() or parsed.from_ppo):
        raise ConfigError(
            "anybatch scale needs --divide-batch-by, or the new batch as --env.num-envs, --rollout.steps, "
            "--optimizer.minibatches or --workers"
        )
    return carry(*common, parsed.tuned_at, parsed.scaling, ppo=parsed.from_ppo)
