"""Single rules of section 4, for the numbers of any program; no configuration needed.

Each takes a number that works at some batch size, and the factor c by which the batch is divided, and returns the
number for the other batch; c below 1 enlarges the batch. Which batch is meant depends on the number: the *optimisation
batch*, the samples of one gradient step over all workers and accumulated micro-batches, or the *iteration batch*, the
samples between two rounds of collecting data.

>>> adam_step_size(3e-4, divide_batch_by=16)
7.5e-05
>>> center_of_mass(8, divide_batch_by=16)
128.0
"""

from __future__ import annotations

import math
from typing import Any

from anybatch.config.validation import check_number, check_positive, is_number
from anybatch.errors import ConfigError, shown

_MOST = 1e12
"""Largest divisor of a batch, beyond the samples of any; larger ones would overflow the numbers that grow with it."""
_MOST_KL_FACTOR = 2.0
"""The step size is kept between half and twice the target; a larger factor would jump across that range."""


def adam_step_size(step_size: float, *, divide_batch_by: float) -> float:
    """Divide the step size of Adam, or of another optimiser that divides by the noise, by sqrt(c) (appendix C).

    Args:
        step_size: Adam's learning rate.
        divide_batch_by: c, the factor of the optimisation batch.

    Returns:
        The step size at 1/c of the batch.

    Raises:
        ConfigError: the step size is below 0, or c not a number from 1e-12 to 1e12.
    """
    return float(_step_size(step_size) / _factor(divide_batch_by) ** 0.5)


def sgd_step_size(step_size: float, *, divide_batch_by: float) -> float:
    """Divide the step size of SGD, with momentum or without, by c (section 3.2).

    Args:
        step_size: SGD's learning rate.
        divide_batch_by: c, the factor of the optimisation batch.

    Returns:
        The step size at 1/c of the batch.

    Raises:
        ConfigError: the step size is below 0, or c not a number from 1e-12 to 1e12.
    """
    return float(_step_size(step_size) / _factor(divide_batch_by))


def saturating_step_size(
    step_size: float, *, divide_batch_by: float, batch: float, noise_scale: float, adam: bool = True
) -> float:
    """Change a step size with the batch as far as the noise scale allows (beyond the paper).

    Over a step of size e along a gradient of B samples the loss changes by ``-e |G|^2 + e^2/2 (G'HG + tr(H Sigma)/B)``,
    with G the true gradient, H the Hessian and Sigma the covariance of one sample's gradient. The best e is
    proportional to ``1/(1 + B_noise/B)`` (McCandlish et al. 2018, arXiv:1812.06162, section 2.2): B while B is far
    below B_noise, and constant beyond, where a gradient hardly becomes more precise. For Adam they fit a power from 1/2
    to 1 of it (in an appendix). Here it is 1/2, with which ``sqrt(B / (1 + B/B_noise))`` joins the square root rule.

    Args:
        step_size: that works at ``batch``.
        divide_batch_by: c, the factor of the optimisation batch.
        batch: B, samples of a gradient step where the step size works.
        noise_scale: B_noise in samples, such as the columns ``noise_scale_adam`` and ``noise_scale`` of a run.
        adam: of Adam; otherwise of SGD, with power 1.

    Returns:
        The step size at 1/c of the batch.

    Raises:
        ConfigError: an argument is not a number above 0.
    """
    c, inverse = _factor(divide_batch_by), check_positive("noise_scale", noise_scale) / check_positive("batch", batch)
    factor = (1 + inverse) / (1 + inverse * c)
    return float(_step_size(step_size) * (factor**0.5 if adam else factor))


def adam_beta(beta: float, *, divide_batch_by: float) -> float:
    """Raise a decay rate of Adam to the power 1/c, which keeps the samples that it averages over.

    The paper's main experiments leave Adam's decay rates as they are; its appendix on Adam's betas measures the effect.

    Args:
        beta: decay rate of Adam's first or second moment, in [0, 1).
        divide_batch_by: c, the factor of the optimisation batch.

    Returns:
        The decay rate at 1/c of the batch.

    Raises:
        ConfigError: ``beta`` is out of range, or c not a number from 1e-12 to 1e12.
    """
    given: Any = beta
    if not (is_number(given) and 0 <= beta < 1):
        raise ConfigError(f"beta is {shown(given)}, but a decay rate must be at least 0 and below 1")
    return float(beta ** (1 / _factor(divide_batch_by)))


def max_grad_norm(max_norm: float, *, divide_batch_by: float) -> float:
    """Multiply the maximum norm of the gradient by sqrt(c), so that clipping bites as often (beyond the paper).

    A mean gradient g over B samples has ``E|g|^2 = |G|^2 + tr(Sigma)/B``, with G the true gradient and Sigma the
    covariance of one sample's. Where noise dominates, B far below ``tr(Sigma)/|G|^2``, the norm is sqrt(c) times as
    long at 1/c of the batch. With the limit sqrt(c) times as high the factor ``limit / |g|`` has the same distribution,
    and clipped gradients are those of the tuned batch times sqrt(c), which is all that the rules for the step size ask
    of them. Past that batch the norm stays and so should the limit.

    Args:
        max_norm: limit of the joint norm of all gradients.
        divide_batch_by: c, the factor of the optimisation batch.

    Returns:
        The limit at 1/c of the batch.

    Raises:
        ConfigError: an argument is not a number above 0.
    """
    return float(check_positive("max_grad_norm", max_norm) * _factor(divide_batch_by) ** 0.5)


def adam_eps(eps: float, *, divide_batch_by: float) -> float:
    """Multiply Adam's epsilon by sqrt(c), the square-root rule of Malladi et al. 2022 (arXiv:2205.10287).

    Adam divides by ``sqrt(v) + eps``. The square-root rule for the step size holds because sqrt(v), the root mean
    square of a gradient that is mostly noise, grows by sqrt(c); the sum grows so only if epsilon does. It matters
    where epsilon is not negligible beside the gradients.

    Args:
        eps: Adam's epsilon.
        divide_batch_by: c, the factor of the optimisation batch.

    Returns:
        Epsilon at 1/c of the batch.

    Raises:
        ConfigError: an argument is not a number above 0.
    """
    return float(check_positive("adam_eps", eps) * _factor(divide_batch_by) ** 0.5)


def center_of_mass(center: float, *, divide_batch_by: float) -> float:
    """Multiply the centre of mass of the proximal EWMA by c (second adjustment of section 4).

    The proximal policy stays as old in samples: c times as many gradient steps of 1/c of the batch.

    Args:
        center: beta/(1-beta) in gradient steps, at least 0.
        divide_batch_by: c, the factor of the optimisation batch.

    Returns:
        The centre of mass at 1/c of the batch.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_number("center_of_mass", center, of="gradient steps", at_least=0)
    return float(center * _factor(divide_batch_by))


def advantage_span(span: float, *, divide_batch_by: float) -> float:
    """Multiply the span of the advantage moments by c (third adjustment of section 4).

    Args:
        span: 2/(1-beta) - 1 in iterations, at least 1, which is the current iteration alone.
        divide_batch_by: c, the factor of the iteration batch.

    Returns:
        The span at 1/c of the batch; 1 where the rule gives less, for moments need an iteration.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_number("advantage_span", span, of="iterations", at_least=1)
    return float(max(1.0, span * _factor(divide_batch_by)))


def epoch_window(window: float, *, divide_batch_by: float) -> float:
    """Multiply the number of iterations over which the passes over a sample are spread by c (beyond the paper).

    With E epochs at the tuned batch, pass e of a sample comes e/E of an iteration after its first, and the policy has
    moved meanwhile. An iteration at 1/c of the batch is 1/c as long, so pass e has to wait for c e/E iterations. Made
    at once, E passes over few samples are nearly one step of E times the size, which moves the policy further from the
    proximal policy.

    Args:
        window: ``optimizer.epoch_window``, in iterations, at least 1, which makes all passes at once.
        divide_batch_by: c, the factor of the iteration batch.

    Returns:
        The window at 1/c of the batch; 1 where the rule gives less.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_number("epoch_window", window, of="iterations", at_least=1)
    return float(max(1.0, window * _factor(divide_batch_by)))


def kl_factor(factor: float, *, divide_batch_by: float) -> float:
    """Raise the factor by which a KL-adaptive step size changes once an iteration to the power 1/c (beyond the paper).

    Over the same environment steps there are c times as many iterations, and their factors multiply to the same. With
    c below 1 the factor grows to at most 2, or stays if it is larger: the divergence may be from half to twice the
    target, and a larger factor would make the step size jump across that range and back.

    Args:
        factor: ``optimizer.kl_factor``, above 1.
        divide_batch_by: c, the factor of the iteration batch.

    Returns:
        The factor at 1/c of the batch.

    Raises:
        ConfigError: an argument is out of range.
    """
    given: Any = factor
    if not (is_number(given) and 1 < factor < math.inf):
        raise ConfigError(f"kl_factor is {shown(given)}, but must be a finite number above 1")
    most, power = max(factor, _MOST_KL_FACTOR), 1 / _factor(divide_batch_by)
    return float(factor**power if power * math.log(factor) < math.log(most) else most)


def policy_iterations(iterations: int, *, divide_batch_by: float) -> int:
    """Multiply PPG's number of iterations in a phase by c (fourth adjustment of section 4).

    Args:
        iterations: N_pi, at least 1.
        divide_batch_by: c, the factor of the iteration batch.

    Returns:
        The nearest whole number at 1/c of the batch, at least 1.

    Raises:
        ConfigError: an argument is out of range, or the nearest number is 0.
    """
    exact = _whole("policy_iterations", iterations) * _factor(divide_batch_by)
    if exact < 0.5:
        raise ConfigError(
            f"policy_iterations would be {iterations} x {divide_batch_by:.4g} = {exact:.3g}, but a phase has at least "
            f"1 iteration; up to {iterations} times as many samples per iteration keep the phase as it is"
        )
    return max(1, round(exact))


def max_lag(lag: int, *, divide_batch_by: float) -> int:
    """Multiply the age of the data, in iterations, by c, which keeps it in samples.

    Args:
        lag: delay or maximal lag in iterations, at least 0.
        divide_batch_by: c, the factor of the iteration batch.

    Returns:
        The nearest whole number at 1/c of the batch; at least 1 unless ``lag`` is 0.

    Raises:
        ConfigError: an argument is out of range.
    """
    scaled = _whole("lag", lag, at_least=0) * _factor(divide_batch_by)
    return max(1, round(scaled)) if lag else 0


def _factor(divide_batch_by: float) -> float:
    given: Any = divide_batch_by
    if not (is_number(given) and 1 / _MOST <= divide_batch_by <= _MOST):
        raise ConfigError(f"divide_batch_by is {shown(given)}, but must be a number from {1 / _MOST:g} to {_MOST:g}")
    return float(divide_batch_by)


def _step_size(value: float) -> float:
    given: Any = value
    if not (is_number(given) and 0 <= value < math.inf):
        raise ConfigError(f"step_size is {shown(given)}, but must be a finite number of at least 0")
    return value


def _whole(name: str, value: int, at_least: int = 1) -> int:
    given: Any = value
    if not (is_number(given) and at_least <= value < math.inf) or value != int(value):
        raise ConfigError(f"{name} is {shown(given)}, but must be an integer of at least {at_least}")
    return int(value)
