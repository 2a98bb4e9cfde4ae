"""The policy objectives of section 2 and the joint objective of PPG's auxiliary phase, as losses to minimise.

Everything is a pure function of log-probabilities of the sampled actions, in fp32. ``theta`` is the policy being
trained, ``prox`` the proximal policy that limits its speed, ``behav`` the behaviour policy that sampled the data.
Only the log-probability of ``theta`` carries a gradient.

(B,) is the shape of B samples, or (R, B) for R stacked runs; further leading axes are allowed. All arguments of a call
have the same shape, a coefficient that is a tensor must broadcast against (R, 1), and anything else is refused by a
TypeError or ValueError that names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

# exp of this is finite in fp32: it bounds weights that no cap limits, and the value of clipped samples
_LARGEST_EXPONENT = 60.0
_LARGEST_WEIGHT = math.exp(_LARGEST_EXPONENT)


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the same sampled actions under several policies, in nats; all have the same shape."""

    theta: Tensor
    """log pi_theta(a|s); the only one with a gradient."""
    proximal: Tensor
    """log pi_prox(a|s)."""
    behavior: Tensor
    """log pi_behav(a|s) as it was when the action was sampled."""
    importance: Tensor
    """The denominator of the importance weight: one of the two above."""


def decoupled_clip_loss(
    logp: Tensor,
    logp_proximal: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *,
    clip: float | Tensor | tuple[float, float] = 0.2,
    max_importance_ratio: float | Tensor = 100.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Minus the decoupled clipped objective L^CLIP_decoupled of section 2.

    ``E[ prox/behav * min(r A, clip(r, 1-eps, 1+eps) A) ]`` with ``r = theta/prox``. With ``prox = behav`` it is PPO's
    L^CLIP to the last bit; with ``clip = inf`` the proximal policy drops out of value and gradient.

    Args:
        logp: (B,) log pi_theta(a|s), with gradient.
        logp_proximal: (B,) log pi_prox(a|s).
        logp_behavior: (B,) log pi_behav(a|s) as it was when the action was sampled.
        advantage: (B,) advantage estimates.
        clip: the clipping parameter epsilon, at least 0; ``inf`` switches clipping off. Two numbers (low, high) clip r
            to [1 - low, 1 + high].
        max_importance_ratio: cap on pi_theta/pi_behav, see :func:`capped_behavior`.
        mask: (B,) bool, samples that count; None means all of them. Masked samples may hold anything, NaN included.

    Returns:
        Scalar loss: the mean over the samples that count (0 if there are none).
    """
    check_alike(logp=logp, logp_proximal=logp_proximal, logp_behavior=logp_behavior, advantage=advantage)
    if mask is not None:
        check_mask("mask", mask, logp)
    logp, logp_proximal, logp_behavior, advantage = _masked(mask, logp, logp_proximal, logp_behavior, advantage)
    logp_behavior = capped_behavior(logp, logp_behavior, max_importance_ratio)
    finite = logp_behavior
    if isinstance(max_importance_ratio, Tensor) or max_importance_ratio > _LARGEST_WEIGHT:
        # a clipped sample's gradient would be 0 times an infinite weight
        finite = capped_behavior(logp, logp_behavior, _LARGEST_WEIGHT)
    weight = torch.exp(logp - finite)  # theta/behav, which is prox/behav * r
    ratio = torch.exp(logp.detach() - logp_proximal)
    clipped = clipped_weight(weight, ratio, logp_proximal - logp_behavior, clip)
    return -_mean(torch.minimum(weight * advantage, clipped * advantage), mask)


def clipped_weight(
    weight: Tensor, ratio: Tensor, log_prefix: Tensor, clip: float | Tensor | tuple[float, float]
) -> Tensor:
    """``prox/behav * clip(r, 1-eps, 1+eps)``, the second half of the minimum in L^CLIP_decoupled.

    Args:
        weight: (B,) theta/behav, with gradient.
        ratio: (B,) r = theta/prox, without gradient.
        log_prefix: (B,) log prox/behav.
        clip: epsilon, or one for each side: ``clip(r, 1-low, 1+high)``.

    Returns:
        (B,) clipped weights; those of samples outside the range carry no gradient.
    """
    check_alike(weight=weight, ratio=ratio, log_prefix=log_prefix)
    if isinstance(clip, (tuple, list)) and not (isinstance(clip, tuple) and len(clip) == 2):
        raise TypeError(f"clip is {clip}, but must be a number, a tensor, or a tuple of two, (low, high)")
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    low, high = check_coefficient("clip", low, ratio), check_coefficient("clip", high, ratio)
    weight, ratio, log_prefix = weight.float(), ratio.float(), log_prefix.float()
    prefix = torch.exp(log_prefix.clamp(max=_LARGEST_EXPONENT))
    # inside the range it *is* the weight, so that an infinite range leaves no trace of prox
    clipped = torch.where(ratio > 1 + high, prefix * (1 + high), weight)
    return torch.where(ratio < 1 - low, prefix * (1 - low), clipped)


def decoupled_kl_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    *,
    kl_coefficient: float | Tensor,
    max_importance_ratio: float | Tensor = 100.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Minus the decoupled KL-penalised objective L^KLPEN_decoupled of section 2.

    ``E[ theta/behav * A - beta * KL[prox, theta] ]``.

    Args:
        logp: (B,) log pi_theta(a|s), with gradient.
        logp_behavior: (B,) log pi_behav(a|s) as it was when the action was sampled.
        advantage: (B,) advantage estimates.
        kl: (B,) KL[pi_prox(.|s), pi_theta(.|s)], with gradient; exact, or :func:`half_squared_log_ratio`.
        kl_coefficient: beta, at least 0; 0 removes the proximal policy.
        max_importance_ratio: cap on pi_theta/pi_behav, see :func:`capped_behavior`.
        mask: (B,) bool, samples that count; None means all of them.

    Returns:
        Scalar loss: the mean over the samples that count (0 if there are none).
    """
    check_alike(logp=logp, logp_behavior=logp_behavior, advantage=advantage, kl=kl)
    if mask is not None:
        check_mask("mask", mask, logp)
    kl_coefficient = check_coefficient("kl_coefficient", kl_coefficient, logp)
    logp, logp_behavior, advantage, kl = _masked(mask, logp, logp_behavior, advantage, kl)
    logp_behavior = capped_behavior(logp, logp_behavior, max_importance_ratio)
    weight = torch.exp(logp - logp_behavior)
    return -_mean(weight * advantage - _penalty(kl_coefficient, kl), mask)


def half_squared_log_ratio(logp: Tensor, logp_proximal: Tensor) -> Tensor:
    """The KL estimator of the authors' published code, ``0.5 * (log theta - log prox)^2`` on sampled actions.

    To second order in theta - prox its expectation under either policy is KL[prox, theta].

    Args:
        logp: (B,) log pi_theta(a|s), with gradient.
        logp_proximal: (B,) log pi_prox(a|s).

    Returns:
        (B,) estimates, never negative.
    """
    check_alike(logp=logp, logp_proximal=logp_proximal)
    return 0.5 * (logp.float() - logp_proximal.float()).square()


def auxiliary_loss(
    value: Tensor, auxiliary_value: Tensor, value_target: Tensor, kl: Tensor, *, clone_coefficient: float | Tensor = 1.0
) -> Tensor:
    """The joint loss of Phasic Policy Gradient's auxiliary phase.

    ``E[ 0.5 (v_aux - target)^2 + 0.5 (v - target)^2 + beta_clone KL[old, theta] ]``: distil the value function into the
    policy's network, train the value function itself, and keep the policy where the policy phase left it.

    Args:
        value: (B,) the value head, with gradient.
        auxiliary_value: (B,) the auxiliary value head on the policy's encoder, with gradient.
        value_target: (B,) the value targets of the policy phase.
        kl: (B,) exact KL[pi_old(.|s), pi_theta(.|s)], with gradient; old is the policy before the auxiliary phase.
        clone_coefficient: beta_clone, at least 0.

    Returns:
        Scalar loss, the mean over the samples.
    """
    check_alike(value=value, auxiliary_value=auxiliary_value, value_target=value_target, kl=kl)
    clone_coefficient = check_coefficient("clone_coefficient", clone_coefficient, value)
    value, auxiliary_value, value_target, kl = _masked(None, value, auxiliary_value, value_target, kl)
    errors = (auxiliary_value - value_target).square() + (value - value_target).square()
    return _mean(0.5 * errors + _penalty(clone_coefficient, kl), None)


def capped_behavior(logp: Tensor, logp_behavior: Tensor, max_importance_ratio: float | Tensor) -> Tensor:
    """Raise log pi_behav so that pi_theta/pi_behav stays at or below the cap (appendix B: "below 100").

    ``max(log behav, log theta - log cap)``, theta detached: a capped sample keeps a gradient, with the cap as weight.

    Args:
        logp: (B,) log pi_theta(a|s).
        logp_behavior: (B,) log pi_behav(a|s).
        max_importance_ratio: the cap, above 0; ``inf`` switches it off.

    Returns:
        (B,) capped log pi_behav(a|s), without gradient.
    """
    check_alike(logp=logp, logp_behavior=logp_behavior)
    cap = check_coefficient("max_importance_ratio", max_importance_ratio, logp, positive=True)
    log_cap = torch.log(cap) if isinstance(cap, Tensor) else math.log(cap)
    return torch.maximum(logp_behavior.float(), logp.detach().float() - log_cap)


def second_moment_mask(logp: Tensor, logp_behavior: Tensor, limit: float) -> Tensor:
    """Samples that M2PO keeps: the largest ``(log pi_theta/pi_behav)^2`` are left out until the mean is within a limit.

    Second-Moment Trust Policy Optimization (Zheng et al. 2025, arXiv:2510.01161): the mean over a minibatch bounds the
    variance of importance weights on stale data, and few samples make up most of it. At least one sample is kept.

    Args:
        logp: (B,) log pi_theta(a|s).
        logp_behavior: (B,) log pi_behav(a|s).
        limit: of the mean over the samples that are kept, above 0.

    Returns:
        (B,) bool, without gradient.
    """
    check_alike(logp=logp, logp_behavior=logp_behavior)
    check_coefficient("limit", limit, logp, positive=True)
    squares = (logp.detach().float() - logp_behavior.float()).square()
    largest_first, order = squares.sort(dim=-1, descending=True)
    count = squares.shape[-1]
    left = torch.arange(count, 0, -1, device=squares.device)
    means = largest_first.flip(-1).cumsum(-1).flip(-1) / left  # of each sample and all smaller ones
    dropped = (means > limit).sum(-1, keepdim=True).clamp(max=count - 1)
    return order.argsort(dim=-1) >= dropped


def interpolated_logp(logp: Tensor, logp_behavior: Tensor, behavior_share: float | Tensor) -> Tensor:
    """``log pi_prox = share log pi_behav + (1 - share) log pi_theta``, without a forward pass of its own.

    A-3PO (arXiv:2512.06547) takes ``share = 1/d`` for data d policy versions old, whose proximal policy is one version
    old. See :func:`behavior_share` for that of an average.

    Args:
        logp: (B,) log pi_theta(a|s).
        logp_behavior: (B,) log pi_behav(a|s).
        behavior_share: from 0, where nothing limits the policy, to 1, the coupled objective.

    Returns:
        (B,) log pi_prox(a|s), without gradient.
    """
    check_alike(logp=logp, logp_behavior=logp_behavior)
    behavior_share = check_coefficient("behavior_share", behavior_share, logp)
    if not isinstance(behavior_share, Tensor) and not behavior_share <= 1:
        raise ValueError(f"behavior_share is {behavior_share}, but must be from 0 to 1")
    return behavior_share * logp_behavior.float() + (1 - behavior_share) * logp.detach().float()


def behavior_share(center_of_mass: float | Tensor, age: float) -> float | Tensor:
    """Share of the behaviour policy with which :func:`interpolated_logp` is as old as an EWMA: centre of mass over age.

    While log-probabilities change at a constant rate, an average of the weights is as far behind as its centre of mass.

    >>> behavior_share(8, age=32), behavior_share(8, age=4)
    (0.25, 1.0)

    Args:
        center_of_mass: in gradient steps; a tensor for stacked runs.
        age: of the data, in gradient steps, at least 0; with 0 the share is 1.

    Raises:
        ValueError: an argument is below 0.
    """
    for name, number in (("center_of_mass", center_of_mass), ("age", age)):
        if not isinstance(number, Tensor) and not number >= 0:
            raise ValueError(f"{name} is {number}, but must be at least 0")
    if isinstance(center_of_mass, Tensor):
        return (center_of_mass / age).clamp(max=1.0) if age else torch.ones_like(center_of_mass)
    return min(1.0, center_of_mass / age) if age else 1.0


def check_alike(axes: int = 1, /, **tensors: Tensor) -> None:
    """Check that arguments are floating-point tensors of one shape, at about 0.3 microseconds each.

    Broadcasting would let (B,) and (B, 1) make (B, B) terms without a word. Shapes and dtypes are all that is looked
    at, so it also works under ``torch.compile`` and in ``torch.func.vmap``, and waits for no GPU.

    Args:
        axes: the least number of axes.
        **tensors: by the name of the argument; all must have the shape of the first.

    Raises:
        TypeError: an argument is no tensor, or not floating-point.
        ValueError: an argument has another shape than the first, or too few axes.
    """
    first, shape = "", None
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} is {_kind(x)}, but must be a floating-point tensor{_remedy(name, x)}")
        if shape is None:
            first, shape = name, x.shape
            if len(shape) < axes:
                needed = "1 axis" if axes == 1 else f"{axes} axes"
                raise ValueError(f"{name} has shape {tuple(shape)}, but must have at least {needed}")
        elif x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must have that of {first}, {tuple(shape)}")


def check_mask(name: str, mask: Tensor, samples: Tensor) -> None:
    """Check that the argument ``name`` is a bool tensor of the shape of ``samples``.

    Raises:
        TypeError: it is no tensor, or not bool.
        ValueError: it has another shape.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        remedy = f": {name}.bool()" if isinstance(mask, Tensor) else _remedy(name, mask)
        raise TypeError(f"{name} is {_kind(mask)}, but must be a bool tensor{remedy}")
    if mask.shape != samples.shape:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, but must be {tuple(samples.shape)}, one for each sample"
        )


def check_coefficient(name: str, value: float | Tensor, samples: Tensor, *, positive: bool = False) -> float | Tensor:
    """Return an argument if it is a number, at least 0, or, in fp32, a tensor with one for each run of ``samples``.

    Args:
        name: of the argument.
        value: the argument. A tensor must broadcast against (R, 1) for samples (R, B): (R,) would pair its numbers with
            samples instead of runs. The numbers in it are not looked at, which would wait for a GPU.
        samples: (..., B) the tensor that it multiplies.
        positive: whether 0 is refused, too.

    Raises:
        TypeError: it is neither a number nor a tensor.
        ValueError: its shape does not fit, or it is a number out of range.
    """
    if isinstance(value, Tensor):
        one_per_run = (*samples.shape[:-1], 1)
        if value.shape != one_per_run and not _broadcasts_to(value.shape, one_per_run):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but must be a number or broadcast to {one_per_run}"
            )
        return value.float()
    if not isinstance(value, (float, int, Real)):  # the first two are much the faster ones to ask for
        raise TypeError(f"{name} is {_kind(value)}, but must be a number or a tensor")
    if not (value > 0 if positive else value >= 0):
        raise ValueError(f"{name} is {value}, but must be {'above' if positive else 'at least'} 0")
    return value


def _broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, allowed) for size, allowed in sizes)


def known_true(condition: Tensor) -> bool:
    """Whether any entry is true; False where that cannot be read at once: on a GPU, in torch.compile and in vmap."""
    if torch.compiler.is_compiling() or condition.device.type != "cpu":
        return False
    try:
        return bool(condition.any())
    except RuntimeError:  # vmap, which has no public test
        return False


def _kind(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__module__}.{type(x).__qualname__}"


def _remedy(name: str, x: object) -> str:
    if isinstance(x, Tensor):
        return f": {name}.float()"
    return f": torch.as_tensor({name})" if hasattr(x, "__array__") or isinstance(x, (list, tuple)) else ""


def _masked(mask: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
    """Replace masked samples by 0 before any arithmetic, so that their values reach no gradient."""
    values = tuple(value.float() for value in values)
    if mask is None:
        return values
    return tuple(torch.where(mask, value, torch.zeros((), device=value.device)) for value in values)


def _penalty(coefficient: float | Tensor, kl: Tensor) -> Tensor:
    """``coefficient * kl``, and 0 where the coefficient is: 0 times an infinite KL would be NaN."""
    if isinstance(coefficient, Tensor):
        return coefficient * torch.where(coefficient == 0, 0.0, kl)
    return coefficient * kl if coefficient else torch.zeros_like(kl)


def _mean(value: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return value.mean() if value.numel() else value.sum()
    return torch.where(mask, value, torch.zeros((), device=value.device)).sum() / mask.sum().clamp(min=1)
