"""Statistics of training: pure functions of what an iteration saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from anybatch.config.schema import PolicyConfig
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
        log_weight: (..., B) log importance weights.

    Returns:
        (...) in (0, 1]; 1 when all weights are equal.
    """
    log_weight = log_weight.double()
    weight = (log_weight - log_weight.amax(-1, keepdim=True)).exp()  # the largest is 1: no overflow, and not all vanish
    return (weight.sum(-1).square() / (weight.square().sum(-1) * weight.shape[-1])).float()


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
    """What an iteration logs of the policy, as scalars; over B samples, or over S gradient steps of B samples each.

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
        "effective_sample_size": effective_sample_size(log_weight).mean(),
        "max_log_ratio": (logp - logp_behavior).abs().max(),
    }


@dataclass(frozen=True)
class PolicySamples:
    """What the policies said of some samples in a gradient step: all that :func:`policy_statistics` needs."""

    params: Tensor
    """(B, P) raw distribution parameters of pi_theta, without gradient like the rest."""
    proximal_params: Tensor
    """(B, P) those of pi_prox."""
    behavior_params: Tensor
    """(B, P) those of pi_behav."""
    logp: Tensor
    """(B,) log pi_theta(a|s)."""
    logp_proximal: Tensor
    """(B,) log pi_prox(a|s)."""
    logp_behavior: Tensor
    """(B,) log pi_behav(a|s)."""
    logp_importance: Tensor
    """(B,) what the importance weight divides by, one of the two above."""


class Averages:
    """Averages statistics over the gradient steps of an iteration.

    Those of the policies are computed once, at the end, from what was kept of each step: step by step they would take
    longer than the gradients of a small batch. ``max_log_ratio`` is that of the first step, where ``theta`` is still
    what sampled, so that it shows rounding alone: on fresh data, and where the value function has no epochs of its own
    on a shared encoder.
    """

    def __init__(self, distribution: Callable[[Tensor], Distribution], config: PolicyConfig) -> None:
        """Nothing seen yet; ``distribution`` makes one of raw parameters (..., P)."""
        self._distribution = distribution
        self._config = config
        # by the names that come together: adding one vector is cheaper than adding its entries one by one
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._weights: dict[tuple[str, ...], float] = defaultdict(float)
        self._samples: list[PolicySamples] = []
        self._gradient_steps = 0

    def add(self, seen: Mapping[str, Tensor], share: float, samples: PolicySamples | None = None) -> None:
        """Add what a piece of a minibatch showed.

        Args:
            seen: scalars by name.
            share: the piece's part of the minibatch.
            samples: of the policies; None in a step of the value function alone. All minibatches are equally large.
        """
        names = tuple(seen)
        values = torch.stack(list(seen.values())) * share
        self._sums[names] = self._sums[names].add_(values) if names in self._sums else values
        self._weights[names] += share
        if samples is not None:
            self._samples.append(samples)

    def end_gradient_step(self) -> None:
        """The pieces of a gradient step of the policy are complete."""
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
        return {**self._of_policies(), **averages, "gradient_steps": self._gradient_steps}

    @torch.no_grad()
    def _of_policies(self) -> dict[str, float]:
        def joined(name: str) -> Tensor:
            whole = torch.cat([getattr(one, name) for one in self._samples])
            return whole.view(self._gradient_steps, -1, *whole.shape[1:])  # (S, B, ...)

        if not self._samples:
            return {}
        kept = {field.name: joined(field.name) for field in fields(PolicySamples)}
        seen = policy_statistics(
            self._distribution(kept["params"]),
            self._distribution(kept["proximal_params"]),
            self._distribution(kept["behavior_params"]),
            kept["logp"],
            kept["logp_proximal"],
            kept["logp_behavior"],
            kept["logp_importance"],
            self._config,
        )
        seen["max_log_ratio"] = (kept["logp"][0] - kept["logp_behavior"][0]).abs().max()
        return dict(zip(seen, torch.stack(list(seen.values())).tolist(), strict=True))
