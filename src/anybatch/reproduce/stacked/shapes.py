"""Conditions for stacking runs: they may differ in numbers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

from anybatch.config.fields import get
from anybatch.config.io import to_dict
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.policy_phase import CPU_MICRO_BATCH

_PER_RUN = (
    "optimizer.step_size",
    "optimizer.adam_betas",
    "advantage.span",
    "policy.clip",
    "policy.kl_coefficient",
    "policy.proximal",
    "policy.center_of_mass",
    "policy.max_importance_ratio",
    "policy.entropy_coefficient",
    "aux.step_size",
    "aux.clone_coefficient",
)
"""Fields in which stacked runs may differ, the seed aside."""

_WITHOUT_EFFECT = (
    "workers",
    "precision",
    "device",
    "micro_batch",  # unless there is a policy.second_moment
    "compile",
    "keep_freed_memory",
    "checkpoint_seconds",
    "keep_checkpoints",
    "env.threads",
    "aux.storage",
    "policy.allow_stale_coupled",  # a permission
    "log",
)
"""Fields without effect on a stacked run: it is fp32, on the CPU, and keeps everything in memory."""


_ADDED = (
    *("observation", "optimizer.shuffle", "model.policy_gain", "model.value_gain", "model.gaussian"),
    *("optimizer.epoch_window", "optimizer.kl_target", "optimizer.kl_factor", "optimizer.kl_stop"),
    *("optimizer.follow_ess", "policy.interpolated", "policy.second_moment"),
    *("policy.clip_schedule", "policy.entropy_schedule"),
    *("eval", "env.info_keys", "env.action_mask", "env.frame_stack", "model.recurrent", "model.recurrent_width"),
    "micro_batch",
)
"""Fields and sections without which finished runs were named; left out of the text where they have their defaults."""


def shape_key(config: TrainConfig) -> str:
    """Key of the runs that can be stacked with each other: equal for configurations that differ in numbers alone."""
    return _without(config, (*_PER_RUN, *_WITHOUT_EFFECT))


def run_identity(config: TrainConfig) -> str:
    """All settings that affect a run's numbers, the seed aside, as text."""
    limited = config.policy.second_moment is not None
    return _without(config, [name for name in _WITHOUT_EFFECT if not (limited and name == "micro_batch")])


def _check_stackable(config: TrainConfig) -> None:
    """Refuse settings that a stack does not offer; networks are checked when they are stacked."""
    optimizer, source = config.optimizer, config.rollout.source
    needs = {
        "optimizer.kind": (optimizer.kind, "adam", optimizer.kind == "adam"),
        "rollout.source.kind": (source.kind, "synchronous or delayed", source.kind in ("synchronous", "delayed")),
    }
    for field, (value, allowed, fits) in needs.items():
        if not fits:
            raise not_stackable(f"{field} is {value}, but stacked runs need {allowed}")
    if optimizer.kl_stop is not None:
        raise not_stackable(f"optimizer.kl_stop is {optimizer.kl_stop}, but stacked runs make equal numbers of passes")
    if config.policy.second_moment is not None and config.optimization_batch > (config.micro_batch or CPU_MICRO_BATCH):
        raise not_stackable(
            f"policy.second_moment is {config.policy.second_moment} with {config.optimization_batch:g} samples a "
            "minibatch, of which a single run masks each micro_batch separately"
        )
    if config.model.recurrent != "none":
        raise not_stackable(f"model.recurrent is {config.model.recurrent}, but stacked runs need none")
    if config.eval.every is not None:
        raise not_stackable(
            f"eval.every is {config.eval.every}, but stacked runs need the argument evaluations instead"
        )
    if config.env.info_keys:
        raise not_stackable(f"env.info_keys is {config.env.info_keys}, but stacked runs do not read info")
    if config.model.architecture == "shared" and optimizer.policy_epochs != optimizer.value_epochs:
        raise not_stackable(
            "model.architecture is shared with different policy and value epochs, whose two optimisers would share "
            "parameters, but stacked runs need dual or detach there"
        )


def not_stackable(reason: str) -> ConfigError:
    """The error for a configuration that cannot be stacked, with the way out."""
    return ConfigError(f"{reason}; use launcher single")


def check_common_shape(configs: Sequence[TrainConfig]) -> None:
    """Raise a ConfigError if runs cannot be stacked with each other."""
    for config in configs:
        _check_stackable(config)
    if len({shape_key(config) for config in configs}) > 1:
        raise ConfigError(
            "the configurations of a stack differ in more than numbers; launch() groups them by shape_key"
        )


def _without(config: TrainConfig, fields: Sequence[str]) -> str:
    default = TrainConfig()
    unchanged = [name for name in _ADDED if get(config, name) == get(default, name)]
    values = to_dict(config, without=(*fields, *unchanged))
    if not config.aux.enabled:  # nothing else of it matters then
        values["aux"] = {"enabled": False}
    return json.dumps(values, sort_keys=True)
