"""The commands around batch sizes: what ``train`` does about a changed batch, ``scale`` and ``doctor``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
import yaml

from anybatch import scaling
from anybatch.config.io import to_dict, to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.diagnostics.doctor import examine
from anybatch.errors import ConfigError
from anybatch.runs.files import PROGRESS
from anybatch.runs.progress import read_progress
from anybatch.runs.run import read_config
from anybatch.scaling.changes import Change, apply_changes, get_field
from anybatch.scaling.conditions import validity
from anybatch.scaling.findings import Finding
from anybatch.scaling.frameworks import translate
from anybatch.scaling.options import Adjustments, TrainScaling


def scale_to_batch(
    base: TrainConfig, config: TrainConfig, arguments: Sequence[str], options: TrainScaling
) -> tuple[TrainConfig, list[Change]]:
    """Adjust what depends on the batch, if the command line has changed the batch of the preset or file.

    The base's own batch is the reference, so a run's config.yaml trains again as it stands.

    Args:
        base: the preset or file.
        config: the same after the command line.
        arguments: the command line, which tells what was set by hand: that wins over the rules.
        options: which rules.

    Returns:
        What to train, and the changes; none if scaling is off or the batch is the base's.

    Raises:
        ConfigError: the new batch does not fit.
    """
    batch, followers = scaling.FIELDS[:4], scaling.FIELDS[4:]
    asked = {name: get_field(config, name) for name in batch if get_field(config, name) != get_field(base, name)}
    if options.off or not asked:
        return config, []
    flags = {argument.split("=")[0].replace("_", "-") for argument in arguments}
    yours = {name: get_field(config, name) for name in followers if f"--{name.replace('_', '-')}" in flags}
    yours = {name: value for name, value in yours.items() if value is not None}
    # the rules start from the base's numbers, but from the user's choice of optimiser, proximal policy and so on
    start = apply_changes(config, [Change(name, 0, get_field(base, name), "", "") for name in scaling.FIELDS])
    return scaling.rescale(start, *(asked.get(name) for name in batch), yours=yours, **options.keywords())


def report(before: TrainConfig, after: TrainConfig, changes: Sequence[Change]) -> str:
    """The two batches, the table of changes, and what stands against invariance."""
    batches = (
        f"iteration batch {before.iteration_batch:,} -> {after.iteration_batch:,} samples, "
        f"optimisation batch {before.optimization_batch:,g} -> {after.optimization_batch:,g}"
    )
    return "\n".join([batches, scaling.table(changes), *map(str, validity(after, before))])


@dataclass(frozen=True)
class Target:
    """The batch to scale to; what is left out stays."""

    num_envs: int | None = None
    """Environments over all workers."""
    rollout_steps: int | None = None
    """Timesteps per rollout."""
    minibatches: int | None = None
    """Minibatches per epoch."""
    workers: int | None = None
    """Data-parallel workers; by default they follow the environments."""


@dataclass(frozen=True)
class ScaleArguments:
    """Show what has to change with the batch size; nothing is trained.

    Options like --env.num-envs and --optimizer.step-size describe where the hyperparameters were tuned.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    divide_batch_by: float | None = None
    """Divide both batches by this, through the number of environments; below 1 enlarges them."""
    to: Target = field(default_factory=Target)
    scaling: Adjustments = field(default_factory=Adjustments)
    format: Literal["table", "json", "yaml"] = "table"
    """A table, JSON, or YAML that `anybatch train FILE.yaml` takes."""
    framework: Annotated[Literal["anybatch", "sb3", "cleanrl", "rllib", "trl"], tyro.conf.arg(name="for")] = "anybatch"
    """Print the arguments of another framework instead: what to type there, or as JSON or YAML."""


def scale_command(name: str, base: TrainConfig, arguments: list[str]) -> int:
    """``anybatch scale PRESET``: print the scaled hyperparameters."""
    asked = tyro.cli(ScaleArguments, args=arguments, prog=f"anybatch scale {name}", default=ScaleArguments(config=base))
    tuned = asked.config
    config, changes = _scaled(tuned, asked)
    validate(config)
    if asked.framework != "anybatch":
        print(_foreign(config, validity(config, tuned), asked), end="")
    elif asked.format == "json":
        findings = [dataclasses.asdict(finding) for finding in validity(config, tuned)]
        content = {"changes": [dataclasses.asdict(x) for x in changes], "findings": findings, "config": to_dict(config)}
        print(json.dumps(content, indent=2))
    elif asked.format == "yaml":
        print("".join(f"# {line}\n" for line in report(tuned, config, changes).splitlines()) + to_yaml(config), end="")
    else:
        print(report(tuned, config, changes))
    return 0


def _foreign(config: TrainConfig, findings: Sequence[Finding], asked: ScaleArguments) -> str:
    translation = translate(config, asked.framework)
    if asked.format == "table":
        return "".join(f"{line}\n" for line in (translation, *(f"# {finding}" for finding in findings)))
    if asked.format == "json":
        content = {
            "framework": asked.framework,
            "arguments": translation.arguments,
            "no_counterpart": translation.missing,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        return json.dumps(content, indent=2) + "\n"
    notes = "".join(f"# {line}\n" for line in (*translation.missing, *findings))
    return notes + yaml.safe_dump(translation.arguments, sort_keys=False)


def _scaled(tuned: TrainConfig, asked: ScaleArguments) -> tuple[TrainConfig, list[Change]]:
    keywords, to = asked.scaling.keywords(), asked.to
    if asked.divide_batch_by is None:
        if to == Target():
            raise ConfigError("anybatch scale needs --divide-batch-by, or --to.num-envs and the other --to options")
        return scaling.rescale(tuned, to.num_envs, to.rollout_steps, to.minibatches, to.workers, **keywords)
    if to != Target(workers=to.workers) or keywords.pop("rule") != "paper":
        raise ConfigError("--divide-batch-by goes with --to.workers alone; use --to.num-envs and the others without it")
    return scaling.scale(tuned, asked.divide_batch_by, workers=to.workers, **keywords)


@dataclass(frozen=True)
class DoctorArguments:
    """Check a run's log: what was seen, what it means, what to change."""

    run: tyro.conf.Positional[Path]
    """Run folder; the run may still be going on."""


def doctor_command(arguments: list[str]) -> int:
    """``anybatch doctor RUN``: print findings, one line each; then what stands against invariance from the start."""
    parsed = tyro.cli(DoctorArguments, args=arguments, prog="anybatch doctor")
    config, _ = read_config(parsed.run)
    progress = read_progress(parsed.run / PROGRESS)
    findings: list[Finding] = examine(progress, config)
    print(f"{len(progress.get('iteration', []))} iterations; the last tenth of them, 20 at least:")
    print("\n".join(map(str, findings)) or "nothing to say yet")
    seen = {finding.check for finding in findings}
    conditions = [finding for finding in validity(config) if finding.check not in seen]
    if conditions:
        print("and for behaving the same at another batch size:")
        print("\n".join(map(str, conditions)))
    return 0
