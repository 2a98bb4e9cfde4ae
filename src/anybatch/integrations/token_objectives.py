"""The decoupled objectives of section 2 for sequences of tokens, as losses to minimise.

A completion of T tokens is either T samples or one, and that choice, like the bound on the importance weights and the
number that the sum is divided by, is an argument without a default: each of them changes the gradient, and none is
right for everybody. The names are those of :mod:`anybatch.objectives`: ``theta`` is trained, ``prox`` limits its
speed, ``behav`` sampled the tokens. Everything is in fp32, and only ``theta`` carries a gradient.

| level | weight theta/behav of a completion | gradient of its logarithm |
|---|---|---|
| ``token`` | one for each token | that of the token's log-probability |
| ``sequence_product`` | product over its tokens | sum over its tokens |
| ``sequence_geometric_mean`` | that to the power of 1/length | mean over its tokens |

The product is the importance weight of the whole completion, unbiased, with a variance that grows with its length. A
token's own weight leaves out what came before it and the geometric mean shrinks every weight towards 1: both trade
bias for variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from anybatch.errors import ConfigError
from anybatch.objectives import check_alike, check_coefficient, check_mask, clipped_weight, known_true

Level: TypeAlias = Literal["token", "sequence_product", "sequence_geometric_mean"]
"""One sample is a token, or a completion with the product or the geometric mean of its tokens' weights."""

_LARGEST_EXPONENT = 60.0  # exp of this is finite in fp32


@dataclass(frozen=True)
class Truncate:
    """Weights theta/behav above ``above`` become ``above``, and keep their gradient (appendix B: "below 100")."""

    above: float
    """The cap, above 0; ``inf`` leaves every weight as it is."""

    def __post_init__(self) -> None:
        if not self.above > 0:
            raise ConfigError(f"Truncate(above={self.above}) must be a number above 0, or inf for no bound")


@dataclass(frozen=True)
class Mask:
    """Samples whose weight theta/behav is outside ``[below, above]`` count as 0; the denominator still has them."""

    below: float
    """The least weight that counts, at least 0."""
    above: float
    """The largest weight that counts; ``inf`` for no bound."""

    def __post_init__(self) -> None:
        if not 0 <= self.below < self.above:
            raise ConfigError(
                f"Mask(below={self.below}, above={self.above}) must have 0 <= below < above, or it hides everything"
            )


Bound: TypeAlias = Truncate | Mask
"""The treatment of weights that are too large to be useful."""


def token_clip_loss(
    logp: Tensor,
    logp_proximal: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    weight: Level,
    bound: Bound,
    denominator: float | Tensor,
    ratio: Level | None = None,
    clip: float = 0.2,
) -> Tensor:
    """Minus the decoupled clipped objective L^CLIP_decoupled of section 2 over the tokens of B completions.

    ``sum prox/behav * min(r A, clip(r, 1-eps, 1+eps) A) / denominator`` with ``r = theta/prox``. At level ``token``
    with ``Truncate`` it is :func:`anybatch.objectives.decoupled_clip_loss` of the tokens that count.

    Args:
        logp: (B, T) log pi_theta of each sampled token, with gradient.
        logp_proximal: (B, T) log pi_prox of it.
        logp_behavior: (B, T) log pi_behav of it, as it was when the token was sampled.
        advantage: (B,) one for each completion, or (B, T) where ``ratio`` is ``token``.
        mask: (B, T) bool or 0 and 1, tokens that count; the others may hold anything, NaN included.
        weight: the level of theta/behav, which ``bound`` acts on, and of prox/behav.
        bound: :class:`Truncate` or :class:`Mask`; where ``ratio`` is another level it acts on the larger of theta/behav
            and prox/behav, for then each token is weighted by the latter.
        denominator: samples in the whole gradient step, over all micro-batches and workers: the sum of their
            :func:`count` at the level ``ratio``. Divided by this, gradients of micro-batches add up to that of the
            whole; where workers' gradients are averaged instead of added, divide it by their number.
        ratio: the level of r, the ratio that is clipped; None means ``weight``. ``token`` goes with every weight: each
            token is clipped alone, and then weighted by its completion's prox/behav.
        clip: the clipping parameter epsilon, at least 0; ``inf`` switches clipping off.

    Returns:
        Scalar loss; 0 if no token counts.

    Raises:
        ConfigError: levels that do not go together, an advantage or a denominator that does not fit.
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or a mask holds something else than 0 and 1.
    """
    ratio = weight if ratio is None else ratio
    _check_levels(ratio, weight)
    mask = _checked_mask(mask, logp=logp, logp_proximal=logp_proximal, logp_behavior=logp_behavior)
    advantage = _advantage(advantage, mask, ratio)
    _check_denominator(denominator)
    check_coefficient("clip", clip, logp)
    logp, prox, behav = (_zeroed(x, mask) for x in (logp, logp_proximal, logp_behavior))
    log_ratio = _aggregate(logp - prox, mask, ratio)
    log_total = _aggregate(logp.detach() - behav, mask, weight)  # theta/behav, which the bound is about
    prefix = _aggregate(prox - behav, mask, weight)
    # a token's weight is its own ratio times its completion's prefix, which is large, too, where theta has moved back
    largest = log_total if ratio == weight else torch.maximum(log_total, prefix)
    log_prefix = _bounded(prefix, largest, bound)
    weights = torch.exp((log_ratio + log_prefix).clamp(max=_LARGEST_EXPONENT))
    clipped = clipped_weight(weights, torch.exp(log_ratio.detach()), log_prefix.expand_as(log_ratio), clip)
    counted = _units(mask, ratio) & _kept(log_total, bound) & _kept(largest, bound)
    return -_total(torch.minimum(weights * advantage, clipped * advantage), counted) / denominator


def token_kl_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    mask: Tensor,
    *,
    weight: Level,
    bound: Bound,
    denominator: float | Tensor,
    kl_coefficient: float,
) -> Tensor:
    """Minus the decoupled KL-penalised objective L^KLPEN_decoupled of section 2 over the tokens of B completions.

    ``sum (theta/behav * A - beta KL[prox, theta]) / denominator``. A completion's KL is the sum over its tokens under
    ``sequence_product`` and their mean under ``sequence_geometric_mean``, as is the logarithm of its weight. Tokens
    that :class:`Mask` hides keep their KL term, which does not depend on the weight.

    Args:
        logp: (B, T) log pi_theta of each sampled token, with gradient.
        logp_behavior: (B, T) log pi_behav of it, as it was when the token was sampled.
        advantage: (B,) one for each completion, or (B, T) where ``weight`` is ``token``.
        kl: (B, T) KL[pi_prox, pi_theta] at each token, with gradient: exact over the vocabulary, or
            :func:`anybatch.objectives.half_squared_log_ratio` of the sampled tokens.
        mask: (B, T) bool or 0 and 1, tokens that count; the others may hold anything, NaN included.
        weight: the level of theta/behav.
        bound: :class:`Truncate` or :class:`Mask`.
        denominator: as for :func:`token_clip_loss`, at the level ``weight``.
        kl_coefficient: beta, at least 0; 0 removes the proximal policy.

    Returns:
        Scalar loss; 0 if no token counts.

    Raises:
        ConfigError: an advantage or a denominator that does not fit.
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or a mask holds something else than 0 and 1.
    """
    _check_levels(weight, weight)
    mask = _checked_mask(mask, logp=logp, logp_behavior=logp_behavior, kl=kl)
    advantage = _advantage(advantage, mask, weight)
    _check_denominator(denominator)
    check_coefficient("kl_coefficient", kl_coefficient, logp)
    logp, behav, kl = (_zeroed(x, mask) for x in (logp, logp_behavior, kl if kl_coefficient else torch.zeros_like(kl)))
    log_weight = _aggregate(logp - behav, mask, weight)
    bounded = _bounded(log_weight, log_weight.detach(), bound).clamp(max=_LARGEST_EXPONENT)
    units = _units(mask, weight)
    gain = _total(torch.exp(bounded) * advantage, units & _kept(log_weight.detach(), bound))
    return (kl_coefficient * _total(_aggregate(kl, mask, weight), units) - gain) / denominator


def importance_weights(logp: Tensor, logp_behavior: Tensor, mask: Tensor, *, weight: Level, bound: Bound) -> Tensor:
    """The bounded weights theta/behav that the losses use, without gradient, for a log or another loss.

    Args:
        logp: (B, T) log pi_theta of each sampled token.
        logp_behavior: (B, T) log pi_behav of it.
        mask: (B, T) bool or 0 and 1, tokens that count.
        weight: the level.
        bound: :class:`Truncate` or :class:`Mask`, which makes weights 0.

    Returns:
        (B, T) at level ``token``, else (B, 1); 0 where nothing counts.

    Raises:
        ConfigError: ``weight`` is no level.
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or a mask holds something else than 0 and 1.
    """
    _check_levels(weight, weight)
    mask = _checked_mask(mask, logp=logp, logp_behavior=logp_behavior)
    with torch.no_grad():
        log_weight = _aggregate(_zeroed(logp, mask) - _zeroed(logp_behavior, mask), mask, weight)
        bounded = torch.exp(_bounded(log_weight, log_weight, bound))
        return torch.where(_units(mask, weight) & _kept(log_weight, bound), bounded, 0.0)


def count(mask: Tensor, level: Level) -> Tensor:
    """Samples among B completions: tokens that count, or completions with at least one of them.

    Args:
        mask: (B, T) bool or 0 and 1, tokens that count.
        level: whether a token or a completion is one sample.

    Returns:
        Scalar int64; the sum over micro-batches and workers is the losses' denominator.

    Raises:
        ConfigError: ``level`` is no level.
        TypeError: the mask is no tensor.
        ValueError: the mask is not (B, T), or holds something else than 0 and 1.
    """
    _check_levels(level, level)
    return _units(_checked_mask(mask), level).sum()


def _check_levels(ratio: Level, weight: Level) -> None:
    for name, level in (("weight", weight), ("ratio", ratio)):
        if level not in get_args(Level):
            raise ConfigError(f"{name} is {level!r}, but must be one of {', '.join(get_args(Level))}")
    if ratio not in ("token", weight):
        raise ConfigError(
            f"ratio {ratio} does not go with weight {weight}: clip each token (ratio token), or completions with the "
            "same level for both"
        )


def _checked_mask(mask: Tensor, **tokens: Tensor) -> Tensor:
    """Check the arguments of each token, and make the mask a bool one.

    Raises:
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or are not (B, T); a mask holds something else than 0 and 1.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}, but must be a tensor: torch.as_tensor(mask)")
    if mask.dim() != 2:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, but must be (B, T), the tokens of B completions")
    counts = mask
    if mask.dtype != torch.bool:
        counts = mask != 0
        if known_true(counts & (mask != 1)):  # such as weights of tokens, which would all become 1
            raise ValueError("mask holds something else than 0 and 1, the tokens that count")
    if tokens:
        check_alike(**tokens)
        check_mask("mask", counts, next(iter(tokens.values())))
    return counts


def _check_denominator(denominator: float | Tensor) -> None:
    if not isinstance(denominator, (float, int, Real)) and not (
        isinstance(denominator, Tensor) and denominator.dim() == 0
    ):
        raise ConfigError(f"denominator is {denominator}, but must be a single number, that of the samples")
    refused = known_true(~(denominator > 0)) if isinstance(denominator, Tensor) else not denominator > 0
    if refused:
        raise ConfigError(f"denominator is {float(denominator)}, but must be the number of samples, above 0")


def _advantage(advantage: Tensor, mask: Tensor, level: Level) -> Tensor:
    """(B, 1) or (B, T) in fp32."""
    check_alike(advantage=advantage)
    if advantage.shape == mask.shape[:1]:
        return advantage.float().unsqueeze(1)
    if advantage.shape == mask.shape and level == "token":
        return _zeroed(advantage, mask)
    allowed = "(B,) or (B, T)" if level == "token" else "(B,), one for each completion"
    raise ConfigError(
        f"advantage has shape {tuple(advantage.shape)} for a mask of {tuple(mask.shape)}, but must be {allowed}"
    )


def _zeroed(x: Tensor, mask: Tensor) -> Tensor:
    """Masked tokens replaced by 0 before any arithmetic, so that their values reach no gradient."""
    return torch.where(mask, x.float(), 0.0)


def _aggregate(per_token: Tensor, mask: Tensor, level: Level) -> Tensor:
    """(B, T) as it is, or (B, 1) sums or means over the tokens that count."""
    if level == "token":
        return per_token
    total = per_token.sum(1, keepdim=True)
    return total if level == "sequence_product" else total / mask.sum(1, keepdim=True).clamp(min=1)


def _units(mask: Tensor, level: Level) -> Tensor:
    """(B, T) or (B, 1) bool, the samples that count."""
    return mask if level == "token" else mask.any(1, keepdim=True)


def _bounded(log_weight: Tensor, log_total: Tensor, bound: Bound) -> Tensor:
    """``log_weight`` less what ``log_total`` has above the cap: the behaviour policy is raised by that much."""
    if isinstance(bound, Mask):
        return log_weight
    return log_weight - (log_total - math.log(bound.above)).clamp(min=0)


def _kept(log_total: Tensor, bound: Bound) -> Tensor:
    if isinstance(bound, Truncate):
        return torch.ones_like(log_total, dtype=torch.bool)
    least = math.log(bound.below) if bound.below else -math.inf
    return (log_total >= least) & (log_total <= math.log(bound.above))


def _total(value: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, value, 0.0).sum()
