"""Differences between a checkpoint and the configuration and process that continue from it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from anybatch._version import __version__
from anybatch.config import fields
from anybatch.config.io import from_dict, to_dict
from anybatch.config.schema import TrainConfig
from anybatch.errors import CheckpointError, ConfigError, shown


def circumstances(config: TrainConfig) -> dict[str, Any]:
    """Entries of a checkpoint that :func:`differences` compares later."""
    return {"config": to_dict(config), "version": __version__, "threads": torch.get_num_threads()}


def other_distributions(before: TrainConfig, config: TrainConfig) -> list[str]:
    """A sentence for each setting that makes another policy of the same weights."""
    sentences = []
    for name in ("squash", "log_std_bounds"):
        was, now = getattr(before.model.gaussian, name), getattr(config.model.gaussian, name)
        if was != now:
            sentences.append(
                f"model.gaussian.{name} is {now} instead of {was}: the same weights now give a different distribution "
                "of continuous actions"
            )
    was, now = before.observation.clip, config.observation.clip
    if config.observation.normalize and was != now:
        sentences.append(f"observation.clip is {now} instead of {was}: the same weights now see other observations")
    return sentences


def written_with(content: Mapping[str, Any], config: TrainConfig) -> TrainConfig:
    """The configuration of a checkpoint; ``config`` for one without a configuration that can be read."""
    if isinstance(content, Mapping) and "config" in content:
        with contextlib.suppress(ConfigError):  # it has fields of another version
            return from_dict(content["config"])
    return config


def differences(content: Mapping[str, Any], config: TrainConfig, seed: int) -> list[str]:
    """Sentences about what has changed since a checkpoint; of an old one without the entries, about the seed alone.

    Raises:
        CheckpointError: the optimiser is of another kind, whose state does not fit.
    """
    changed = [] if content["seed"] == seed else [f"seed was {content['seed']} and is now {seed}"]
    before = written_with(content, config)
    pairs = {name: (fields.get(before, name), fields.get(config, name)) for name in fields.names()}
    changed += [f"{name} was {shown(a)} and is now {shown(b)}" for name, (a, b) in pairs.items() if a != b]
    if before.optimizer.kind != config.optimizer.kind:
        raise CheckpointError(
            f"optimizer.kind was {before.optimizer.kind} when the checkpoint was written and is "
            f"{config.optimizer.kind} in config.yaml, but the optimiser's state cannot be converted: change it back"
        )
    sentences = [f"config.yaml was edited after the checkpoint: {'; '.join(changed)}"] if changed else []
    sentences += other_distributions(before, config)
    if content.get("version", __version__) != __version__:
        sentences.append(f"the checkpoint was written by anybatch {content['version']}, but this is {__version__}")
    threads = torch.get_num_threads()
    if content.get("threads", threads) != threads:
        sentences.append(
            f"the checkpoint was written with {content['threads']} threads, but PyTorch now has {threads}: rounding "
            "errors differ, so the run continues with slightly different values (OMP_NUM_THREADS)"
        )
    return sentences
