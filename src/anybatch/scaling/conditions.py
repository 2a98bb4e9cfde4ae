"""Whether a configuration can be batch size-invariant at all: the conditions of section 4, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.config.schema import TrainConfig
from anybatch.scaling.findings import Finding
from anybatch.scaling.rules import proximal_age

LEAST_CENTER_OF_MASS = 0.5
"""Below this the newest weights make up more than two thirds of the proximal EWMA."""
OLD_SHARE_OF_RUN = 0.1
"""A proximal policy that is older than this share of the run holds it back."""
_NEGLIGIBLE_EPS = 1e-6
_TOLERANCE = 0.01
_CUT_CHANGE = 0.1


def validity(config: TrainConfig, reference: TrainConfig | None = None) -> list[Finding]:
    """Reasons why a configuration does not behave the same at any batch size.

    Args:
        config: what is going to be trained.
        reference: where it was scaled from, to see what rounding, limits and a changed rollout length have cost.

    Returns:
        Errors first, then warnings; empty if section 4's conditions hold.
    """
    findings = [*_sizes(config), *_conditions(config), *_length(config)]
    if reference is not None:
        findings += _differences(config, reference)
    return sorted(findings, key=lambda finding: finding.severity != "error")


def gae_horizon(config: TrainConfig) -> float:
    """Steps that an advantage looks ahead, 1 / (1 - gamma lambda); infinite where both are 1."""
    left = 1 - config.advantage.discount * config.advantage.gae_lambda
    return 1 / left if left > 0 else float("inf")


def gae_share_cut(config: TrainConfig) -> float:
    """Share of GAE's weight that the rollout's end cuts off and a bootstrapped value replaces, 0 to 1.

    GAE weighs the step k ahead by (gamma lambda)^k. Over a rollout of T steps the mean weight beyond its end is
    ``(1/T) sum_{t=1..T} (gamma lambda)^t``.
    """
    decay, steps = config.advantage.discount * config.advantage.gae_lambda, config.rollout.steps
    return 1.0 if decay == 1 else decay * (1 - decay**steps) / (1 - decay) / steps


def _sizes(config: TrainConfig) -> Iterator[Finding]:
    if config.optimization_batch < 1:
        yield Finding(
            "minibatch",
            "error",
            f"{config.iteration_batch} samples in {config.optimizer.minibatches} minibatches",
            "a gradient step has less than one sample",
            f"set optimizer.minibatches to {config.iteration_batch} at most",
        )
    if config.advantage.normalize and config.advantage.span < 1:
        yield Finding(
            "advantage_span",
            "error",
            f"advantage.span {config.advantage.span:g}",
            "advantage moments cannot use less than the current iteration",
            "set advantage.span to at least 1",
        )
    if config.aux.enabled and config.aux.policy_iterations < 1:
        yield Finding(
            "policy_iterations",
            "error",
            f"aux.policy_iterations {config.aux.policy_iterations}",
            "a phase has at least one iteration",
            "set aux.policy_iterations to at least 1",
        )


def _conditions(config: TrainConfig) -> Iterator[Finding]:
    optimizer, policy = config.optimizer, config.policy
    if optimizer.policy_epochs > 1:
        yield Finding(
            "policy_epochs",
            "warning",
            f"{optimizer.policy_epochs} policy epochs",
            "batch size-invariance needs 1, since at small batches more epochs only repeat the same gradient step "
            "and act like a larger step size",
            "set --optimizer.policy-epochs 1 --optimizer.value-epochs 1 and tune the step size there",
        )
    if policy.proximal != "ewma":
        yield Finding(
            "proximal",
            "warning",
            f"policy.proximal {policy.proximal}",
            "the age of the proximal policy follows the iteration batch and cannot be held",
            "use ppo-ewma or ppg-ewma, or set --policy.proximal ewma",
        )
    elif policy.center_of_mass < LEAST_CENTER_OF_MASS:
        yield Finding(
            "center_of_mass",
            "warning",
            f"policy.center_of_mass {policy.center_of_mass:.3g}",
            f"the proximal policy is {1 / (1 + policy.center_of_mass):.0%} the newest weights and hardly limits a step",
            "take more minibatches per iteration, or a smaller batch",
        )
    if optimizer.max_grad_norm is not None:
        yield Finding(
            "max_grad_norm",
            "warning",
            f"optimizer.max_grad_norm {optimizer.max_grad_norm:g}",
            "small batches have noisier, longer gradients and are clipped more",
            "set --optimizer.max-grad-norm None, as the paper does",
        )
    if optimizer.kind == "adam" and optimizer.adam_eps > _NEGLIGIBLE_EPS:
        yield Finding(
            "adam_eps",
            "warning",
            f"optimizer.adam_eps {optimizer.adam_eps:g}",
            "the square root rule takes Adam's epsilon to be negligible beside the gradients",
            "set --optimizer.adam-eps 1e-8",
        )
    if config.rollout.steps < gae_horizon(config):
        yield Finding(
            "gae_horizon",
            "warning",
            f"rollouts of {config.rollout.steps} steps, where GAE looks {gae_horizon(config):.3g} ahead",
            f"{gae_share_cut(config):.0%} of an advantage is bootstrapped from the value function",
            "take longer rollouts of fewer environments, or a smaller advantage.gae_lambda",
        )


def _length(config: TrainConfig) -> Iterator[Finding]:
    total, phase = config.total_env_steps, config.iteration_batch * config.aux.policy_iterations
    if config.aux.enabled and phase > total:
        yield Finding(
            "phase",
            "warning",
            f"a phase of {phase:,} samples in a run of {total:,}",
            "no auxiliary phase will take place",
            "train for longer, or set aux.policy_iterations yourself",
        )
    age = proximal_age(config)
    if config.policy.proximal == "ewma" and age > OLD_SHARE_OF_RUN * total:
        yield Finding(
            "proximal_age",
            "warning",
            f"the proximal policy is {age:,.0f} environment steps old in a run of {total:,}",
            "it holds the policy back near its start",
            f"train for longer, or lower policy.center_of_mass ({config.policy.center_of_mass:g})",
        )


def _differences(config: TrainConfig, reference: TrainConfig) -> Iterator[Finding]:
    if config.aux.enabled:
        before, after = (x.iteration_batch * x.aux.policy_iterations for x in (reference, config))
        if abs(after / before - 1) > _TOLERANCE:
            yield Finding(
                "phase_batch",
                "warning",
                f"a phase of {after:,} samples instead of {before:,}",
                "the balance of policy and auxiliary phases is not the one that was tuned",
                f"choose an iteration batch that divides {before:,}, and leave aux.policy_iterations to the rule",
            )
    if config.advantage.normalize:
        old, new = (x.advantage.span * x.iteration_batch for x in (reference, config))
        if abs(new / old - 1) > _TOLERANCE:
            yield Finding(
                "advantage_samples",
                "warning",
                f"advantage moments from {new:,.0f} samples instead of {old:,.0f}",
                "the iteration batch is larger than what they came from, and they cannot use less than an iteration"
                if config.advantage.span == 1
                else "their standard error is not the same",
                "nothing, if advantages are steady; else use fewer environments",
            )
    if config.stale and reference.stale:
        old, new = (_staleness(x) for x in (reference, config))
        if new > (1 + _TOLERANCE) * old:
            yield Finding(
                "staleness",
                "warning",
                f"data of up to {new:,} environment steps ago instead of {old:,}",
                "staleness is counted in iterations, which are larger now",
                "lower rollout.source.delay or max_lag, or keep the iteration batch and change the minibatches",
            )
    before_cut, after_cut = gae_share_cut(reference), gae_share_cut(config)
    if config.rollout.steps != reference.rollout.steps and abs(after_cut - before_cut) > _CUT_CHANGE:
        yield Finding(
            "bootstrapping",
            "warning",
            f"rollout.steps {reference.rollout.steps} -> {config.rollout.steps}",
            f"{after_cut:.0%} of an advantage is bootstrapped, before {before_cut:.0%}",
            f"change env.num_envs instead, or advantage.gae_lambda ({config.advantage.gae_lambda:g}) to compensate",
        )


def _staleness(config: TrainConfig) -> int:
    source = config.rollout.source
    return (source.delay if source.kind == "delayed" else source.max_lag) * config.iteration_batch
