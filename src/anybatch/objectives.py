"""The policy objectives of section 2 and the joint objective of PPG's auxiliary phase, as losses to minimise.

Everything is a pure function of log-probabilities of the sampled actions, in fp32. ``theta`` is the policy being
trained, ``prox`` the proximal policy that limits its speed, ``behav`` the behaviour policy that sampled the data.
Only the log-probability of ``theta`` carries a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# exp of this is finite in fp32; it bounds the *value* of samples that are clipped and so have no gradient
_LARGEST_EXPONENT = 60.0


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
    clip: float | Tensor = 0.2,
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
        clip: the clipping parameter epsilon, at least 0; ``inf`` switches clipping off.
        max_importance_ratio: cap on pi_theta/pi_behav, see :func:`capped_behavior`.
        mask: (B,) bool, samples that count; None means all of them. Masked samples may hold anything, NaN included.

    Returns:
        Scalar loss: the mean over the samples that count (0 if there are none).
    """
    logp, logp_proximal, logp_behavior, advantage = _masked(mask, logp, logp_proximal, logp_behavior, advantage)
    logp_behavior = capped_behavior(logp, logp_behavior, max_importance_ratio)
    weight = torch.exp(logp - logp_behavior)  # theta/behav, which is prox/behav * r
    ratio = torch.exp(logp.detach() - logp_proximal)
    clipped = clipped_weight(weight, ratio, logp_proximal - logp_behavior, clip)
    return -_mean(torch.minimum(weight * advantage, clipped * advantage), mask)


def clipped_weight(weight: Tensor, ratio: Tensor, log_prefix: Tensor, clip: float | Tensor) -> Tensor:
    """``prox/behav * clip(r, 1-eps, 1+eps)``, the second half of the minimum in L^CLIP_decoupled.

    Args:
        weight: (B,) theta/behav, with gradient.
        ratio: (B,) r = theta/prox, without gradient.
        log_prefix: (B,) log prox/behav.
        clip: epsilon.

    Returns:
        (B,) clipped weights; those of samples outside the range carry no gradient.
    """
    prefix = torch.exp(log_prefix.clamp(max=_LARGEST_EXPONENT))
    # inside the range it *is* the weight, so that an infinite range leaves no trace of prox
    clipped = torch.where(ratio > 1 + clip, prefix * (1 + clip), weight)
    return torch.where(ratio < 1 - clip, prefix * (1 - clip), clipped)


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
    if isinstance(kl_coefficient, (int, float)) and kl_coefficient == 0:
        kl = torch.zeros_like(logp)  # 0 times an infinite KL would be NaN
    logp, logp_behavior, advantage, kl = _masked(mask, logp, logp_behavior, advantage, kl)
    logp_behavior = capped_behavior(logp, logp_behavior, max_importance_ratio)
    weight = torch.exp(logp - logp_behavior)
    return -_mean(weight * advantage - kl_coefficient * kl, mask)


def half_squared_log_ratio(logp: Tensor, logp_proximal: Tensor) -> Tensor:
    """The KL estimator of the authors' published code, ``0.5 * (log theta - log prox)^2`` on sampled actions.

    To second order in theta - prox its expectation under either policy is KL[prox, theta].

    Args:
        logp: (B,) log pi_theta(a|s), with gradient.
        logp_proximal: (B,) log pi_prox(a|s).

    Returns:
        (B,) estimates, never negative.
    """
    return 0.5 * (logp - logp_proximal).square()


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
    value, auxiliary_value, value_target, kl = _masked(None, value, auxiliary_value, value_target, kl)
    errors = (auxiliary_value - value_target).square() + (value - value_target).square()
    return _mean(0.5 * errors + clone_coefficient * kl, None)


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
    cap = max_importance_ratio
    log_cap = torch.log(cap) if isinstance(cap, Tensor) else math.log(cap)
    return torch.maximum(logp_behavior, logp.detach() - log_cap)


def _masked(mask: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
    """Replace masked samples by 0 before any arithmetic, so that what they hold reaches no gradient."""
    values = tuple(value.float() for value in values)
    if mask is None:
        return values
    return tuple(torch.where(mask, value, torch.zeros((), device=value.device)) for value in values)


def _mean(value: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return value.mean()
    return torch.where(mask, value, torch.zeros((), device=value.device)).sum() / mask.sum().clamp(min=1)
