"""Checks of a configuration; every error names the field, its value and the allowed values."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args, get_origin

from anybatch.config import fields, schedules
from anybatch.config.chunks import auxiliary_time_chunks, time_chunks
from anybatch.config.io import from_dict, to_dict
from anybatch.config.schema import PolicyConfig, TrainConfig
from anybatch.errors import ConfigError, shown

Range: TypeAlias = tuple[Callable[[float], bool], str]
"""Whether a value is allowed, and the allowed values in words."""

MOST_ENVS = 1 << 22
"""Largest number of environments."""

_MOST_FRAMES = 1000
_AT_LEAST_1: Range = (lambda x: x >= 1, "an integer of at least 1")
_AT_LEAST_0: Range = (lambda x: x >= 0, "a number of at least 0")
_ABOVE_0: Range = (lambda x: x > 0, "a number above 0")
_FRACTION: Range = (lambda x: 0 <= x <= 1, "a number from 0 to 1")
_BELOW_1: Range = (lambda x: 0 <= x < 1, "a number of at least 0 and below 1")

_RANGES: dict[str, Range] = {
    "total_env_steps": _AT_LEAST_1,
    "workers": _AT_LEAST_1,
    "micro_batch": (lambda x: x >= 1, "an integer of at least 1, or none"),
    "checkpoint_seconds": _AT_LEAST_0,
    "keep_checkpoints": _AT_LEAST_1,
    "env.num_envs": (lambda x: 1 <= x <= MOST_ENVS, f"an integer from 1 to {MOST_ENVS:,}"),
    "env.frame_stack": (lambda x: 1 <= x <= _MOST_FRAMES, f"an integer from 1 to {_MOST_FRAMES:,}"),
    "env.threads": _AT_LEAST_0,
    "env.step_timeout": (lambda x: x > 0, "a number of seconds above 0, or none"),
    "observation.clip": _ABOVE_0,
    "model.recurrent_width": (lambda x: x >= 1, "an integer of at least 1, or none"),
    "model.policy_gain": (lambda x: x >= 0, "a number of at least 0, or none"),
    "model.value_gain": (lambda x: x >= 0, "a number of at least 0, or none"),
    "model.gaussian.log_std": (lambda x: -20 <= x <= 20, "a number from -20 to 20"),
    "rollout.steps": _AT_LEAST_1,
    "rollout.source.delay": _AT_LEAST_0,
    "rollout.source.max_lag": _AT_LEAST_0,
    "rollout.source.ray_workers": _AT_LEAST_0,
    "reward.return_discount": _BELOW_1,
    "reward.bound": _ABOVE_0,
    "advantage.discount": _FRACTION,
    "advantage.gae_lambda": _FRACTION,
    "advantage.span": (lambda x: x >= 1, "at least 1 (the current iteration only)"),
    "policy.clip": _AT_LEAST_0,
    "policy.kl_coefficient": _AT_LEAST_0,
    "policy.center_of_mass": (lambda x: 0 <= x < math.inf, "a finite number of gradient steps, at least 0"),
    "policy.max_importance_ratio": (
        lambda x: x >= 1,
        "at least 1: below that even fresh data would lose its importance weights, which biases the gradient",
    ),
    "policy.second_moment": (lambda x: x > 0, "a number above 0, or none"),
    "policy.entropy_coefficient": (lambda x: True, "a finite number"),
    "optimizer.step_size": _AT_LEAST_0,
    "optimizer.kl_target": (lambda x: x > 0, "a number above 0, or none"),
    "optimizer.kl_factor": (lambda x: x > 1, "a number above 1"),
    "optimizer.kl_stop": (lambda x: x > 0, "a number above 0, or none"),
    "optimizer.adam_eps": _ABOVE_0,
    "optimizer.sgd_momentum": _BELOW_1,
    "optimizer.max_grad_norm": (lambda x: x > 0, "a number above 0, or none"),
    "optimizer.minibatches": _AT_LEAST_1,
    "optimizer.policy_epochs": _AT_LEAST_1,
    "optimizer.value_epochs": _AT_LEAST_1,
    "optimizer.epoch_window": (lambda x: x >= 1, "at least 1, which makes all passes at once"),
    "optimizer.value_coefficient": _AT_LEAST_0,
    "aux.policy_iterations": _AT_LEAST_1,
    "aux.epochs": _AT_LEAST_0,
    "aux.minibatches": _AT_LEAST_1,
    "aux.step_size": _AT_LEAST_0,
    "aux.clone_coefficient": _AT_LEAST_0,
    "eval.every": (lambda x: x >= 1, "an integer of at least 1, or none"),
    "eval.episodes": _AT_LEAST_1,
    "eval.num_envs": (lambda x: 1 <= x <= MOST_ENVS, f"an integer from 1 to {MOST_ENVS:,}, or none"),
    "eval.max_steps": (lambda x: x >= 1, "an integer of at least 1, or none"),
    "eval.stop_at": (lambda x: True, "a finite number, or none"),
}
_MAY_BE_INFINITE = {
    "observation.clip",
    "policy.clip",
    "policy.max_importance_ratio",
    "reward.bound",
    "checkpoint_seconds",
    "env.step_timeout",
    "optimizer.max_grad_norm",
}


def validate(config: TrainConfig) -> TrainConfig:
    """Return ``config`` if it is valid.

    Raises:
        ConfigError: one sentence about the first problem.
    """
    _check_types(config)
    for name, (allowed, words) in _RANGES.items():
        value = fields.get(config, name)
        if value is None:  # only where its type allows it
            continue
        finite = isinstance(value, int) or math.isfinite(value) or (value == math.inf and name in _MAY_BE_INFINITE)
        if not (finite and allowed(value)):
            raise ConfigError(f"{name} is {value}, but must be {words}")
    if not all(0 <= beta < 1 for beta in config.optimizer.adam_betas):
        raise ConfigError(
            f"optimizer.adam_betas is {config.optimizer.adam_betas}, but both must be at least 0 and below 1"
        )
    _check_schedules(config)
    _check_gaussian(config)
    _check_minibatches(config, config.env.num_envs)
    _check_policy(config)
    _check_source(config)
    _check_recurrent(config)
    if config.advantage.normalize and config.advantage.span == 1 and config.iteration_batch == 1:
        raise ConfigError(
            "advantage.normalize is true with a span of 1 and one sample per iteration, which subtracts each advantage "
            "from itself; set advantage.span to a number of iterations, or advantage.normalize false"
        )
    if config.eval.stop_at is not None and config.eval.every is None:
        raise ConfigError(f"eval.stop_at is {config.eval.stop_at:g}, which needs evaluations: set eval.every as well")
    return config


def _check_types(config: TrainConfig) -> None:
    """Raise a ConfigError for a value of another type, which Python does not refuse when it makes a configuration."""
    given: Any = config
    if not isinstance(given, TrainConfig):
        hint = "; scale and rescale return the configuration and the changes" if isinstance(given, tuple) else ""
        raise ConfigError(f"the configuration is a {type(given).__name__}, but must be a TrainConfig{hint}")
    for name, kind in fields.types().items():
        value = fields.get(config, name)
        if dataclasses.is_dataclass(kind) and type(value) is not kind:
            raise ConfigError(f"{name} is {shown(value)}, but must be of the class {getattr(kind, '__name__', kind)}")
        if name in (*schedules.SCHEDULES.values(), "model.encoder") and callable(value):
            raise ConfigError(f"{name} is {shown(value)}, but must be text here; presets and override() convert it")
    converted = from_dict(to_dict(config))
    for name in fields.names():
        value, right = fields.get(config, name), fields.get(converted, name)
        if not _same_types(value, right):
            of = "" if type(value) is type(right) else f" ({type(value).__name__})"
            raise ConfigError(f"{name} is {shown(value)}{of}, but must be {shown(right)}")


def _same_types(value: Any, right: Any) -> bool:
    """Whether a value and its entries have the right types; an integer is right as a float."""
    if type(value) is not type(right):
        return type(right) is float and type(value) is int
    if isinstance(value, Mapping):
        return all(map(_same_types, (*value, *value.values()), (*right, *right.values())))
    return not isinstance(value, tuple) or all(map(_same_types, value, right))


def check_integer(name: str, value: Any, *, at_least: int) -> int:
    """``value`` as an int, if it is an integer (NumPy's too) of at least ``at_least``.

    Raises:
        ConfigError: it is something else.
    """
    with contextlib.suppress(AttributeError, TypeError):  # NumPy's arrays have the method as well
        number: int = value.__index__()
        if number >= at_least and not isinstance(value, bool):
            return number
    raise ConfigError(f"{name} is {shown(value)}, but must be an integer of at least {at_least}")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number, NumPy's included, and not a truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(name: str, value: float, *, of: str, at_least: float) -> None:
    """Raise a ConfigError unless ``value`` is a finite number of something, at least ``at_least``."""
    given: Any = value
    if not (is_number(given) and at_least <= value < math.inf):
        raise ConfigError(f"{name} is {shown(given)}, but must be a finite number of {of}, at least {at_least}")


def check_positive(name: str, value: float) -> float:
    """Return ``value`` if it is a finite number above 0.

    Raises:
        ConfigError: it is something else.
    """
    given: Any = value
    if not (is_number(given) and 0 < value < math.inf):
        raise ConfigError(f"{name} is {shown(given)}, but must be a finite number above 0")
    return value


def check_ewma_arguments(center_of_mass: float | None, advantage_span: float, max_importance_ratio: float) -> None:
    """Raise a ConfigError for an argument of another library's PPO-EWMA class that is out of range.

    A ``center_of_mass`` of None means no average.
    """
    if center_of_mass is not None:
        check_number("center_of_mass", center_of_mass, of="gradient steps", at_least=0)
    if center_of_mass == 0:
        raise ConfigError(
            "center_of_mass is 0, so the proximal policy would be the policy itself and limit nothing; set a number "
            "above 0, or None"
        )
    check_number("advantage_span", advantage_span, of="iterations", at_least=1)
    if not (is_number(max_importance_ratio) and max_importance_ratio >= 1):
        raise ConfigError(f"max_importance_ratio is {shown(max_importance_ratio)}, but must be a number of at least 1")


def check_choice(name: str, value: Any, kind: Any) -> None:
    """Raise a ConfigError unless ``value`` is a choice of ``kind``: a Literal, bool, or a union of the two."""
    choices = [choice for part in (kind, *get_args(kind)) for choice in _choices(part)]
    if choices and not any(isinstance(value, str) == isinstance(choice, str) and value == choice for choice in choices):
        raise ConfigError(f"{name} is {shown(value)}, but must be one of {', '.join(map(str, choices))}")


def _choices(kind: Any) -> tuple[Any, ...]:
    return (True, False) if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()


def validate_envs_per_worker(config: TrainConfig, envs_per_worker: Sequence[int]) -> None:
    """Raise a ConfigError unless every data-parallel worker can divide its own environments into minibatches."""
    source = config.rollout.source
    for num_envs in sorted(set(envs_per_worker)):
        try:
            _check_minibatches(config, num_envs)
        except ConfigError as error:
            if len(envs_per_worker) == 1:
                raise
            raise ConfigError(
                f"{len(envs_per_worker)} workers share env.num_envs {config.env.num_envs}: {error}"
            ) from error
        if source.ray_workers and num_envs % source.ray_workers:
            raise ConfigError(
                f"rollout.source.ray_workers is {source.ray_workers}, but must divide each worker's environments, "
                f"but one of {len(envs_per_worker)} workers has {num_envs}"
            )


def _check_minibatches(config: TrainConfig, num_envs: int) -> None:
    steps, aux = config.rollout.steps, config.aux
    time_chunks(num_envs, steps, config.optimizer.minibatches, config.optimizer.shuffle)
    if aux.enabled and aux.epochs:
        auxiliary_time_chunks(aux.policy_iterations, num_envs, steps, aux.minibatches_per_epoch)


def _check_schedules(config: TrainConfig) -> None:
    for name in schedules.SCHEDULES.values():
        value = fields.get(config, name)
        schedules.check(name, value)
        if config.compile and name.startswith("policy.") and value != schedules.CONSTANT:
            raise ConfigError(
                f"{name} is {shown(value)}, but compile makes the coefficients of the losses constants; omit one of "
                "the two"
            )
    if config.policy.clip == math.inf and config.policy.clip_schedule != schedules.CONSTANT:
        raise ConfigError(
            f"policy.clip_schedule is {shown(config.policy.clip_schedule)}, but policy.clip is inf, which no factor "
            "changes; set a finite clip, or policy.clip_schedule constant"
        )


def _check_gaussian(config: TrainConfig) -> None:
    log_std, bounds = config.model.gaussian.log_std, config.model.gaussian.log_std_bounds
    if bounds is None:
        return
    if not all(map(math.isfinite, bounds)) or bounds[0] >= bounds[1]:
        raise ConfigError(
            f"model.gaussian.log_std_bounds is {bounds}, but must be two finite numbers, the first below the second"
        )
    middle, half = (bounds[1] + bounds[0]) / 2, (bounds[1] - bounds[0]) / 2
    if not abs(log_std - middle) / half < 1:  # also where a difference rounds to a bound
        raise ConfigError(
            f"model.gaussian.log_std is {log_std}, but must be inside model.gaussian.log_std_bounds {bounds}"
        )


def _check_policy(config: TrainConfig) -> None:
    policy = config.policy
    limited = policy.clip < math.inf if policy.objective == "clip" else policy.kl_coefficient > 0
    if policy.proximal == "ewma" and policy.center_of_mass == 0:
        raise ConfigError(
            "policy.center_of_mass is 0, so the proximal policy would be the policy itself and limit nothing; set a "
            "number above 0, or policy.proximal behavior"
        )
    if policy.proximal != "behavior" and not limited:
        field = "policy.clip inf" if policy.objective == "clip" else "policy.kl_coefficient 0"
        raise ConfigError(
            f"policy.proximal is {policy.proximal}, but {field} switches off the only term that uses it; "
            "set a finite clip or a positive coefficient, or policy.proximal behavior"
        )
    if policy.importance == "proximal" and policy.proximal == "behavior":
        raise ConfigError(
            "policy.importance is proximal while policy.proximal is behavior, which is the same policy; "
            "set policy.importance behavior"
        )
    if policy.importance == "proximal" and policy.proximal == "ewma":
        raise ConfigError(
            "policy.importance proximal with policy.proximal ewma weights samples by a policy that did not sample "
            "them, which biases the gradient; set policy.importance behavior"
        )
    if policy.importance == "proximal" and config.rollout.source.kind == "synchronous":
        raise ConfigError(
            "policy.importance proximal is figure 1(a)'s biased objective for stale data and needs "
            "rollout.source.kind delayed or asynchronous; with fresh data set policy.importance behavior"
        )
    if policy.interpolated:
        _check_interpolated(config)
    if config.stale and not (policy.allow_stale_coupled or policy.interpolated):
        _check_decoupled(policy, limited)
    _check_passes(config)
    _check_kl(config)


def _check_kl(config: TrainConfig) -> None:
    """Refuse limits of a KL divergence that is always 0, is not computed, or is never looked at."""
    optimizer, policy = config.optimizer, config.policy
    for name in ("kl_target", "kl_stop"):
        if policy.interpolated and getattr(optimizer, name) is not None:
            raise ConfigError(
                f"optimizer.{name} is {getattr(optimizer, name):g}, but policy.interpolated true computes no proximal "
                f"policy and therefore no divergence from it; set optimizer.{name} to None, or use policy.proximal "
                "ewma without policy.interpolated"
            )
    steps = optimizer.minibatches * optimizer.policy_epochs
    itself = policy.proximal == "recent" or (policy.proximal == "behavior" and not config.stale)
    if optimizer.kl_target is not None and steps == 1 and itself:
        raise ConfigError(
            f"optimizer.kl_target is {optimizer.kl_target:g}, but an iteration has one gradient step, before which the "
            f"policy equals the proximal policy (policy.proximal {config.policy.proximal}); set policy.proximal ewma, "
            "or more minibatches or epochs"
        )
    if optimizer.kl_stop is not None and optimizer.policy_epochs == 1:
        raise ConfigError(
            f"optimizer.kl_stop is {optimizer.kl_stop:g}, but with one policy epoch there is no further pass; set it "
            "to None, or set more optimizer.policy_epochs"
        )


def _check_passes(config: TrainConfig) -> None:
    """Refuse spread passes where nothing accounts for the age of their data.

    A behaviour policy as the proximal policy is allowed: at 1/c of the batch a span of c makes its age in environment
    steps, at each pass, what it was at the tuned batch.
    """
    optimizer = config.optimizer
    if optimizer.epoch_window == 1:
        return
    setting = f"optimizer.epoch_window is {optimizer.epoch_window:g}"
    if max(optimizer.policy_epochs, optimizer.value_epochs) == 1:
        raise ConfigError(f"{setting}, but there is one epoch, which cannot be spread; set optimizer.epoch_window 1")
    if config.policy.importance == "proximal":
        raise ConfigError(
            f"{setting}, but policy.importance proximal weights samples by a policy newer than the behaviour "
            "policy, which biases the gradient, more so in later passes; set policy.importance behavior, or "
            "optimizer.epoch_window 1"
        )


def _check_interpolated(config: TrainConfig) -> None:
    policy = config.policy
    if policy.proximal != "behavior":
        raise ConfigError(
            f"policy.interpolated is true, but policy.proximal {policy.proximal} computes the proximal policy; set one "
            "of policy.proximal behavior and policy.interpolated false"
        )
    if policy.objective == "kl" and policy.kl_estimator == "exact":
        raise ConfigError(
            "policy.interpolated is true, but gives log-probabilities of the sampled actions only, while the exact KL "
            "divergence needs those of all actions; set policy.objective clip, or policy.kl_estimator half-squared"
        )
    if config.rollout.source.kind == "synchronous":
        raise ConfigError(
            "policy.interpolated is true, but needs stale data: with rollout.source.kind synchronous the behaviour "
            "policy is as recent as a proximal policy can be; set it to false, or rollout.source.kind delayed or "
            "asynchronous"
        )
    for name, value, usual in (
        ("compile", config.compile, False),
        ("optimizer.epoch_window", config.optimizer.epoch_window, 1),
    ):
        if value != usual:
            raise ConfigError(
                f"{name} is {value}, but policy.interpolated uses the age of each iteration's data, which "
                "would be wrong then; omit one of the two"
            )


def _check_decoupled(policy: PolicyConfig, limited: bool) -> None:
    """Refuse stale data with one policy for both purposes, which learns worse without any error."""
    remedy = (
        "use policy.importance behavior with policy.proximal recent (its decoupled objective, figure 1(b)) or ewma, "
        "or ask for this variant with policy.allow_stale_coupled true"
    )
    if policy.importance == "proximal":
        raise ConfigError(
            "policy.importance is proximal and the data is stale: weighting samples by a policy that did not sample "
            f"them biases the gradient and makes training unstable, figure 1(a) of the paper; {remedy}"
        )
    if policy.proximal == "behavior" and limited:
        raise ConfigError(
            "policy.proximal is behavior and the data is stale: limiting each step by an old behaviour policy "
            f"slows learning down, figure 1(c) of the paper; {remedy}"
        )


def _check_recurrent(config: TrainConfig) -> None:
    kind = config.model.recurrent
    if kind == "none":
        return
    if config.aux.enabled:
        raise ConfigError(
            f"model.recurrent is {kind}, but the auxiliary phase of PPG trains on observations without their history: "
            "use ppo or ppo-ewma (aux.enabled false), or model.recurrent none"
        )
    if config.optimizer.shuffle == "samples":
        raise ConfigError(
            f"model.recurrent is {kind}, but optimizer.shuffle samples splits trajectories, so nothing could be "
            "learned across steps: set it to trajectories"
        )
    if config.compile:
        raise ConfigError(
            f"model.recurrent is {kind}, but compile would unroll every step of a trajectory: set it to false"
        )


def _check_source(config: TrainConfig) -> None:
    source = config.rollout.source
    if source.kind != "delayed" and source.delay:
        raise ConfigError(
            f"rollout.source.delay is {source.delay}, but rollout.source.kind is {source.kind}; "
            "set rollout.source.kind delayed, or delay 0"
        )
    for name in ("deterministic", "ray_workers"):
        if source.kind != "asynchronous" and getattr(source, name):
            raise ConfigError(
                f"rollout.source.{name} is {getattr(source, name)}, but rollout.source.kind is {source.kind}; "
                "set rollout.source.kind asynchronous, or leave it out"
            )
    if source.deterministic and config.compile:
        raise ConfigError(
            "rollout.source.deterministic is true, but with compile the rounding of a sampling thread depends on its "
            "timing; set one of them to false"
        )
    if source.ray_workers and config.env.num_envs % source.ray_workers:
        raise ConfigError(
            f"rollout.source.ray_workers is {source.ray_workers}, but must divide env.num_envs {config.env.num_envs}"
        )
