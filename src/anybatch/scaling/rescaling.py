"""Carry hyperparameters from one batch size to another: the adjustments of sections 3 and 4 and of appendix B.

Two batches matter. The *optimisation batch* B = N*T/minibatches, the samples of a gradient step over all workers,
determines the optimiser's settings and the age of the proximal policy. The *iteration batch* N*T determines the number
of iterations behind the advantage moments, in a phase of PPG, and in the delay of stale data.

:func:`scale` and :func:`rescale` return the new configuration and the list of changes, and emit a
:class:`~anybatch.errors.ScalingWarning` for each condition of batch size-invariance that the result does not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypedDict, Unpack

from anybatch.config import fields
from anybatch.config.chunks import time_chunks
from anybatch.config.io import converted
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import MOST_ENVS, check_choice, check_integer, check_positive
from anybatch.errors import ConfigError
from anybatch.scaling.changes import ASKED, Change, Value, apply_changes, show, with_overrides
from anybatch.scaling.conditions import warn_about
from anybatch.scaling.options import AdamBetas, AdamStep, Epochs, RuleName, Rules, WithNoise
from anybatch.scaling.rules import (
    auxiliary_changes,
    iteration_changes,
    optimizer_changes,
    same_size_minibatches,
    workers_change,
)

FIELDS = (
    "env.num_envs",
    "rollout.steps",
    "optimizer.minibatches",
    "workers",
    "optimizer.step_size",
    "optimizer.adam_betas",
    "policy.center_of_mass",
    "advantage.span",
    "aux.policy_iterations",
    "aux.minibatches",
    "aux.step_size",
    "rollout.source.delay",
    "rollout.source.max_lag",
    "optimizer.max_grad_norm",
    "optimizer.adam_eps",
    "optimizer.epoch_window",
    "optimizer.kl_factor",
    "optimizer.kl_target",
    "optimizer.kl_stop",
)
"""Fields that scaling may change: the four that make up the batch, then those that depend on it, by the
paper's rules and by those beyond it."""


class _RuleOptions(TypedDict, total=False):
    """Keyword arguments of :func:`scale` that choose rules."""

    adam_step: AdamStep
    adam_betas: AdamBetas
    ewma: bool
    advantage_norm: bool
    policy_iterations: bool
    auxiliary: bool
    staleness: bool
    max_grad_norm: WithNoise
    adam_eps: WithNoise
    adaptive_step: bool
    noise_scale: float | None
    epochs: Epochs


def scale(
    config: TrainConfig,
    divide_batch_by: float,
    *,
    workers: int | None = None,
    adam_step: AdamStep = "sqrt",
    adam_betas: AdamBetas = False,
    ewma: bool = True,
    advantage_norm: bool = True,
    policy_iterations: bool = True,
    auxiliary: bool = True,
    staleness: bool = True,
    max_grad_norm: WithNoise = "none",
    adam_eps: WithNoise = "sqrt",
    adaptive_step: bool = True,
    noise_scale: float | None = None,
    epochs: Epochs = "at-once",
) -> tuple[TrainConfig, list[Change]]:
    """Divide both batch sizes by ``c`` through the number of environments, and compensate (section 4).

    Args:
        config: hyperparameters that work at their own batch size.
        divide_batch_by: c; below 1 it enlarges the batch.
        workers: data-parallel workers afterwards. By default (PPG) environments per worker stay constant until one
            worker remains, as in appendix B; one worker stays one worker.
        adam_step: divide the Adam step size by sqrt(c), by c (the ablation of appendix C), or not at all; SGD's is
            divided by c unless this is "none".
        adam_betas: raise "both" of Adam's decay rates to the power 1/c, "beta2" alone, or "keep" them (appendix on
            Adam's betas); True and False mean both and keep.
        ewma: multiply the centre of mass of the proximal EWMA by c.
        advantage_norm: multiply the span of the advantage moments by c.
        policy_iterations: multiply N_pi by c (PPG).
        auxiliary: keep the samples of an auxiliary minibatch per worker, and change the auxiliary step size with the
            number of workers alone (appendix B); else both numbers stay.
        staleness: multiply the delay of a delayed source, and the maximal lag of an asynchronous one, by c, rounded to
            a whole number of iterations and at least 1.
        max_grad_norm: beyond the paper: "sqrt" multiplies the maximum norm of the gradient by sqrt(c).
        adam_eps: multiply Adam's epsilon by sqrt(c) if it is above the usual 1e-8.
        adaptive_step: raise ``optimizer.kl_factor`` to the power 1/c; and divide ``optimizer.kl_target`` and
            ``optimizer.kl_stop`` by c if the proximal policy is that of an iteration.
        noise_scale: in samples; step sizes, ``max_grad_norm`` and ``adam_eps`` saturate there; None assumes that it is
            far above both batches.
        epochs: "spread" multiplies ``optimizer.epoch_window`` by c where there are several epochs; "at-once" does so
            only if it is above 1, where passes are spread already.

    Returns:
        The new configuration, and every field that changed.

    Raises:
        ConfigError: ``num_envs / c`` is not a whole number of environments, or does not fit the minibatches; or an
            option is none of its choices.

    Warns:
        ScalingWarning: a condition of :func:`anybatch.scaling.validity` is not met.
    """
    fewer = _divided_envs(config.env.num_envs, divide_batch_by)
    paper = adam_step, adam_betas, ewma, advantage_norm, policy_iterations, auxiliary, staleness
    rules = Rules(*paper, max_grad_norm, adam_eps, adaptive_step, noise_scale, epochs)
    return _transfer(config, fewer, config.rollout.steps, config.optimizer.minibatches, workers, rules, {})


def rescale(
    config: TrainConfig,
    num_envs: int | None = None,
    rollout_steps: int | None = None,
    minibatches: int | None = None,
    workers: int | None = None,
    *,
    rule: RuleName = "paper",
    overrides: Mapping[str, Value] | None = None,
    **rules: Unpack[_RuleOptions],
) -> tuple[TrainConfig, list[Change]]:
    """Change the numbers that make up the batch, and compensate each of the two batches by its own factor.

    Step size, Adam's betas and the centre of mass (so that the proximal policy's age stays the same in environment
    steps) depend on the optimisation batch; advantage span, N_pi and staleness on the iteration batch.

    Args:
        config: hyperparameters that work at their own batch size.
        num_envs: environments N over all workers; None keeps the number, here and below.
        rollout_steps: timesteps per rollout T.
        minibatches: minibatches per epoch.
        workers: data-parallel workers; None changes them with ``num_envs`` as in :func:`scale`.
        rule: "paper", or "fixed-minibatch", which keeps the samples of a gradient step and with them the step size,
            and takes more or fewer minibatches instead (Beukman et al. 2026, arXiv:2603.06009).
        overrides: values by field name that replace those of the rules; their changes have the rule "by hand". The
            rules see other fields, such as ``optimizer.kind``, as they are set here.
        **rules: ``adam_step`` and all that follow it as in :func:`scale`.

    Returns:
        The new configuration, and every field that changed.

    Raises:
        ConfigError: the new numbers do not fit each other, or ``overrides`` has one that is an argument.

    Warns:
        ScalingWarning: a condition of :func:`anybatch.scaling.validity` is not met.
    """
    check_choice("rule", rule, RuleName)
    num_envs, rollout_steps, minibatches, workers = (
        None if number is None else check_integer(field, number, at_least=1)
        for field, number in zip(FIELDS, (num_envs, rollout_steps, minibatches, workers), strict=False)
    )
    overrides = {full: converted(full, value) for full, value in fields.flat(overrides or {}).items()}
    for name, argument in zip(FIELDS, ("num_envs", "rollout_steps", "minibatches", "workers"), strict=False):
        if name in overrides:
            raise ConfigError(f"overrides has {name}, which makes up the batch: pass {argument}= to rescale")
    if num_envs is not None and num_envs > MOST_ENVS:
        raise ConfigError(f"env.num_envs is {num_envs}, but must be an integer from 1 to {MOST_ENVS:,}")
    envs, steps = num_envs or config.env.num_envs, rollout_steps or config.rollout.steps
    new_minibatches, reason = minibatches or config.optimizer.minibatches, ASKED
    if rule == "fixed-minibatch":
        if minibatches is not None:
            raise ConfigError("rule fixed-minibatch computes the number of minibatches; leave minibatches out")
        new_minibatches, reason = same_size_minibatches(config, envs * steps), "fixed minibatch"
    return _transfer(config, envs, steps, new_minibatches, workers, Rules(**rules), overrides, reason)


def table(changes: Iterable[Change]) -> str:
    """Changes as an aligned text table, one line per field."""
    rows = [("field", "before", "after", "rule", "why")]
    rows += [(x.field, show(x.before), show(x.after), x.rule, x.why) for x in changes]
    if len(rows) == 1:
        return "nothing changes: the hyperparameters were tuned at this batch"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _divided_envs(num_envs: int, c: float) -> int:
    """``num_envs / c``, if that is a whole number of environments."""
    c = float(check_positive("divide_batch_by", c))
    if num_envs / c < 1 - 1e-9:
        raise ConfigError(
            f"divide_batch_by is {c:g}, but there are only {num_envs} environments: the divisor can be at most "
            f"{num_envs}; for smaller batches, rescale to env.num_envs 1 and fewer rollout.steps"
        )
    if num_envs / c > MOST_ENVS:
        raise ConfigError(f"divide_batch_by is {c:g}, but {num_envs} / {c:g} environments are more than {MOST_ENVS:,}")
    fewer = round(num_envs / c)
    if abs(num_envs / c - fewer) > 1e-9 * fewer:
        raise ConfigError(
            f"divide_batch_by is {c:g}, but {num_envs} / {c:g} = {num_envs / c:.6g} is not a whole number of "
            f"environments; the nearest is {fewer}: rescale to env.num_envs {fewer}"
        )
    return fewer


def _transfer(
    config: TrainConfig,
    num_envs: int,
    steps: int,
    minibatches: int,
    workers: int | None,
    rules: Rules,
    overrides: Mapping[str, Value],
    minibatches_rule: str = ASKED,
) -> tuple[TrainConfig, list[Change]]:
    time_chunks(num_envs, steps, minibatches, config.optimizer.shuffle)
    unscaled, config = config, replace(config, aux=replace(config.aux, minibatches=config.aux.minibatches_per_epoch))
    samples = f"{num_envs * steps // minibatches:,} samples per gradient step" if minibatches_rule != ASKED else ""
    changes = [
        Change("env.num_envs", config.env.num_envs, num_envs, ASKED, ""),
        Change("rollout.steps", config.rollout.steps, steps, ASKED, ""),
        Change("optimizer.minibatches", config.optimizer.minibatches, minibatches, minibatches_rule, samples),
    ]
    rules = replace(rules, staleness=rules.staleness and config.stale)  # fresh data has no age to keep
    after_batch = apply_changes(config, changes)
    changes += [workers_change(config, after_batch, workers)]
    by_hand = {name: value for name, value in overrides.items() if name == "optimizer.kl_target"}  # may switch it on
    others = {name: value for name, value in overrides.items() if name not in FIELDS}
    ruled = apply_changes(config, with_overrides(config, [], others))
    after_batch = apply_changes(ruled, with_overrides(ruled, changes, by_hand))
    changes += [*optimizer_changes(ruled, after_batch, rules), *iteration_changes(ruled, after_batch, rules)]
    if ruled.aux.enabled and rules.auxiliary:
        # minibatches divide the phase that will be run, so an N_pi set by hand counts already
        phase = apply_changes(config, with_overrides(config, changes, overrides))
        changes += auxiliary_changes(ruled, phase, rules)
    changes = [change for change in with_overrides(config, changes, overrides) if change.before != change.after]
    scaled, exact = apply_changes(unscaled, changes), apply_changes(config, changes)
    if scaled.aux.minibatches_per_epoch != exact.aux.minibatches_per_epoch:  # minibatches None would change with N_pi
        scaled = exact
    if changes:
        warn_about(scaled, unscaled, stacklevel=4)
    return scaled, changes
