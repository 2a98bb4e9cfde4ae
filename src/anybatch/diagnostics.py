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
    log_weight = log_weight.double()
    exponent = 2 * torch.logsumexp(log_weight, 0) - torch.logsumexp(2 * log_weight, 0)
    return (torch.exp(exponent) / log_weight.numel()).float()


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
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = defaultdict(float)
        self._gradient_steps = 0

    def add(self, seen: Mapping[str, Tensor], share: float) -> None:
        """Add what a piece of a minibatch showed; ``share`` is the piece's part of the minibatch."""
        for name, value in seen.items():
            if name.startswith("max_"):
                if self._gradient_steps == 0:
                    self._sums[name] = torch.maximum(self._sums[name], value) if name in self._sums else value
                    self._weights[name] = 1.0
            else:
                self._sums[name] = self._sums[name] + value * share if name in self._sums else value * share
                self._weights[name] += share

    def end_gradient_step(self) -> None:
        """The pieces of a gradient step are complete."""
        self._gradient_steps += 1

    def result(self) -> dict[str, float]:
        """The averages by name, and the number of ``gradient_steps``."""
        averages = {name: float(total) / self._weights[name] for name, total in self._sums.items()}
        return {**averages, "gradient_steps": self._gradient_steps}
