"""A run folder: made for a new run, read, and opened to continue its run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from anybatch._version import __version__
from anybatch.config import fields
from anybatch.config.encoders import is_in_main
from anybatch.config.io import OTHER_ENTRIES, from_dict, read_yaml, to_yaml
from anybatch.config.schedules import CONSTANT, SCHEDULES, factor, scheduled_numbers
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import check_integer
from anybatch.distributed.collectives import on_main
from anybatch.envs.registry import environment_id, is_importable
from anybatch.errors import CheckpointError, ConfigError, shown
from anybatch.runs import checkpoint
from anybatch.runs.edited import differences
from anybatch.runs.files import CHECKPOINTS, CONFIG, PROGRESS, SCALING_JSON, SCALING_TABLE
from anybatch.runs.owned import checked_folder
from anybatch.runs.run import Run, is_state_of_run
from anybatch.runs.trust import require_trust, signature
from anybatch.scaling import table
from anybatch.scaling.changes import Change
from anybatch.system.atomic_files import remove_leftovers, write_text

_INIT_FROM = "init_from"  # an entry of config.yaml


def create_run(
    folder: Path,
    config: TrainConfig,
    seed: int,
    *,
    quiet: bool,
    changes: Sequence[Change] = (),
    init_from: Path | None = None,
) -> Run:
    """Make a new run folder.

    Args:
        folder: the run folder.
        config: written to it, with the seed.
        seed: that of the run.
        quiet: show no progress.
        changes: how the configuration was scaled, if it was; written to the folder.
        init_from: the run folder that the state comes from, if there is one; recorded in config.yaml.

    Raises:
        ConfigError: the folder already holds a run, or cannot be written.
    """

    def make_folder() -> None:
        if _has_begun(folder):
            raise ConfigError(
                f"out is {str(folder)!r}, which already contains a run; resume it or choose another folder"
            )
        try:
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            for name in (SCALING_TABLE, SCALING_JSON):  # of an attempt that never began
                (folder / name).unlink(missing_ok=True)
            if changes:
                write_text(folder / SCALING_TABLE, table(changes) + "\n")
                write_text(folder / SCALING_JSON, json.dumps([asdict(change) for change in changes], indent=2) + "\n")
            _write_config(folder, config, seed, init_from)
        except OSError as error:
            raise ConfigError(f"out is {str(folder)!r}, which cannot be written: {error.strerror}") from error

    on_main(make_folder)
    run = Run(folder, config, seed, quiet=quiet)
    run.open_logs()
    for sentence in _needed_again(config):
        run.message(sentence)
    return run


def _needed_again(config: TrainConfig) -> list[str]:
    """Sentences about what another process cannot find by its name in the configuration."""
    sentences = []
    if not is_importable(config.env.id):
        sentences.append(
            f"env.id is {config.env.id!r}, a callable without an import path, which resume, eval and watch cannot "
            "find in another process: pass it again in Python, with resume(run, env=...), load_policy(run, env=...) or "
            "evaluate(policy, env)"
        )
    if is_in_main(config.model.encoder):
        sentences.append(
            f"model.encoder is {config.model.encoder!r}: resume, eval and watch need a program that defines it; if it "
            "is in a module, any program finds it"
        )
    return sentences


def encoder_of_this_program(config: TrainConfig) -> list[str]:
    """A sentence for a run whose encoder is looked up in this program, which may not be the one that trained it."""
    if not is_in_main(config.model.encoder):
        return []
    return [f"model.encoder is {config.model.encoder!r}: the class of that name in this program is used"]


def write_config(run: Run) -> None:
    """Write the configuration of a run to its folder's config.yaml."""
    on_main(lambda: _write_config(run.folder, run.config, run.seed, began_from(run.folder)))


def _write_config(folder: Path, config: TrainConfig, seed: int, init_from: Path | None) -> None:
    start = {} if init_from is None else {_INIT_FROM: str(init_from.absolute())}
    write_text(folder / CONFIG, to_yaml(config, anybatch=__version__, seed=seed, **start, **signature(config)))


def began_from(folder: Path) -> Path | None:
    """The run folder in which a run found its first weights, as its config.yaml records it; None from scratch."""
    recorded = read_yaml(folder / CONFIG).get(_INIT_FROM)
    return None if recorded is None else Path(str(recorded))


def _has_begun(folder: Path) -> bool:
    """Whether there is something to lose; a run that found no room for its data has written its configuration alone."""
    progress = folder / PROGRESS
    return bool(checkpoint.checkpoints(folder / CHECKPOINTS)) or (progress.exists() and progress.stat().st_size > 0)


def read_config(folder: Path) -> tuple[TrainConfig, int]:
    """The configuration and seed of a run folder.

    Raises:
        CheckpointError: it is not a run folder.
    """
    path = checked_folder("run", folder) / CONFIG
    if path.parent.is_file():
        raise CheckpointError(f"{str(folder)!r} is a file, but must be a run folder, the one with {CONFIG}")
    if not path.exists():
        raise CheckpointError(f"{str(folder)!r} is not a run folder: it has no readable {CONFIG}")
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ConfigError(f"it contains {shown(values)} instead of fields and sections")
        if "anybatch" not in values:
            raise ConfigError("it has no entry anybatch with the version that wrote it")
        if "seed" not in values:
            raise CheckpointError(f"{str(path)!r} has no seed: add the entry seed, an integer")
        seed = check_integer("seed", values["seed"], at_least=0)
        return from_dict({name: value for name, value in values.items() if name not in OTHER_ENTRIES}), seed
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {str(error).splitlines()[0]}") from error


def open_run(
    folder: Path,
    *,
    env: str | Callable[..., Any] | None = None,
    total_env_steps: int | None = None,
    trust_code: bool = False,
    quiet: bool,
) -> tuple[Run, dict[str, Any]]:
    """Read a run folder to continue the run; :func:`write_config` then keeps what has changed.

    Nothing that the run has written is touched before :meth:`~anybatch.runs.run.Run.open_logs`.

    Args:
        folder: the run folder.
        env: replaces the environment of the configuration.
        total_env_steps: replaces the configuration's, and continues a run that a callback has ended.
        trust_code: import the code that the configuration names even if this user has not made the run.
        quiet: show no progress.

    Returns:
        The run, at its newest intact checkpoint, and that checkpoint's content.

    Raises:
        CheckpointError: it is not a run folder, or has no intact checkpoint.
        ConfigError: ``total_env_steps`` is not above the steps done, or the configuration names code of somebody else.
    """
    env_id = None if env is None else environment_id(env)
    if total_env_steps is not None:
        total_env_steps = check_integer("total_env_steps", total_env_steps, at_least=1)

    def read() -> tuple[TrainConfig, int, dict[str, Any], list[str]]:
        recorded, seed = read_config(folder)
        require_trust(recorded, folder / CONFIG, trust_code=trust_code, given=() if env is None else ("env.id",))
        content, passed_over = _newest_content(folder, seed)
        remove_leftovers(folder / CHECKPOINTS)
        sentences = [f"{sentence}; continuing from the previous checkpoint" for sentence in passed_over]
        sentences += [*encoder_of_this_program(recorded), *differences(content, recorded, seed)]
        config = recorded
        if total_env_steps is not None:
            if total_env_steps <= content["run"]["env_steps"]:
                raise ConfigError(
                    f"total_env_steps is {total_env_steps}, but the run has already done "
                    f"{content['run']['env_steps']} environment steps"
                )
            config = replace(config, total_env_steps=total_env_steps)
            sentences += _new_horizon(recorded, config, content["run"]["env_steps"])
        if env_id is not None and env_id != config.env.id:
            config = replace(config, env=replace(config.env, id=env_id))
            sentences += [f"env.id was {recorded.env.id!r} and is {env_id!r} from now on", *_needed_again(config)]
        return config, seed, content, sentences

    config, seed, content, sentences = on_main(read)  # the others may be on machines without this folder
    if env_id is not None:  # a callable has an id of its own in every worker
        config = replace(config, env=replace(config.env, id=env_id))
    run = Run(folder, config, seed, quiet=quiet, state=content["run"])
    if total_env_steps is not None:
        run.stopped = None
    for sentence in sentences:
        run.message(sentence)
    return run, content


def _newest_content(folder: Path, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Content of the newest intact checkpoint, and a sentence for each file that was passed over."""
    if not checkpoint.checkpoints(folder / CHECKPOINTS):
        if _has_begun(folder):
            raise CheckpointError(f"{str(folder)!r} no longer contains a checkpoint; train again with another --out")
        file, out, start = shlex.quote(str(folder / CONFIG)), shlex.quote(str(folder)), began_from(folder)
        options = "" if start is None else f" --init-from {shlex.quote(str(start))}"
        raise CheckpointError(
            f"{str(folder)!r} contains no checkpoint yet, because the run was stopped before its first one; to start "
            f"it again: anybatch train {file} --out {out} --seed {seed}{options}"
        )
    return content_of_run(folder)


def content_of_run(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Content of the newest intact checkpoint of a run folder, and a sentence for each file that was passed over.

    Raises:
        CheckpointError: there is none, or its content is not that of a run.
    """
    content, passed_over = checkpoint.load_newest(folder / CHECKPOINTS)
    run = content.get("run") if isinstance(content, dict) else None
    if not is_state_of_run(run) or not {"seed", "state"} <= content.keys():
        raise CheckpointError(
            f"the newest checkpoint of {str(folder)!r} is not that of a run: an entry is missing or has the wrong type"
        )
    return content, passed_over


def _new_horizon(before: TrainConfig, after: TrainConfig, env_steps: int) -> list[str]:
    """A sentence for each schedule, since they depend on ``total_env_steps``."""
    if after.total_env_steps == before.total_env_steps:
        return []
    old, new = (scheduled_numbers(x, min(1.0, env_steps / x.total_env_steps)) for x in (before, after))
    sentences = []
    for column, name in SCHEDULES.items():
        schedule = fields.get(after, name)
        if schedule != CONSTANT:
            sentences.append(
                f"{name} is {schedule}: with total_env_steps {after.total_env_steps:,} instead of "
                f"{before.total_env_steps:,} the {column.replace('_', ' ')} continues at {new[column]:.3g} instead of "
                f"{old[column]:.3g}, and has factor {factor(schedule, 1.0):g} at the new end; progress.csv has it in "
                f"the column {column}"
            )
    return sentences
