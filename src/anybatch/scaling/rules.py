"""The single adjustments of section 4 and appendix B of the paper.

Each function takes the configuration before scaling and one in which only the batch is new, and returns the changes
that keep behaviour the same.
"""

from __future__ import annotations

import contextlib
import math

from anybatch.config.chunks import auxiliary_time_chunks
from anybatch.config.schema import PolicyConfig, TrainConfig
from anybatch.config.validation import check_integer
from anybatch.errors import ConfigError
from anybatch.scaling import single
from anybatch.scaling.changes import ASKED, Change
from anybatch.scaling.options import Rules

TOLERANCE = 0.01
"""Relative error of rounding that is reported."""
_USUAL_EPS = 1e-8  # only prevents division by zero


def optimizer_changes(config: TrainConfig, new: TrainConfig, rules: Rules) -> list[Change]:
    """Changes with the optimisation batch: section 3.2, and the second adjustment of section 4."""
    c = config.optimization_batch / new.optimization_batch
    optimizer, policy = config.optimizer, config.policy
    changes = []
    root = optimizer.kind == "adam" and rules.adam_step == "sqrt"
    if rules.adam_step != "none" and rules.noise_scale is not None:
        changes.append(_saturating_change(config, c, rules.noise_scale, root))
    elif rules.adam_step != "none":
        why = f"{_fewer(c)} samples per gradient step"
        if root:
            why += f"; Adam divides by noise that {'grows' if c >= 1 else 'shrinks'} by sqrt({_factor(c)})"
        changes.append(_step_size_change("optimizer.step_size", optimizer.step_size, c, root, why))
    if any(rules.betas) and optimizer.kind == "adam":
        each = zip(optimizer.adam_betas, rules.betas, strict=True)
        beta1, beta2 = (single.adam_beta(beta, divide_batch_by=c) if raised else beta for beta, raised in each)
        betas = (beta1, beta2)
        rule = ("" if all(rules.betas) else "beta2 ") + _inverse_power(c)
        why = "Adam averages over the same number of samples"
        changes.append(Change("optimizer.adam_betas", optimizer.adam_betas, betas, rule, why))
    changes += _noise_changes(config, c, rules)
    if rules.ewma and has_center_of_mass(policy):
        center = policy.center_of_mass
        why = f"the proximal policy stays {proximal_age(config):,.0f} environment steps old"
        after = single.center_of_mass(center, divide_batch_by=c)
        changes.append(Change("policy.center_of_mass", center, after, _times(c), why))
    return changes


def _saturating_change(config: TrainConfig, c: float, noise_scale: float, root: bool) -> Change:
    """Change of the step size where the noise scale may be near: the square ``root`` rule, or the linear one."""
    step, batch = config.optimizer.step_size, config.optimization_batch
    after = single.saturating_step_size(step, divide_batch_by=c, batch=batch, noise_scale=noise_scale, adam=root)
    factor = step / after if step else 1.0
    why = f"{_fewer(c)} samples per gradient step, {batch / c:,.0f} at a noise scale of {noise_scale:,.0f}"
    return Change("optimizer.step_size", step, after, f"{_sign(factor)} {_factor(factor)}", why)


def _noise_changes(config: TrainConfig, c: float, rules: Rules) -> list[Change]:
    """Changes of the limits that gradients are compared with: the maximum norm and Adam's epsilon.

    The mean square of a gradient is |G|^2 (1 + B_noise/B), with B_noise infinite unless it is given.
    """
    optimizer, changes = config.optimizer, []
    grown = "noise" if rules.noise_scale is None else "length"
    if rules.noise_scale is not None:
        batch = config.optimization_batch
        c = (batch + c * rules.noise_scale) / (batch + rules.noise_scale)
    rule, noise = _times_root(c), f"{grown} {'grows' if c >= 1 else 'shrinks'} by sqrt({_factor(c)})"
    if rules.max_grad_norm == "sqrt" and optimizer.max_grad_norm is not None:
        limit, why = optimizer.max_grad_norm, f"the same share of gradients is clipped: their {noise}"
        after = limit if math.isinf(limit) else single.max_grad_norm(limit, divide_batch_by=c)
        changes.append(Change("optimizer.max_grad_norm", limit, after, rule, why))
    if rules.adam_eps == "sqrt" and optimizer.kind == "adam" and optimizer.adam_eps > _USUAL_EPS:
        after, why = (
            single.adam_eps(optimizer.adam_eps, divide_batch_by=c),
            f"in proportion to gradients, whose {noise}",
        )
        changes.append(Change("optimizer.adam_eps", optimizer.adam_eps, after, rule, why))
    return changes


def iteration_changes(config: TrainConfig, new: TrainConfig, rules: Rules) -> list[Change]:
    """Changes with the iteration batch: the third and fourth adjustment of section 4, and staleness."""
    c = config.iteration_batch / new.iteration_batch
    changes = []
    span, iterations = config.advantage.span, config.aux.policy_iterations
    if rules.advantage_norm and config.advantage.normalize:
        why = f"advantage mean and std are still averaged over {span * config.iteration_batch:,.0f} samples"
        if span * c < 1:
            why = f"the rule gives {span * c:.3g}, but 1, the current iteration, is the minimum"
        changes.append(Change("advantage.span", span, single.advantage_span(span, divide_batch_by=c), _times(c), why))
    epochs = max(config.optimizer.policy_epochs, config.optimizer.value_epochs)
    if _spreads(config, rules) and epochs > 1:
        before, apart = config.optimizer.epoch_window, config.optimizer.epoch_window * config.iteration_batch / epochs
        after = single.epoch_window(before, divide_batch_by=c)
        why = f"passes over a sample stay {apart:,.0f} environment steps apart"
        if before * c < 1:
            why = f"the rule gives {before * c:.3g}, but 1, all passes at once, is the minimum"
        changes.append(Change("optimizer.epoch_window", before, after, _times(c), why))
    if rules.adaptive_step:
        changes += _kl_changes(config, new, c, rules)
    if rules.policy_iterations and config.aux.enabled:
        phase = iterations * config.iteration_batch
        try:
            nearest = single.policy_iterations(iterations, divide_batch_by=c)
        except ConfigError as error:
            raise ConfigError(f"aux.{error}, which is {phase:,} samples") from None
        why = f"a phase still has {phase:,} samples"
        if not math.isclose(nearest, iterations * c):
            why = f"the rule gives {iterations * c:.5g}; a phase has {nearest * new.iteration_batch:,} samples"
        changes.append(Change("aux.policy_iterations", iterations, nearest, _times(c), why))
    if rules.staleness and config.stale:
        changes.append(_staleness_change(config, new, c))
    return changes


def _kl_changes(config: TrainConfig, new: TrainConfig, c: float, rules: Rules) -> list[Change]:
    """Changes of an adaptive step size and of stopping by KL divergence.

    A step size changes by the factor f once an iteration, and so by f^(1/c) if there are c times as many iterations.
    The KL divergence from an EWMA stays the same, as the age of the EWMA does. Where the proximal policy is that of an
    iteration, its square root is the distance of K gradient steps in which noise dominates, K times as many as before
    of 1/sqrt(c) of the size: the divergence is 1/c of what it was. With spread policy epochs, or stale data whose age
    is kept, the data, and with it a behaviour policy, is as old as it was.
    """
    optimizer, changes = config.optimizer, []
    if new.optimizer.kl_target is not None:
        why = f"the step size changes equally fast per environment step, in {_fewer(1 / c)} iterations"
        after = single.kl_factor(optimizer.kl_factor, divide_batch_by=c)
        if math.log(after) < math.log(optimizer.kl_factor) / c * (1 - TOLERANCE):
            why = f"at most {after:g}: more would jump across the range from half to twice optimizer.kl_target"
        changes.append(Change("optimizer.kl_factor", optimizer.kl_factor, after, _inverse_power(c), why))
    spread = _spreads(config, rules) and optimizer.policy_epochs > 1 and optimizer.epoch_window * c >= 1
    stale = rules.staleness and config.stale and _keeps_age(config, new, c)
    as_old = config.policy.proximal == "behavior" and (spread or stale)
    if config.policy.proximal != "ewma" and not as_old:
        why = (
            "the policy moves less in a shorter iteration" if c >= 1 else "the policy moves more in a longer iteration"
        )
        for name in ("kl_target", "kl_stop"):
            value = getattr(optimizer, name)
            if value is not None:
                changes.append(Change(f"optimizer.{name}", value, value / c, f"{_sign(c)} {_factor(c)}", why))
    return changes


def _spreads(config: TrainConfig, rules: Rules) -> bool:
    """Whether ``optimizer.epoch_window`` follows the batch: it is asked for, or passes are spread already."""
    return rules.epochs == "spread" or config.optimizer.epoch_window > 1


def _keeps_age(config: TrainConfig, new: TrainConfig, c: float) -> bool:
    """Whether stale data is as old in environment steps as before, up to rounding to whole iterations."""
    lag = single.max_lag(config.rollout.source.lag, divide_batch_by=c)
    return abs(lag * new.iteration_batch / staleness(config) - 1) <= TOLERANCE


def _staleness_change(config: TrainConfig, new: TrainConfig, c: float) -> Change:
    """Delay or maximal lag, which count iterations, for data of the same age in environment steps."""
    source, at_most = config.rollout.source, "at most " if config.rollout.source.kind == "asynchronous" else ""
    lag = single.max_lag(source.lag, divide_batch_by=c)
    before, after = staleness(config), lag * new.iteration_batch
    why = f"data stays {at_most}{before:,} environment steps old"
    if not _keeps_age(config, new, c):
        why = f"the rule gives {source.lag * c:.4g}; data is {at_most}{after:,} steps old instead of {before:,}"
    name = "delay" if source.kind == "delayed" else "max_lag"
    return Change(f"rollout.source.{name}", source.lag, lag, _times(c), why)


def auxiliary_changes(config: TrainConfig, new: TrainConfig, rules: Rules) -> list[Change]:
    """Auxiliary phase of appendix B: the minibatch per worker is kept, the step size follows the number of workers.

    If the minibatch per worker has to be rounded, the step size follows the samples of a gradient step over all
    workers, which is the same rule.
    """
    per_worker = _phase_samples(config) / config.aux.minibatches_per_epoch / config.workers
    minibatches = _nearest_minibatches(new, _phase_samples(new) / (per_worker * new.workers))
    now = _phase_samples(new) / minibatches / new.workers
    exact = math.isclose(now, per_worker)
    why = f"{now:,.0f} samples per worker and gradient step, {'as before' if exact else f'before {per_worker:,.0f}'}"
    factor = config.aux.minibatches_per_epoch / minibatches
    rule = f"{_sign(factor)} {_factor(factor)}"
    changes = [Change("aux.minibatches", config.aux.minibatches_per_epoch, minibatches, rule, why)]
    if rules.adam_step != "none":
        c = config.workers / new.workers * (1 if exact else per_worker / now)
        why = f"workers {config.workers} -> {new.workers}: " if config.workers != new.workers else ""
        why += f"{_fewer(c)} samples per auxiliary gradient step"
        changes.append(_step_size_change("aux.step_size", config.aux.step_size, c, rules.adam_step == "sqrt", why))
    return changes


def _step_size_change(field: str, step: float, c: float, root: bool, why: str) -> Change:
    rule, by = (single.adam_step_size, f"sqrt({_factor(c)})") if root else (single.sgd_step_size, _factor(c))
    return Change(field, step, rule(step, divide_batch_by=c), f"{_sign(c)} {by}", why)


def _nearest_minibatches(config: TrainConfig, exact: float) -> int:
    """Number of auxiliary minibatches nearest to ``exact`` that divides a phase's trajectories evenly."""
    start = max(1, round(exact))
    for candidate in (start + sign * distance for distance in range(start) for sign in (-1, 1)):
        with contextlib.suppress(ConfigError):
            auxiliary_time_chunks(config.aux.policy_iterations, config.env.num_envs, config.rollout.steps, candidate)
            return candidate
    return 1


def _phase_samples(config: TrainConfig) -> int:
    return config.iteration_batch * config.aux.policy_iterations


def workers_change(config: TrainConfig, new: TrainConfig, asked: int | None) -> Change:
    """Number of workers: as asked, or by the number of environments as in appendix B.

    Only the auxiliary phase depends on the number of workers, so without one it stays.
    """
    if asked is not None:
        return Change("workers", config.workers, check_integer("workers", asked, at_least=1), ASKED, "")
    num_envs, workers = new.env.num_envs, config.workers
    if config.aux.enabled and workers > 1 and num_envs != config.env.num_envs:
        # the divisor of num_envs that comes nearest to as many environments per worker as before
        exact = max(1.0, num_envs * workers / config.env.num_envs)
        divisors = [n for n in range(1, min(num_envs, math.ceil(2 * exact)) + 1) if num_envs % n == 0]
        workers = min(divisors, key=lambda n: abs(math.log(n / exact)))
    until = " until one worker remains" if num_envs < config.env.num_envs else ""
    why = f"the number of environments per worker stays constant{until} (appendix B)"
    return Change("workers", config.workers, workers, "with num_envs", why)


def same_size_minibatches(config: TrainConfig, samples: int) -> int:
    """Number of minibatches of unchanged size in an iteration of ``samples``."""
    exact = config.optimizer.minibatches * samples / config.iteration_batch
    if exact < 1 or not exact.is_integer():
        raise ConfigError(
            f"rule fixed-minibatch keeps {config.optimization_batch:g} samples per minibatch, but an iteration of "
            f"{samples} samples would have {exact:.4g} of them; choose num_envs times rollout_steps as a multiple"
        )
    return int(exact)


def has_center_of_mass(policy: PolicyConfig) -> bool:
    """Whether the age of the proximal policy is ``center_of_mass``, which can follow the batch."""
    return policy.proximal == "ewma" or policy.interpolated


def proximal_age(config: TrainConfig) -> float:
    """Average age of the proximal EWMA in environment steps: centre of mass times B, over the policy epochs."""
    return config.policy.center_of_mass * config.optimization_batch / config.optimizer.policy_epochs


def staleness(config: TrainConfig) -> int:
    """Age of the data in environment steps; for asynchronous sources the maximum."""
    return config.rollout.source.lag * config.iteration_batch


def _sign(c: float) -> str:
    return "/" if c >= 1 else "x"


def _factor(c: float) -> str:
    return f"{max(c, 1 / c):.6g}"


def _times(c: float) -> str:
    return f"{'x' if c >= 1 else '/'} {_factor(c)}"


def _inverse_power(c: float) -> str:
    return f"^ (1/{c:.6g})" if c >= 1 else f"^ {1 / c:.6g}"


def _times_root(c: float) -> str:
    return f"{'x' if c >= 1 else '/'} sqrt({_factor(c)})"


def _fewer(c: float) -> str:
    return f"{_factor(c)} times {'fewer' if c >= 1 else 'more'}"
