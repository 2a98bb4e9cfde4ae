"""The decoupled objectives of section 2 for sequences of tokens, as losses to minimise.

A completion of T tokens is either T samples or one, and that choice, like the bound on the importance weights and the
number that the sum is divided by, is an argument without a default: each of them changes the gradient, and none is
right for everybody. The names are those of :mod:`anybatch.objectives`: ``theta`` is trained, ``prox`` limits its
speed, ``behav`` sampled the tokens. Everything is in fp32, and only ``theta`` carries a gradient.

Every token has a term, ``prox/behav * min(r A, clip(r, 1-low, 1+high) A)``. The two ratios in it, ``r = theta/prox``
and the weight prox/behav, are taken at a level each:

| level | ratio of a token | gradient of its logarithm |
|---|---|---|
| ``token`` | its own | that of the token's log-probability |
| ``sequence_product`` | product over the tokens of its completion | sum over its tokens |
| ``sequence_geometric_mean`` | that to the power of 1/length (GSPO) | mean over its tokens |

The product is the importance weight of the whole completion, unbiased, with a variance that grows with its length. A
token's own weight leaves out what came before it and the geometric mean shrinks every weight towards 1: both trade
bias for variance.

Terms are added up and divided by ``denominator``:

| aggregation | ``aggregate`` | ``denominator``, over the whole gradient step |
|---|---|---|
| per token (DAPO) | ``token`` | ``count(mask, "token")`` |
| per sequence (GRPO, GSPO) | ``sequence`` | ``count(mask, "sequence_product")``, which is that of completions |
| constant length (Dr. GRPO) | ``token`` | ``count(mask, "sequence_product") * length`` |

Tensors are (B, T) with one row for each completion, or packed: (T,) with ``sequence_ids``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from anybatch.config.validation import check_choice, is_number
from anybatch.errors import ConfigError, shown
from anybatch.integrations.token_batches import Aggregate, Level, TokenBatch, token_batch
from anybatch.objectives import check_coefficient, clipped_weight, known_true

Subject: TypeAlias = Literal["theta", "proximal"]
"""Numerator of the weight that a bound is about: theta/behav, or prox/behav."""

_LARGEST_EXPONENT = 60.0  # exp of this is finite in fp32


@dataclass(frozen=True)
class Truncate:
    """Weights above ``above`` become ``above``.

    By default theta/behav is truncated (appendix B: "below 100"): a truncated sample keeps its gradient, with the cap
    as its weight. With ``of="proximal"`` prox/behav, the weight in front of the clipped ratio, is truncated, as in verl
    and AReaL.
    """

    above: float
    """The cap, above 0; ``inf`` leaves every weight as it is."""
    of: Subject = "theta"
    """The weight that is truncated."""

    def __post_init__(self) -> None:
        check_choice("of", self.of, Subject)
        if not (is_number(self.above) and self.above > 0):
            raise ConfigError(f"Truncate(above={self.above}) must be a number above 0, or inf for no bound")


@dataclass(frozen=True)
class Mask:
    """Samples whose weight is outside ``[below, above]`` count as 0; the denominator still has them."""

    below: float
    """The least weight that counts, at least 0."""
    above: float
    """The largest weight that counts; ``inf`` for no bound."""
    of: Subject = "theta"
    """The weight that is looked at: theta/behav, or prox/behav."""
    level: Level | None = None
    """Level at which it is looked at; None means that of the loss's weights."""

    def __post_init__(self) -> None:
        check_choice("of", self.of, Subject)
        if self.level is not None:
            check_choice("level", self.level, Level)
        if not (is_number(self.below) and is_number(self.above) and 0 <= self.below < self.above):
            raise ConfigError(
                f"Mask(below={self.below}, above={self.above}) must have 0 <= below < above, otherwise it masks "
                "everything"
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
    bound: Bound | Sequence[Bound],
    denominator: float | Tensor,
    ratio: Level | None = None,
    aggregate: Aggregate | None = None,
    clip: float | tuple[float, float] = 0.2,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Minus the decoupled clipped objective L^CLIP_decoupled of section 2 over the tokens of B completions.

    ``sum prox/behav * min(r A, clip(r, 1-low, 1+high) A) / denominator`` with ``r = theta/prox``. At level ``token``
    with ``Truncate`` it is :func:`anybatch.objectives.decoupled_clip_loss` of the tokens that count.

    Args:
        logp: (B, T) log pi_theta of each sampled token, with gradient; (T,) for packed tokens, here and below.
        logp_proximal: (B, T) log pi_prox of it.
        logp_behavior: (B, T) log pi_behav of it, as it was when the token was sampled.
        advantage: (B,) one for each completion, or (B, T) where ``ratio`` is ``token``. For packed tokens (T,), the
            same for all tokens of a completion where ``ratio`` is not ``token``.
        mask: (B, T) bool or 0 and 1, tokens that count; the others may hold anything, NaN included.
        weight: the level of prox/behav, and of theta/behav, which bounds act on.
        bound: :class:`Truncate` or :class:`Mask`, or several of them. Where ``ratio`` is another level than ``weight``,
            a bound on theta/behav acts on the larger of it and prox/behav, for the latter then weighs each token.
        denominator: samples in the whole gradient step, over all micro-batches and workers, see the table above.
            Divided by this, gradients of micro-batches add up to that of the whole; where workers' gradients are
            averaged instead of added, divide it by their number.
        ratio: the level of r, the ratio that is clipped; None means ``weight``.
        aggregate: the terms of the sum; None means ``token`` where ``ratio`` is ``token``, otherwise ``sequence``.
        clip: the clipping parameter epsilon, at least 0; ``inf`` switches clipping off. Two numbers (low, high), as in
            DAPO, clip r to [1 - low, 1 + high].
        sequence_ids: (T,) int64 or int32, for packed tokens: the number of each token's completion, from 0.

    Returns:
        Scalar loss; 0 if no token counts.

    Raises:
        ConfigError: an option that is none, or an advantage or a denominator that does not fit.
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or a mask holds something else than 0 and 1.
    """
    ratio = weight if ratio is None else ratio
    aggregate = _aggregate(aggregate, ratio, weight=weight, ratio=ratio)
    tokens = token_batch(mask, sequence_ids, logp=logp, logp_proximal=logp_proximal, logp_behavior=logp_behavior)
    advantage = tokens.advantage(advantage, ratio)
    _check_denominator(denominator)
    logp, prox, behav = (tokens.zeroed(x) for x in (logp, logp_proximal, logp_behavior))
    behav = _possible(behav, logp)
    log_ratio = tokens.at_level(logp - prox, ratio)
    log_prefix, kept = _bounded_prefix(tokens, logp.detach() - behav, prox - behav, weight, ratio == weight, bound)
    log_ratio, log_prefix = log_ratio.expand_as(tokens.mask), log_prefix.expand_as(tokens.mask)
    weights = torch.exp((log_ratio + log_prefix).clamp(max=_LARGEST_EXPONENT))
    clipped = clipped_weight(weights, torch.exp(log_ratio.detach()), log_prefix, clip)
    return -tokens.total(torch.minimum(weights * advantage, clipped * advantage), kept, aggregate) / denominator


def token_kl_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    mask: Tensor,
    *,
    weight: Level,
    bound: Bound | Sequence[Bound],
    denominator: float | Tensor,
    kl_coefficient: float,
    aggregate: Aggregate | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Minus the decoupled KL-penalised objective L^KLPEN_decoupled of section 2 over the tokens of B completions.

    ``sum (theta/behav * A - beta KL[prox, theta]) / denominator``. A completion's KL is the sum over its tokens under
    ``sequence_product`` and their mean under ``sequence_geometric_mean``, as is the logarithm of its weight. Tokens
    that :class:`Mask` hides keep their KL term, which does not depend on the weight.

    Args:
        logp: (B, T) log pi_theta of each sampled token, with gradient; (T,) for packed tokens, here and below.
        logp_behavior: (B, T) log pi_behav of it, as it was when the token was sampled.
        advantage: (B,) one for each completion, or (B, T) where ``weight`` is ``token``; (T,) for packed tokens.
        kl: (B, T) KL[pi_prox, pi_theta] at each token, with gradient: exact over the vocabulary, or
            :func:`anybatch.objectives.half_squared_log_ratio` of the sampled tokens.
        mask: (B, T) bool or 0 and 1, tokens that count; the others may hold anything, NaN included.
        weight: the level of theta/behav.
        bound: :class:`Truncate` or :class:`Mask` of theta/behav, or several of them.
        denominator: as for :func:`token_clip_loss`.
        kl_coefficient: beta, at least 0; 0 removes the proximal policy.
        aggregate: as for :func:`token_clip_loss`, None by the level ``weight``.
        sequence_ids: (T,) int64 or int32, for packed tokens: the number of each token's completion, from 0.

    Returns:
        Scalar loss; 0 if no token counts.

    Raises:
        ConfigError: an option that is none or needs prox/behav, or an advantage or a denominator that does not fit.
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or a mask holds something else than 0 and 1.
    """
    aggregate = _aggregate(aggregate, weight, weight=weight)
    tokens = token_batch(mask, sequence_ids, logp=logp, logp_behavior=logp_behavior, kl=kl)
    advantage = tokens.advantage(advantage, weight)
    _check_denominator(denominator)
    check_coefficient("kl_coefficient", kl_coefficient, logp)
    kl = torch.zeros_like(kl) if kl_coefficient == 0 else kl  # 0 times an infinite KL would be NaN
    logp, behav, kl = (tokens.zeroed(x) for x in (logp, logp_behavior, kl))
    behav = _possible(behav, logp)
    log_weight, kept = _bounded_weight(tokens, logp - behav, weight, bound)
    gain = tokens.total(torch.exp(log_weight.clamp(max=_LARGEST_EXPONENT)) * advantage, kept, aggregate)
    penalty = tokens.total(tokens.at_level(kl, weight), tokens.mask, aggregate)
    return (kl_coefficient * penalty - gain) / denominator


def importance_weights(
    logp: Tensor,
    logp_behavior: Tensor,
    mask: Tensor,
    *,
    weight: Level,
    bound: Bound | Sequence[Bound],
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """The bounded weights theta/behav that the losses use, without gradient, for a log or another loss.

    Args:
        logp: (B, T) log pi_theta of each sampled token; (T,) for packed tokens, here and below.
        logp_behavior: (B, T) log pi_behav of it.
        mask: (B, T) bool or 0 and 1, tokens that count.
        weight: the level.
        bound: :class:`Truncate` or :class:`Mask`, which makes weights 0, of theta/behav, or several of them.
        sequence_ids: (T,) int64 or int32, for packed tokens: the number of each token's completion, from 0.

    Returns:
        (B, T) at level ``token`` and where a :class:`Mask` looks at tokens, else (B, 1); (T,) for packed tokens; 0
        where nothing counts.

    Raises:
        ConfigError: ``weight`` is no level, or a bound is about prox/behav.
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or a mask holds something else than 0 and 1.
    """
    check_choice("weight", weight, Level)
    tokens = token_batch(mask, sequence_ids, logp=logp, logp_behavior=logp_behavior)
    with torch.no_grad():
        logp = tokens.zeroed(logp)
        log_ratio = logp - _possible(tokens.zeroed(logp_behavior), logp)
        log_weight, kept = _bounded_weight(tokens, log_ratio, weight, bound)
        return torch.where(tokens.units(weight) & kept, torch.exp(log_weight), 0.0)


def check_options(weight: Level, bound: Bound | Sequence[Bound]) -> None:
    """Raise a ConfigError unless ``weight`` is a level and ``bound`` a :class:`Bound` or a sequence of them.

    The losses check both; this is for objects that are made long before their first loss.
    """
    check_choice("weight", weight, Level)
    _bounds(bound)


def of_weight(bound: Bound | Sequence[Bound]) -> list[Bound]:
    """Bounds of prox/behav as :func:`importance_weights` takes them where prox/behav alone is the weight."""
    return [replace(each, of="theta") for each in _bounds(bound)]


def count(mask: Tensor, level: Level, sequence_ids: Tensor | None = None) -> Tensor:
    """Samples among B completions: tokens that count, or completions with at least one of them.

    The losses need a denominator above 0: ``count(...).clamp(min=1)`` where no token of a gradient step may count.

    Args:
        mask: (B, T) bool or 0 and 1, tokens that count; (T,) for packed tokens.
        level: whether a token or a completion is one sample.
        sequence_ids: (T,) int64 or int32, for packed tokens: the number of each token's completion, from 0.

    Returns:
        Scalar int64; the sum over micro-batches and workers is the losses' denominator.

    Raises:
        ConfigError: ``level`` is no level.
        TypeError: the mask is no tensor.
        ValueError: the mask is not (B, T), or holds something else than 0 and 1.
    """
    check_choice("level", level, Level)
    return token_batch(mask, sequence_ids).count(level)


def _aggregate(aggregate: Aggregate | None, level: Level, **levels: Level) -> Aggregate:
    """Check the options, and choose the aggregation that goes with a level by default."""
    for name, value in levels.items():
        check_choice(name, value, Level)
    if aggregate is None:
        return "token" if level == "token" else "sequence"
    check_choice("aggregate", aggregate, Aggregate)
    return aggregate


def _check_denominator(denominator: float | Tensor) -> None:
    if not isinstance(denominator, (float, int, Real)) and not (
        isinstance(denominator, Tensor) and denominator.dim() == 0
    ):
        raise ConfigError(f"denominator is {denominator}, but must be a single number, that of the samples")
    refused = known_true(~(denominator > 0)) if isinstance(denominator, Tensor) else not denominator > 0
    if refused:
        raise ConfigError(f"denominator is {float(denominator)}, but must be the number of samples, above 0")


def _bounded_prefix(
    tokens: TokenBatch, total: Tensor, prefix: Tensor, weight: Level, whole: bool, bound: Bound | Sequence[Bound]
) -> tuple[Tensor, Tensor]:
    """Logarithm of prox/behav at the level of the weights, within all bounds, and the samples that count.

    Args:
        tokens: the batch.
        total: log theta/behav of each token, without gradient.
        prefix: log prox/behav of each token.
        weight: the level.
        whole: whether r is at the same level, so that theta/behav is the weight of a sample, and no more than that.
        bound: the bounds.
    """
    exact = {"theta": tokens.at_level(total, weight), "proximal": tokens.at_level(prefix, weight)}
    # a token's weight is its own ratio times its completion's prefix, which is large, too, where theta has moved back
    largest = exact["theta"] if whole else torch.maximum(exact["theta"], exact["proximal"])
    result, kept = exact["proximal"], torch.ones_like(largest, dtype=torch.bool)
    for each in _bounds(bound):
        if isinstance(each, Truncate):
            result = _truncated(result, largest if each.of == "theta" else exact["proximal"], each)
        else:
            level = weight if each.level is None else each.level
            kept = kept & _kept(tokens.at_level(total if each.of == "theta" else prefix, level), each)
            if each.of == "theta" and level == weight:
                kept = kept & _kept(largest, each)
    return result, kept


def _bounded_weight(
    tokens: TokenBatch, log_ratio: Tensor, weight: Level, bound: Bound | Sequence[Bound]
) -> tuple[Tensor, Tensor]:
    """Logarithm of theta/behav at the level of the weights, within all bounds, and the samples that count."""
    log_weight = tokens.at_level(log_ratio, weight)
    result, exact, kept = log_weight, log_weight.detach(), torch.ones_like(log_weight, dtype=torch.bool)
    for each in _bounds(bound):
        if each.of != "theta":
            raise ConfigError(
                f"{each} is about prox/behav, but only theta/behav is used as a weight here: set of='theta'"
            )
        if isinstance(each, Truncate):
            result = _truncated(result, exact, each)
        else:
            level = weight if each.level is None else each.level
            kept = kept & _kept(tokens.at_level(log_ratio.detach(), level), each)
    return result, kept


def _bounds(bound: Bound | Sequence[Bound]) -> Sequence[Bound]:
    given: Any = bound
    bounds = list(given) if isinstance(given, list | tuple) else [given]
    if not all(isinstance(each, Truncate | Mask) for each in bounds):
        raise ConfigError(f"bound is {shown(given)}, but must be Truncate(...), Mask(...), or a sequence of them")
    if sum(isinstance(each, Truncate) for each in bounds) > 1:
        raise ConfigError("bound has Truncate twice, but can have it only once, with any number of Mask")
    return bounds


def _truncated(log_weight: Tensor, exact: Tensor, bound: Truncate) -> Tensor:
    """``log_weight`` less what ``exact`` has above the cap: the behaviour policy is raised by that much."""
    return log_weight - (exact - math.log(bound.above)).clamp(min=0)


def _possible(logp_behavior: Tensor, logp: Tensor) -> Tensor:
    """The behaviour policy's -inf replaced by so little that theta/behav is e^60: differences would be NaN."""
    return torch.where(logp_behavior == -math.inf, logp.detach() - _LARGEST_EXPONENT, logp_behavior)


def _kept(log_weight: Tensor, bound: Mask) -> Tensor:
    least = math.log(bound.below) if bound.below else -math.inf
    return (log_weight >= least) & (log_weight <= math.log(bound.above))
