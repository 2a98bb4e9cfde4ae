"""Statistics of the policy update: pure functions of log-probabilities and distributions, and their averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from anybatch.config.schema import PolicyConfig
from anybatch.models.distributions import Distribution
from anybatch.objectives import LogProbs, check_alike, check_coefficient, half_squared_log_ratio


def clip_fraction(logp: Tensor, logp_proximal: Tensor, clip: float | Tensor) -> Tensor:
    """Fraction of the ratios pi_theta/pi_prox that are outside [1 - clip, 1 + clip].

    Args:
        logp: (B,) log pi_theta(a|s).
        logp_proximal: (B,) log pi_prox(a|s).
        clip: the clipping parameter epsilon; a tensor must broadcast against (R, 1) for (R, B) samples.

    Raises:
        TypeError: an argument is no floating-point tensor.
        ValueError: the shapes do not fit.
    """
    check_alike(logp=logp, logp_proximal=logp_proximal)
    check_coefficient("clip", clip, logp)
    return ((torch.exp(logp.float() - logp_proximal.float()) - 1).abs() > clip).float().mean()


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """Kish's effective sample size of importance weights as a fraction of the samples, ``(sum w)^2 / (B sum w^2)``.

    Args:
        log_weight: (..., B) log importance weights.

    Returns:
        (...) in (0, 1]; 1 when all weights are equal.

    Raises:
        TypeError: ``log_weight`` is no floating-point tensor.
        ValueError: it has no axis.
    """
    check_alike(log_weight=log_weight)
    log_weight = log_weight.double()
    weight = (log_weight - log_weight.amax(-1, keepdim=True)).exp()  # the largest is 1: no overflow, and not all vanish
    return (weight.sum(-1).square() / (weight.square().sum(-1) * weight.shape[-1])).float()


def policy_statistics(
    policy: Distribution,
    proximal: Distribution,
    behavior: Distribution,
    logp: LogProbs,
    *,
    clip: float | Tensor,
    max_importance_ratio: float | Tensor,
) -> dict[str, Tensor]:
    """Compute the columns of the log that describe the policy update, as scalars.

    ``clip_fraction`` of theta/prox, exact ``kl_proximal`` = KL[prox, theta] and ``kl_behavior`` = KL[behav, theta],
    ``importance_capped`` = fraction of importance weights at the cap, ``effective_sample_size`` of the importance
    weights, ``max_log_ratio`` = largest ``|log theta - log behav|`` of a sampled action.

    Args:
        policy: pi_theta for (B,) samples, or for (S, B) samples of S gradient steps; the rest alike.
        proximal: pi_prox.
        behavior: pi_behav.
        logp: log-probabilities of the sampled actions.
        clip: the clipping parameter epsilon.
        max_importance_ratio: cap on the importance weights.

    Raises:
        TypeError: an argument holds no floating-point tensors.
        ValueError: the shapes do not fit.
    """
    check_alike(**{f"logp.{field.name}": getattr(logp, field.name) for field in fields(LogProbs)})
    check_alike(policy=policy.params, proximal=proximal.params, behavior=behavior.params)
    check_alike(**{"policy.params[..., 0]": policy.params[..., 0], "logp.theta": logp.theta})
    check_coefficient("max_importance_ratio", max_importance_ratio, logp.theta, positive=True)
    log_weight = logp.theta.float() - logp.importance.float()
    capped = log_weight.exp() > max_importance_ratio
    return {
        "clip_fraction": clip_fraction(logp.theta, logp.proximal, clip),
        "kl_proximal": proximal.kl(policy).mean(),
        "kl_behavior": behavior.kl(policy).mean(),
        "importance_capped": capped.float().mean(),
        "effective_sample_size": effective_sample_size(log_weight).mean(),
        "max_log_ratio": (logp.theta.float() - logp.behavior.float()).abs().max(),
    }


@dataclass(frozen=True)
class PolicySamples:
    """Outputs of the policies for the samples of a gradient step, without gradient: (B,), or (R, B) for R runs."""

    params: Tensor
    """(B, P) raw distribution parameters of pi_theta."""
    proximal_params: Tensor
    """(B, P) those of pi_prox."""
    behavior_params: Tensor
    """(B, P) those of pi_behav."""
    logp: LogProbs
    """(B,) log-probabilities of the sampled actions."""

    def tensors(self) -> list[Tensor]:
        """All tensors, the log-probabilities last, as :meth:`Averages.add` takes them."""
        logp = self.logp
        recorded = [self.proximal_params, self.behavior_params, logp.theta.detach(), logp.proximal, logp.behavior]
        return [self.params.detach(), *recorded, logp.importance]


class Averages:
    """Averages statistics over the gradient steps of an iteration.

    They are computed once, at the end, from values kept at each step: step by step those of the policies would take
    longer than the gradients of a small batch. ``max_log_ratio`` is that of the first step, where ``theta`` is still
    the policy that sampled, so that it shows rounding alone: on fresh data, and where the value function has no epochs
    of its own on a shared encoder.
    """

    def __init__(self, distribution: Callable[[Tensor], Distribution], config: PolicyConfig) -> None:
        """Start without statistics.

        Args:
            distribution: makes one of raw parameters (..., P).
            config: supplies the clipping parameter and the cap on importance weights.
        """
        self._distribution = distribution
        self._config = config
        # by the names that come together, one after the other, with their weights
        self._losses: dict[tuple[str, ...], list[Tensor]] = {}
        self._weights: dict[tuple[str, ...], list[float]] = {}
        self._samples: list[Sequence[Tensor]] = []
        self._gradient_steps = 0

    def add(self, losses: Mapping[str, Tensor], weight: float, samples: Sequence[Tensor] = ()) -> None:
        """Add part of a minibatch.

        Args:
            losses: scalars by name, (R,) for R runs; a name always comes with the same others.
            weight: the part's fraction of the minibatch.
            samples: :meth:`PolicySamples.tensors` of the part; empty in a step of the value function alone, or to leave
                the policies' statistics out. All minibatches are equally large.
        """
        names = tuple(losses)
        self._losses.setdefault(names, []).extend(losses.values())
        self._weights.setdefault(names, []).append(weight)
        if samples:
            self._samples.append(samples)

    def end_gradient_step(self) -> None:
        """Count a gradient step of the policy, whose parts are complete."""
        self._gradient_steps += 1

    @property
    def parts(self) -> int:
        """Number of parts of minibatches that came with samples."""
        return len(self._samples)

    @torch.no_grad()
    def kl_since(self, part: int) -> float:
        """Mean KL[prox, theta] over the samples (B,) of all parts from number ``part`` on."""
        policy, proximal = (torch.cat([one[i] for one in self._samples[part:]]) for i in (0, 1))
        return float(self._distribution(proximal).kl(self._distribution(policy)).mean())

    def result(self) -> dict[str, Any]:
        """The averages by name, and the number of ``gradient_steps``; floats, or lists of R floats for R runs."""
        averages = self._of_policies()
        for names, losses in self._losses.items():
            values = torch.stack(losses).double().unflatten(0, (-1, len(names)))  # (S, names), or (S, names, R)
            weights = torch.tensor(self._weights[names], dtype=torch.float64, device=values.device)
            means = torch.tensordot(weights / weights.sum(), values, 1)
            averages |= zip(names, means.tolist(), strict=True)
        return {**averages, "gradient_steps": self._gradient_steps}

    @torch.no_grad()
    def _of_policies(self) -> dict[str, Any]:
        if not self._samples:
            return {}
        logp = self._samples[0][-1]
        axis = logp.dim() - 1  # of the samples, behind that of the runs
        steps = (self._gradient_steps, -1)
        whole = [torch.cat(parts, axis).unflatten(axis, steps) for parts in zip(*self._samples, strict=True)]
        numbers = [self._config.clip, self._config.max_importance_ratio]
        if axis == 0:
            columns = self._statistics(*whole, *numbers)
        else:
            per_run = [torch.as_tensor(number).expand(len(logp), 1).squeeze(1) for number in numbers]
            columns = torch.func.vmap(self._statistics)(*whole, *per_run)
        return dict(zip(columns, torch.stack(list(columns.values())).tolist(), strict=True))

    def _statistics(self, *arguments: Any) -> dict[str, Tensor]:
        """Statistics of one run, from tensors (S, B, ...) of S gradient steps."""
        params, proximal_params, behavior_params, *logps, clip, cap = arguments
        policy, proximal, behavior = map(self._distribution, (params, proximal_params, behavior_params))
        logp = LogProbs(*logps)
        statistics = policy_statistics(policy, proximal, behavior, logp, clip=clip, max_importance_ratio=cap)
        if self._config.interpolated:  # its parameters are not known
            statistics["kl_proximal"] = half_squared_log_ratio(logp.theta, logp.proximal).mean()
        return {**statistics, "max_log_ratio": (logp.theta[0] - logp.behavior[0]).abs().max()}
