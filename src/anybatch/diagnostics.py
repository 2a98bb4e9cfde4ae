"""Statistics of training: pure functions of what an iteration saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from anybatch.config import PolicyConfig
from anybatch.models.distributions import Distribution


def clip_fraction(logp: Tensor, logp_proximal: Tensor, clip: float) -> Tensor:
    """Share of the ratios pi_theta/pi_prox that lie outside [1 - clip, 1 + clip].

    Args:
        logp: (B,) log pi_theta(a|s).
        logp_proximal: (B,) log pi_prox(a|s).
        clip: the clipping parameter epsilon.
    """
    return ((torch.exp(logp - logp_proximal) - 1).abs() > clip).float().mean()


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """Kish's effective sample size of importance weights as a share of the samples, ``(sum w)^2 / (B sum w^2)``.

    Args:
        log_weight: (B,) log importance weights.

    Returns:
        Scalar in (0, 1]; 1 when all weights are equal.
    """
    weight = (log_weight.double() - log_weight.max()).exp()  # the largest is 1: nothing overflows, not all vanish
    return (weight.sum().square() / (weight.square().sum() * weight.numel())).float()


def policy_statistics(
    policy: Distribution,
    proximal: Distribution,
    behavior: Distribution,
    logp: Tensor,
    logp_proximal: Tensor,
    logp_behavior: Tensor,
    logp_importance: Tensor,
    config: PolicyConfig,
) -> dict[str, Tensor]:
    """What an iteration logs of the policy, as scalars.

    ``clip_fraction`` of theta/prox, exact ``kl_proximal`` = KL[prox, theta] and ``kl_behavior`` = KL[behav, theta],
    ``importance_capped`` = share of importance weights at the cap, ``effective_sample_size`` of the importance
    weights, ``max_log_ratio`` = largest ``|log theta - log behav|`` of a sampled action.
    """
    log_weight = logp - logp_importance
    capped = log_weight.exp() > config.max_importance_ratio
    return {
        "clip_fraction": clip_fraction(logp, logp_proximal, config.clip),
        "kl_proximal": proximal.kl(policy).mean(),
        "kl_behavior": behavior.kl(policy).mean(),
        "importance_capped": capped.float().mean(),
        "effective_sample_size": effective_sample_size(log_weight),
        "max_log_ratio": (logp - logp_behavior).abs().max(),
    }


class Averages:
    """Averages statistics over gradient steps; a column starting with ``max_`` keeps the first step's maximum.

    The first gradient step is the one where ``theta`` still equals the weights that sampled (on fresh data), so what
    ``max_log_ratio`` shows there is rounding alone.
    """

    def __init__(self) -> None:
        """Nothing seen yet."""
        # by the names that come together: adding one vector is cheaper than adding its entries one by one
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._weights: dict[tuple[str, ...], float] = defaultdict(float)
        self._largest: dict[str, Tensor] = {}
        self._gradient_steps = 0

    def add(self, seen: Mapping[str, Tensor], share: float) -> None:
        """Add what a piece of a minibatch showed; ``share`` is the piece's part of the minibatch."""
        names = tuple(name for name in seen if not name.startswith("max_"))
        values = torch.stack([seen[name] for name in names]) * share
        self._sums[names] = self._sums[names].add_(values) if names in self._sums else values
        self._weights[names] += share
        if self._gradient_steps == 0:
            for name in (name for name in seen if name not in names):
                largest = self._largest.get(name, seen[name])
                self._largest[name] = torch.maximum(largest, seen[name])

    def end_gradient_step(self) -> None:
        """The pieces of a gradient step are complete."""
        self._gradient_steps += 1

    def result(self) -> dict[str, float]:
        """The averages by name, and the number of ``gradient_steps``."""
        totals: dict[str, float] = defaultdict(float)
        weights: dict[str, float] = defaultdict(float)
        for names, values in self._sums.items():
            for name, value in zip(names, values.tolist(), strict=True):
                totals[name] += value
                weights[name] += self._weights[names]
        averages = {name: total / weights[name] for name, total in totals.items()}
        largest = {name: float(value) for name, value in self._largest.items()}
        return {**averages, **largest, "gradient_steps": self._gradient_steps}
