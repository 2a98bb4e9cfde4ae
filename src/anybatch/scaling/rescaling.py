"""Carry hyperparameters from one batch size to another: the adjustments of sections 3 and 4 and of appendix B.

Two batches matter. The *optimisation batch* B = N*T/minibatches, the samples of a gradient step over all workers,
drives the optimiser and the age of the proximal policy. The *iteration batch* N*T drives how many iterations the
advantage moments and a phase of PPG last. Everything here is a pure function from a configuration to a new one and to
the list of what changed and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from anybatch.config.chunks import time_chunks
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.scaling.changes import ASKED, Change, Value, apply_changes, keep_yours, show
from anybatch.scaling.rules import (
    AdamBetas,
    AdamStep,
    Rules,
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
)
"""Every field that scaling may change: the four that make up the batch, then those that follow it."""


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
) -> tuple[TrainConfig, list[Change]]:
    """Divide both batch sizes by ``c`` through the number of environments, and compensate (section 4).

    Args:
        config: hyperparameters that work at their own batch size.
        divide_batch_by: c; below 1 it enlarges the batch.
        workers: data-parallel workers afterwards. By default whole workers go first and then the environments of the
            last one, as in appendix B, and come back in the same way; one worker stays one worker.
        adam_step: divide the Adam step size by sqrt(c), by c (the ablation of appendix C), or not at all; SGD's is
            divided by c unless this is "none".
        adam_betas: raise both of Adam's decay rates to the power 1/c, or "beta2" alone (appendix on Adam's betas).
        ewma: multiply the centre of mass of the proximal EWMA by c.
        advantage_norm: multiply the span of the advantage moments by c.
        policy_iterations: multiply N_pi by c (PPG).
        auxiliary: keep the samples of an auxiliary minibatch per worker, and change the auxiliary step size with the
            number of workers alone (appendix B); else both numbers stay.

    Returns:
        The new configuration, and every field that changed.

    Raises:
        ConfigError: ``num_envs / c`` is not a whole number of environments, or does not fit the minibatches.
    """
    c, num_envs = divide_batch_by, config.env.num_envs
    if not 0 < c < math.inf:
        raise ConfigError(f"divide_batch_by is {c}, but must be a number above 0")
    if num_envs / c < 1 - 1e-9:
        raise ConfigError(
            f"divide_batch_by is {c:g}, but there are only {num_envs} environments to take away from; divide by "
            f"{num_envs} at most, and shorten rollouts beyond that: rescale with num_envs 1 and a smaller rollout_steps"
        )
    fewer = round(num_envs / c)
    if abs(num_envs / c - fewer) > 1e-9 * fewer:
        raise ConfigError(
            f"divide_batch_by is {c:g}, but {num_envs} / {c:g} = {num_envs / c:.6g} is not a whole number of "
            f"environments; the nearest is {fewer}: rescale with num_envs {fewer}"
        )
    rules = Rules(adam_step, adam_betas, ewma, advantage_norm, policy_iterations, auxiliary)
    return _transfer(config, fewer, config.rollout.steps, config.optimizer.minibatches, workers, rules, {})


def rescale(
    config: TrainConfig,
    num_envs: int | None = None,
    rollout_steps: int | None = None,
    minibatches: int | None = None,
    workers: int | None = None,
    *,
    rule: Literal["paper", "fixed-minibatch"] = "paper",
    adam_step: AdamStep = "sqrt",
    adam_betas: AdamBetas = False,
    ewma: bool = True,
    advantage_norm: bool = True,
    policy_iterations: bool = True,
    auxiliary: bool = True,
    yours: Mapping[str, Value] | None = None,
) -> tuple[TrainConfig, list[Change]]:
    """Change what people really change, and compensate each of the two batches by its own factor.

    The optimisation batch decides over step size, Adam's betas and the centre of mass (so that the proximal policy's
    age stays the same in environment steps); the iteration batch over the advantage span and N_pi.

    Args:
        config: hyperparameters that work at their own batch size.
        num_envs: environments N over all workers; None leaves a number as it is, here and below.
        rollout_steps: timesteps per rollout T.
        minibatches: minibatches per epoch.
        workers: data-parallel workers; None lets them follow ``num_envs`` as in :func:`scale`.
        rule: "paper", or "fixed-minibatch", which keeps the samples of a gradient step and with them the step size,
            and takes more or fewer minibatches instead (Beukman et al. 2026, arXiv:2603.06009).
        adam_step: as in :func:`scale`, and so are the rest.
        adam_betas: as there.
        ewma: as there.
        advantage_norm: as there.
        policy_iterations: as there.
        auxiliary: as there.
        yours: values by full field name that win over the rules; the changes say so.

    Returns:
        The new configuration, and every field that changed.

    Raises:
        ConfigError: the new numbers do not fit each other.
    """
    for field, number in zip(FIELDS, (num_envs, rollout_steps, minibatches, workers), strict=False):
        if number is not None and number < 1:
            raise ConfigError(f"{field} is {number}, but must be an integer of at least 1")
    envs, steps = num_envs or config.env.num_envs, rollout_steps or config.rollout.steps
    rules = Rules(adam_step, adam_betas, ewma, advantage_norm, policy_iterations, auxiliary)
    if rule == "fixed-minibatch":
        if minibatches is not None:
            raise ConfigError("rule fixed-minibatch finds the number of minibatches itself; leave minibatches out")
        same_size = same_size_minibatches(config, envs * steps)
        return _transfer(config, envs, steps, same_size, workers, rules, yours or {}, "fixed minibatch")
    return _transfer(config, envs, steps, minibatches or config.optimizer.minibatches, workers, rules, yours or {})


def table(changes: Iterable[Change]) -> str:
    """The changes as an aligned text table, one line a field."""
    rows = [("field", "before", "after", "rule", "why")]
    rows += [(x.field, show(x.before), show(x.after), x.rule, x.why) for x in changes]
    if len(rows) == 1:
        return "nothing changes: this is the batch that the hyperparameters were chosen for"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _transfer(
    config: TrainConfig,
    num_envs: int,
    steps: int,
    minibatches: int,
    workers: int | None,
    rules: Rules,
    yours: Mapping[str, Value],
    minibatches_rule: str = ASKED,
) -> tuple[TrainConfig, list[Change]]:
    time_chunks(num_envs, steps, minibatches)
    unscaled, config = config, replace(config, aux=replace(config.aux, minibatches=config.aux.minibatches_per_epoch))
    samples = f"{num_envs * steps // minibatches:,} samples per gradient step" if minibatches_rule != ASKED else ""
    changes = [
        Change("env.num_envs", config.env.num_envs, num_envs, ASKED, ""),
        Change("rollout.steps", config.rollout.steps, steps, ASKED, ""),
        Change("optimizer.minibatches", config.optimizer.minibatches, minibatches, minibatches_rule, samples),
    ]
    after_batch = apply_changes(config, changes)
    changes += [workers_change(config, after_batch, workers)]
    after_batch = apply_changes(config, changes)
    changes += [*optimizer_changes(config, after_batch, rules), *iteration_changes(config, after_batch, rules)]
    if config.aux.enabled and rules.auxiliary:
        # the phase whose samples are shared out is the one that will be run, so your N_pi counts already
        phase = apply_changes(config, keep_yours(config, changes, yours))
        changes += auxiliary_changes(config, phase, rules)
    changes = [change for change in keep_yours(config, changes, yours) if change.before != change.after]
    scaled, exact = apply_changes(unscaled, changes), apply_changes(config, changes)
    if scaled.aux.minibatches_per_epoch != exact.aux.minibatches_per_epoch:  # a number that stays must not follow N_pi
        scaled = exact
    return scaled, changes
