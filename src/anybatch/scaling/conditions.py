"""Conditions of section 4 under which batch size-invariance holds, each with advice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

from anybatch.config.schema import TrainConfig
from anybatch.errors import ScalingWarning
from anybatch.scaling.findings import Finding
from anybatch.scaling.rules import TOLERANCE, has_center_of_mass, proximal_age, staleness

LEAST_CENTER_OF_MASS = 0.5
"""Below this the newest weights make up more than two thirds of the proximal EWMA."""
OLD_SHARE_OF_RUN = 0.1
"""Fraction of the run above which the age of the proximal policy holds learning back."""
_NEGLIGIBLE_EPS = 1e-6
_CUT_CHANGE = 0.1


def validity(config: TrainConfig, reference: TrainConfig | None = None) -> list[Finding]:
    """Conditions of batch size-invariance (section 4) that a configuration does not meet, as warnings.

    ``reference`` is the configuration that it was scaled from, to check the effects of rounding, limits and another
    rollout length.
    """
    differences = [] if reference is None else _differences(config, reference)
    return [
        *_epochs(config, reference),
        *_conditions(config),
        *_gradients(config, reference),
        *_length(config),
        *differences,
    ]


def warn_about(config: TrainConfig, reference: TrainConfig | None = None, stacklevel: int = 2) -> None:
    """Emit each finding of :func:`validity` as a :class:`~anybatch.errors.ScalingWarning`."""
    for finding in validity(config, reference):
        warnings.warn(str(finding).removeprefix("warning: "), ScalingWarning, stacklevel=stacklevel)


def gae_horizon(config: TrainConfig) -> float:
    """Number of steps that an advantage looks ahead, 1 / (1 - gamma lambda); infinite if both are 1."""
    left = 1 - config.advantage.discount * config.advantage.gae_lambda
    return 1 / left if left > 0 else float("inf")


def gae_share_cut(config: TrainConfig) -> float:
    """Fraction of GAE's weight beyond the rollout's end, which a bootstrapped value replaces; 0 to 1.

    GAE weighs the step k ahead by (gamma lambda)^k. Over a rollout of T steps the mean weight beyond its end is
    ``(1/T) sum_{t=1..T} (gamma lambda)^t``.
    """
    decay, steps = config.advantage.discount * config.advantage.gae_lambda, config.rollout.steps
    return 1.0 if decay == 1 else decay * (1 - decay**steps) / (1 - decay) / steps


def _warning(check: str, observed: str, means: str, change: str) -> Finding:
    return Finding(check, "warning", observed, means, change)


def _epochs(config: TrainConfig, reference: TrainConfig | None) -> Iterator[Finding]:
    optimizer = config.optimizer
    if optimizer.policy_epochs == 1:
        return
    apart = optimizer.epoch_window * config.iteration_batch
    before = None if reference is None else reference.optimizer.epoch_window * reference.iteration_batch
    if before is not None and abs(apart / before - 1) <= TOLERANCE:
        return
    yield _warning(
        "policy_epochs",
        f"{optimizer.policy_epochs} policy epochs",
        "batch size-invariance needs 1, because with small batches additional epochs only repeat the same gradient "
        "step and act like a larger step size",
        "spread them out with --scaling.epochs spread, or set --optimizer.policy-epochs 1 --optimizer.value-epochs 1 "
        "and retune the step size",
    )


def _conditions(config: TrainConfig) -> Iterator[Finding]:
    optimizer, policy = config.optimizer, config.policy
    if not has_center_of_mass(policy):
        yield _warning(
            "proximal",
            f"policy.proximal {policy.proximal}",
            "the age of the proximal policy is the iteration batch and cannot be held constant",
            "use ppo-ewma or ppg-ewma, or set --policy.proximal ewma",
        )
    elif policy.proximal == "ewma" and policy.center_of_mass < LEAST_CENTER_OF_MASS:
        yield _warning(
            "center_of_mass",
            f"policy.center_of_mass {policy.center_of_mass:.3g}",
            f"the newest weights make up {1 / (1 + policy.center_of_mass):.0%} of the proximal policy, so it hardly "
            "limits a step",
            "take more minibatches per iteration, or a smaller batch",
        )
    if config.model.architecture == "shared" and optimizer.policy_epochs != optimizer.value_epochs:
        yield _warning(
            "shared_epochs",
            f"shared networks with {optimizer.policy_epochs} policy and {optimizer.value_epochs} value epochs",
            "the value's own gradient steps change the shared encoder, and with it the policy, between the updates of "
            "the proximal policy; no objective limits this change",
            "set --model.architecture dual, or as many value epochs as policy epochs",
        )
    if config.rollout.steps < gae_horizon(config):
        yield _warning(
            "gae_horizon",
            f"rollouts of {config.rollout.steps} step{'s' * (config.rollout.steps > 1)}, but GAE looks "
            f"{gae_horizon(config):.3g} steps ahead",
            f"{gae_share_cut(config):.0%} of an advantage is bootstrapped from the value function",
            "take longer rollouts of fewer environments, or a smaller advantage.gae_lambda",
        )


def _gradients(config: TrainConfig, reference: TrainConfig | None) -> Iterator[Finding]:
    """Limits that gradients are compared with, unless they followed the noise from ``reference``."""
    optimizer, before = config.optimizer, None if reference is None else reference.optimizer
    root = 1.0 if reference is None else (reference.optimization_batch / config.optimization_batch) ** 0.5
    limit, before_limit = optimizer.max_grad_norm, before and before.max_grad_norm
    if limit is not None and not (before_limit and _followed(limit, before_limit, root)):
        yield _warning(
            "max_grad_norm",
            f"optimizer.max_grad_norm {limit:g}",
            "small batches have noisier, larger gradients, which are clipped more"
            if root >= 1
            else "large batches have less noisy, smaller gradients, which are clipped less",
            "let it follow the batch with --scaling.max-grad-norm sqrt, or set --optimizer.max-grad-norm None, as the "
            "paper does",
        )
    eps = optimizer.adam_eps
    if (
        optimizer.kind == "adam"
        and before is not None
        and eps > _NEGLIGIBLE_EPS
        and not _followed(eps, before.adam_eps, root)
    ):
        yield _warning(
            "adam_eps",
            f"optimizer.adam_eps {eps:g}",
            "Adam adds it to the size of the gradients, which grows as batches get smaller",
            "let it follow the batch by omitting --scaling.adam-eps none, or set --optimizer.adam-eps 1e-8",
        )


def _followed(number: float, before: float, root: float) -> bool:
    """Whether a number has changed by sqrt(c), or by less, as it does near the noise scale."""
    exact = before * root
    return math.isclose(number, exact) or (number != before and min(before, exact) <= number <= max(before, exact))


def _length(config: TrainConfig) -> Iterator[Finding]:
    total, phase = config.total_env_steps, config.iteration_batch * config.aux.policy_iterations
    if config.aux.enabled and phase > total:
        yield _warning(
            "phase",
            f"a phase of {phase:,} samples in a run of {total:,}",
            "no auxiliary phase will take place",
            "train for longer, or lower aux.policy_iterations",
        )
    age = proximal_age(config)
    if has_center_of_mass(config.policy) and age > OLD_SHARE_OF_RUN * total:
        yield _warning(
            "proximal_age",
            f"the proximal policy is {age:,.0f} environment steps old in a run of {total:,}",
            "it holds the policy back near its start",
            f"train for longer, or lower policy.center_of_mass ({config.policy.center_of_mass:g})",
        )


def _differences(config: TrainConfig, reference: TrainConfig) -> Iterator[Finding]:
    if config.aux.enabled:
        before, after = (x.iteration_batch * x.aux.policy_iterations for x in (reference, config))
        if abs(after / before - 1) > TOLERANCE:
            yield _warning(
                "phase_batch",
                f"a phase of {after:,} samples instead of {before:,}",
                "the balance of policy and auxiliary phases differs from the tuned one",
                f"choose an iteration batch that divides {before:,}, and leave aux.policy_iterations to the rule",
            )
    if config.advantage.normalize:
        old, new = (x.advantage.span * x.iteration_batch for x in (reference, config))
        if abs(new / old - 1) > TOLERANCE:
            yield _warning(
                "advantage_samples",
                f"advantage mean and std over {new:,.0f} samples instead of {old:,.0f}",
                "they need at least one iteration, which has more samples than the tuned average"
                if config.advantage.span == 1
                else "their standard error changes",
                "if advantages vary over time, use fewer environments",
            )
    if reference.stale and abs(staleness(config) / staleness(reference) - 1) > TOLERANCE:
        yield _warning(
            "staleness",
            f"data up to {staleness(config):,} environment steps old instead of {staleness(reference):,}",
            "rollout.source counts the age in whole iterations (at least 1), whose size has changed",
            "change rollout.source.delay or max_lag, or keep the iteration batch and change the minibatches",
        )
    before_cut, after_cut = gae_share_cut(reference), gae_share_cut(config)
    if config.rollout.steps != reference.rollout.steps and abs(after_cut - before_cut) > _CUT_CHANGE:
        yield _warning(
            "bootstrapping",
            f"rollout.steps {reference.rollout.steps} -> {config.rollout.steps}",
            f"{after_cut:.0%} of an advantage is bootstrapped instead of {before_cut:.0%}",
            f"change env.num_envs instead, or advantage.gae_lambda ({config.advantage.gae_lambda:g}) to compensate",
        )
