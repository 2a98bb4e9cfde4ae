"""The single adjustments: how each field follows the two batches (section 4 and appendix B of the paper).

Each function takes the configuration before, with its own batch, and the one after, whose batch is changed already, and
returns the changes that keep behaviour the same.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from anybatch.config.chunks import auxiliary_time_chunks
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.scaling.changes import ASKED, Change

AdamStep: TypeAlias = Literal["sqrt", "linear", "none"]
"""What Adam's step size is divided by: sqrt(c), c, or nothing."""
AdamBetas: TypeAlias = bool | Literal["beta2"]
"""Which decay rates of Adam are raised to the power 1/c."""


@dataclass(frozen=True)
class Rules:
    """Which adjustments are made, and how; the paper's by default, its ablations otherwise."""

    adam_step: AdamStep = "sqrt"
    """What Adam's step size is divided by."""
    adam_betas: AdamBetas = False
    """Which decay rates of Adam follow."""
    ewma: bool = True
    """Whether the proximal policy's centre of mass follows."""
    advantage_norm: bool = True
    """Whether the span of the advantage moments follows."""
    policy_iterations: bool = True
    """Whether the iterations of a phase of PPG follow."""
    auxiliary: bool = True
    """Whether the auxiliary phase's minibatches and step size follow."""


def optimizer_changes(config: TrainConfig, new: TrainConfig, rules: Rules) -> list[Change]:
    """What follows the optimisation batch: section 3.2, and the second adjustment of section 4."""
    c = config.optimization_batch / new.optimization_batch
    optimizer, policy = config.optimizer, config.policy
    changes = []
    if rules.adam_step != "none":
        adam = optimizer.kind == "adam"
        power = 0.5 if adam and rules.adam_step == "sqrt" else 1.0
        by = {0.5: f"sqrt({_factor(c)})", 1.0: _factor(c)}[power]
        why = f"{_fewer(c)} samples per gradient step"
        if power == 0.5:
            why += f"; Adam divides by noise that {'grows' if c >= 1 else 'shrinks'} by {by}"
        changes.append(
            Change("optimizer.step_size", optimizer.step_size, optimizer.step_size / c**power, f"{_sign(c)} {by}", why)
        )
    if rules.adam_betas and optimizer.kind == "adam":
        beta1, beta2 = optimizer.adam_betas
        betas = (beta1 if rules.adam_betas == "beta2" else beta1 ** (1 / c), beta2 ** (1 / c))
        rule = ("beta2 " if rules.adam_betas == "beta2" else "") + f"^ (1/{c:.6g})"
        changes.append(
            Change("optimizer.adam_betas", optimizer.adam_betas, betas, rule, "Adam averages over as many samples")
        )
    if rules.ewma and policy.proximal == "ewma":
        why = f"the proximal policy stays {proximal_age(config):,.0f} environment steps old"
        changes.append(
            Change("policy.center_of_mass", policy.center_of_mass, policy.center_of_mass * c, _times(c), why)
        )
    return changes


def iteration_changes(config: TrainConfig, new: TrainConfig, rules: Rules) -> list[Change]:
    """What follows the iteration batch: the third and fourth adjustment of section 4."""
    c = config.iteration_batch / new.iteration_batch
    changes = []
    span, iterations = config.advantage.span, config.aux.policy_iterations
    if rules.advantage_norm and config.advantage.normalize:
        why = f"advantage moments still come from {span * config.iteration_batch:,.0f} samples"
        if span * c < 1:
            why = f"the rule gives {span * c:.3g}, but the current iteration is the least"
        changes.append(Change("advantage.span", span, max(1.0, span * c), _times(c), why))
    if rules.policy_iterations and config.aux.enabled:
        phase = iterations * config.iteration_batch
        if iterations * c < 0.5:
            raise ConfigError(
                f"aux.policy_iterations would be {iterations} x {c:.4g} = {iterations * c:.3g}, but a phase has at "
                f"least 1 iteration; an iteration of up to {phase:,} samples keeps the phase as it is"
            )
        why = f"a phase still holds {phase:,} samples"
        nearest = max(1, round(iterations * c))
        if not math.isclose(nearest, iterations * c):
            why = f"the rule gives {iterations * c:.5g}; this is the nearest to phases of {phase:,} samples"
        changes.append(Change("aux.policy_iterations", iterations, nearest, _times(c), why))
    return changes


def auxiliary_changes(config: TrainConfig, new: TrainConfig, rules: Rules) -> list[Change]:
    """The auxiliary phase of appendix B: minibatch size per worker kept, step size by the number of workers alone."""
    per_worker = _phase_samples(config) / config.aux.minibatches_per_epoch / config.workers
    minibatches = _nearest_minibatches(new, _phase_samples(new) / (per_worker * new.workers))
    c = config.workers / new.workers
    now = _phase_samples(new) / minibatches / new.workers
    before = "as before" if math.isclose(now, per_worker) else f"before {per_worker:,.0f}"
    why = f"{now:,.0f} samples per worker and gradient step, {before}"
    factor = config.aux.minibatches_per_epoch / minibatches
    changes = [
        Change(
            "aux.minibatches", config.aux.minibatches_per_epoch, minibatches, f"{_sign(factor)} {_factor(factor)}", why
        )
    ]
    if rules.adam_step != "none":
        power, by = (0.5, f"sqrt({_factor(c)})") if rules.adam_step == "sqrt" else (1.0, _factor(c))
        step = config.aux.step_size
        why = f"workers {config.workers} -> {new.workers}: {_fewer(c)} samples per auxiliary gradient step"
        changes.append(Change("aux.step_size", step, step / c**power, f"{_sign(c)} {by}", why))
    return changes


def _nearest_minibatches(config: TrainConfig, exact: float) -> int:
    """The number of auxiliary minibatches nearest to ``exact`` that shares out a phase's trajectories evenly."""
    start = max(1, round(exact))
    for candidate in (start + sign * distance for distance in range(start) for sign in (-1, 1)):
        with contextlib.suppress(ConfigError):
            auxiliary_time_chunks(config.aux.policy_iterations, config.env.num_envs, config.rollout.steps, candidate)
            return candidate
    return 1


def _phase_samples(config: TrainConfig) -> int:
    return config.iteration_batch * config.aux.policy_iterations


def workers_change(config: TrainConfig, new: TrainConfig, asked: int | None) -> Change:
    """The number of workers: as asked, or following the environments as in appendix B."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"workers is {asked}, but must be an integer of at least 1")
        return Change("workers", config.workers, asked, ASKED, "")
    num_envs, workers = new.env.num_envs, config.workers
    if workers > 1 and num_envs != config.env.num_envs:
        # a worker stays as full as it is until only one is left; the nearest count that shares environments evenly
        full = max(1.0, num_envs * workers / config.env.num_envs)
        shares = [n for n in range(1, min(num_envs, math.ceil(2 * full)) + 1) if num_envs % n == 0]
        workers = min(shares, key=lambda n: abs(math.log(n / full)))
    why = "workers stay full until one is left (appendix B)"
    return Change("workers", config.workers, workers, "workers first", why)


def same_size_minibatches(config: TrainConfig, samples: int) -> int:
    """Minibatches that share out an iteration of ``samples`` with as many samples each as before."""
    exact = config.optimizer.minibatches * samples / config.iteration_batch
    if exact < 1 or not exact.is_integer():
        raise ConfigError(
            f"rule fixed-minibatch keeps {config.optimization_batch:g} samples a minibatch, of which an iteration of "
            f"{samples} would have {exact:.4g}; choose num_envs times rollout_steps as a multiple of that"
        )
    return int(exact)


def proximal_age(config: TrainConfig) -> float:
    """Average age of the proximal EWMA in environment steps: centre of mass times B, over the policy epochs."""
    return config.policy.center_of_mass * config.optimization_batch / config.optimizer.policy_epochs


def _sign(c: float) -> str:
    return "/" if c >= 1 else "x"


def _factor(c: float) -> str:
    return f"{max(c, 1 / c):.6g}"


def _times(c: float) -> str:
    return f"{'x' if c >= 1 else '/'} {_factor(c)}"


def _fewer(c: float) -> str:
    return f"{_factor(c)} times {'fewer' if c >= 1 else 'more'}"
