"""Action distributions over the raw float32 outputs of a policy head.

All of them accept any leading axes, written (...): (B,), (N, T), or (R, B) for R stacked runs. `log_prob`, `entropy`
and `kl` are differentiable and run inside torch.func.vmap and grad: no branch depends on data. KL divergences are
written as sums of terms that are non-negative, not as a difference of large ones, so that they stay accurate for the
nearly equal policies that a policy update compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

RandomSource: TypeAlias = torch.Generator | Sequence[torch.Generator] | None
"""A generator, one for each index of the first axis (so that R stacked runs draw what R single runs would), or None."""

Numbers = TypeVar("Numbers", Tensor, np.ndarray)

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_BELOW_ONE = 1.0 - 2.0**-20


class Distribution(Protocol):
    """Interface of all action distributions; (...) are the leading axes of `params`."""

    @property
    def params(self) -> Tensor:
        """The raw network output (..., P); storing it is enough to rebuild the distribution."""
        ...

    def sample(self, generator: RandomSource = None) -> Tensor:
        """Draw one action for each leading index, (..., *action shape); carries no gradient."""
        ...

    def transform(self, noise: Tensor) -> Tensor:
        """Turn random numbers (..., K) into actions (..., *action shape), without gradient.

        Uniform from 0 to just below 1, but for :class:`DiagonalGaussian`, which takes standard normal ones:
        :meth:`anybatch.models.actions.ActionSpec.noise` draws them for many steps at once.
        """
        ...

    def mode(self) -> Tensor:
        """The most likely action, (..., *action shape)."""
        ...

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability, or log-density of a continuous action, in nats: (...)."""
        ...

    def entropy(self) -> Tensor:
        """Entropy in nats: (...)."""
        ...

    def kl(self, other: Self) -> Tensor:
        """Exact KL[self, other] in nats, at least 0: (...)."""
        ...


@dataclass(frozen=True, eq=False)
class Categorical:
    """One of n choices; `params` are logits (..., n), actions int64 (...)."""

    params: Tensor
    """(..., P) logits of the P actions."""
    log_probs: Tensor = field(init=False, repr=False)
    """Normalised log-probabilities (..., n); finite for finite logits."""

    def __post_init__(self) -> None:
        # Computed here, so that they carry a gradient if and only if it was enabled when the distribution was made.
        object.__setattr__(self, "log_probs", functional.log_softmax(self.params, dim=-1))

    def sample(self, generator: RandomSource = None) -> Tensor:
        """Draw actions (...) by inverting the cumulative distribution."""
        return self.transform(uniform(self.params, (*self.params.shape[:-1], 1), generator))

    @torch.no_grad()
    def transform(self, noise: Tensor) -> Tensor:
        """The choices (...) at levels (..., 1); see :func:`choose`."""
        return choose(self.log_probs.exp(), noise)

    def mode(self) -> Tensor:
        """The most likely choice (...)."""
        return self.params.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability (...) of choices (...)."""
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy (...) in nats, from 0 to log n."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """KL[self, other] (...)."""
        return _kl_terms(self.log_probs, other.log_probs).sum(-1)


@dataclass(frozen=True, eq=False)
class MultiCategorical:
    """k independent choices of `sizes` options; `params` are their logits side by side, actions int64 (..., k)."""

    params: Tensor
    """(..., P) logits, one block after the other."""
    sizes: tuple[int, ...]
    """Actions of each block; they add up to P."""
    parts: tuple[Categorical, ...] = field(init=False, repr=False)
    """The k distributions."""

    def __post_init__(self) -> None:
        logits = torch.split(self.params, list(self.sizes), dim=-1)
        object.__setattr__(self, "parts", tuple(Categorical(part) for part in logits))

    def sample(self, generator: RandomSource = None) -> Tensor:
        """Draw actions (..., k)."""
        return self.transform(uniform(self.params, (*self.params.shape[:-1], len(self.sizes)), generator))

    def transform(self, noise: Tensor) -> Tensor:
        """The choices (..., k) at levels (..., k), as :meth:`Categorical.transform` has them."""
        levels = noise.unsqueeze(-1).unbind(-2)
        return torch.stack([part.transform(level) for part, level in zip(self.parts, levels, strict=True)], dim=-1)

    def mode(self) -> Tensor:
        """The most likely choices (..., k)."""
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Joint log-probability (...) of choices (..., k)."""
        choices = zip(self.parts, action.unbind(-1), strict=True)
        return torch.stack([part.log_prob(choice) for part, choice in choices]).sum(0)

    def entropy(self) -> Tensor:
        """Joint entropy (...)."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: MultiCategorical) -> Tensor:
        """Joint KL[self, other] (...)."""
        pairs = zip(self.parts, other.parts, strict=True)
        return torch.stack([p.kl(q) for p, q in pairs]).sum(0)


@dataclass(frozen=True, eq=False)
class Bernoulli:
    """k independent bits; `params` are the log-odds of 1 (..., k), actions int64 0 or 1 (..., k)."""

    params: Tensor
    """(..., P) logits of the P bits."""

    def sample(self, generator: RandomSource = None) -> Tensor:
        """Draw actions (..., k)."""
        return self.transform(uniform(self.params, self.params.shape, generator))

    @torch.no_grad()
    def transform(self, noise: Tensor) -> Tensor:
        """The bits (..., k), 1 where uniform numbers (..., k) are below its probability."""
        return (noise < self.params.sigmoid()).long()

    def mode(self) -> Tensor:
        """The more likely value of each bit (..., k)."""
        return (self.params > 0).long()

    def log_prob(self, action: Tensor) -> Tensor:
        """Joint log-probability (...) of bits (..., k)."""
        sign = 2 * action.to(self.params.dtype) - 1
        return functional.logsigmoid(sign * self.params).sum(-1)

    def entropy(self) -> Tensor:
        """Joint entropy (...) in nats."""
        log_probs = self._log_probs()
        return -(log_probs.exp() * log_probs).sum((-2, -1))

    def kl(self, other: Bernoulli) -> Tensor:
        """Joint KL[self, other] (...)."""
        return _kl_terms(self._log_probs(), other._log_probs()).sum((-2, -1))

    def _log_probs(self) -> Tensor:
        """Log-probabilities of 0 and 1, (..., k, 2)."""
        return functional.logsigmoid(torch.stack((-self.params, self.params), dim=-1))


@dataclass(frozen=True, eq=False)
class DiagonalGaussian:
    """Independent normals; `params` are d means, then d log standard deviations (..., 2d), actions (..., *shape).

    Actions are in normalised units, and unbounded: :meth:`ActionSpec.to_env` maps them onto the environment's range.
    """

    params: Tensor
    """(..., 2d) means, then log standard deviations."""
    shape: tuple[int, ...]
    """Shape of one action, with d entries."""

    def sample(self, generator: RandomSource = None) -> Tensor:
        """Draw actions (..., *shape)."""
        return self.transform(normal(self.params, (*self.params.shape[:-1], self.params.shape[-1] // 2), generator))

    @torch.no_grad()
    def transform(self, noise: Tensor) -> Tensor:
        """The actions (..., *shape): means plus standard deviations times normal numbers (..., d)."""
        mean, log_std = self.params.chunk(2, dim=-1)
        return self._unflatten(torch.addcmul(mean, noise, log_std.exp()))

    def mode(self) -> Tensor:
        """The means (..., *shape)."""
        return self._unflatten(self.params.chunk(2, dim=-1)[0])

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density (...) of actions (..., *shape), in normalised units."""
        mean, log_std = self.params.chunk(2, dim=-1)
        leading = action.shape[: action.dim() - len(self.shape)]
        deviation = (action.reshape(*leading, mean.shape[-1]) - mean) * (-log_std).exp()
        return -(0.5 * deviation.square() + log_std + _HALF_LOG_TWO_PI).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy (...) in nats, in normalised units; negative for narrow distributions."""
        return (self.params.chunk(2, dim=-1)[1] + (0.5 + _HALF_LOG_TWO_PI)).sum(-1)

    def kl(self, other: DiagonalGaussian) -> Tensor:
        """KL[self, other] (...)."""
        mean, log_std = self.params.chunk(2, dim=-1)
        other_mean, other_log_std = other.params.chunk(2, dim=-1)
        log_variance_ratio = 2 * (log_std - other_log_std)
        # Both terms are at least 0; expm1(x) - x can round below it.
        spread = (log_variance_ratio.expm1() - log_variance_ratio).clamp(min=0)
        shift = ((mean - other_mean) * (-other_log_std).exp()).square()
        return 0.5 * (spread + shift).sum(-1)

    def _unflatten(self, flat: Tensor) -> Tensor:
        return flat.reshape(*flat.shape[:-1], *self.shape)


def choose(weights: Numbers, levels: Numbers) -> Numbers:
    """Draw choices (...) by inverting the cumulative distribution; for tensors, and for arrays when acting in NumPy.

    weights: (..., n) probabilities of the choices, up to a factor.
    levels: (..., 1) from 0 to just below 1. Scaling them by the computed total keeps a choice of weight 0 from being
        drawn.
    """
    cumulative = weights.cumsum(-1)
    choices: Numbers = (cumulative <= levels * cumulative[..., -1:]).sum(-1)
    return choices


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Terms p (q/p - 1 - log(q/p)) >= 0, whose sum over the choices is KL[p, q] since p and q both sum to 1.

    Accurate for p near q, where sum p log(p/q) would cancel to rounding noise. Where q/p is large, and would overflow,
    the same term is written q - p - p log(q/p).
    """
    p, log_ratio = log_p.exp(), log_q - log_p
    near_ratio = log_ratio.clamp(max=1.0)
    near = p * (near_ratio.expm1() - near_ratio)
    far = log_q.exp() - p - p * log_ratio
    return torch.where(log_ratio < 1.0, near, far).clamp(min=0)  # against rounding in the last digit


def _sources(noise: Tensor, generator: RandomSource) -> list[tuple[Tensor, torch.Generator | None]]:
    """Pair the parts of `noise` with the generators that fill them."""
    if isinstance(generator, Sequence):
        return list(zip(noise.unbind(0), generator, strict=True))
    return [(noise, generator)]


def uniform(like: Tensor, shape: Sequence[int], generator: RandomSource) -> Tensor:
    """Uniform numbers in [0, 1 - 2^-20) of a shape, with `like`'s dtype and device."""
    return _random(like, shape, generator, lambda part, source: part.uniform_(0.0, _BELOW_ONE, generator=source))


def normal(like: Tensor, shape: Sequence[int], generator: RandomSource) -> Tensor:
    """Standard normal numbers of a shape, with `like`'s dtype and device."""
    return _random(like, shape, generator, lambda part, source: part.normal_(generator=source))


def _random(
    like: Tensor,
    shape: Sequence[int],
    generator: RandomSource,
    fill_: Callable[[Tensor, torch.Generator | None], Tensor],
) -> Tensor:
    noise = torch.empty(shape, dtype=like.dtype, device=like.device)
    for part, source in _sources(noise, generator):
        fill_(part, source)
    return noise
