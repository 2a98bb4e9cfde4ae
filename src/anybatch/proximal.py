"""Proximal policies: the policy that an update stays close to, which limits how fast the policy moves (section 2).

All three kinds evaluate a minibatch and are notified of every gradient step.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anybatch.minibatches import Minibatch
from anybatch.models.distributions import Distribution

Number = TypeVar("Number", float, Tensor, float | Tensor)


class ProximalPolicy(Protocol):
    """Interface of a proximal policy."""

    def before_iteration(self) -> None:
        """Prepare for the first gradient step of an iteration."""

    def params(self, minibatch: Minibatch) -> Tensor:
        """Compute its raw distribution parameters (B, P) for a minibatch, without gradient."""

    def log_prob(self, minibatch: Minibatch, proximal: Distribution) -> Tensor:
        """Compute log pi_prox(a|s), (B,), where ``proximal`` has the parameters that :meth:`params` returned."""

    def after_gradient_step(self) -> None:
        """Follow a gradient step of the policy."""

    def reset(self) -> None:
        """Forget the past, at the start of each policy phase of PPG."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class BehaviorProximal:
    """pi_prox = pi_behav, the coupled objectives of PPO: its outputs were recorded when the actions were sampled."""

    def before_iteration(self) -> None:
        pass

    def params(self, minibatch: Minibatch) -> Tensor:
        """Return the recorded parameters (B, P)."""
        return minibatch.behavior_params

    def log_prob(self, minibatch: Minibatch, proximal: Distribution) -> Tensor:
        """Return the recorded value, so that the coupled ratio is the textbook one to the last bit."""
        return minibatch.behavior_logp

    def after_gradient_step(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _FrozenCopy:
    """Base of proximal policies that are a network with weights of their own."""

    module: nn.Module

    def params(self, minibatch: Minibatch) -> Tensor:
        """Compute the copy's raw distribution parameters (B, P)."""
        with torch.no_grad():
            params: Tensor = self.module(minibatch.observation)
        return params

    def log_prob(self, minibatch: Minibatch, proximal: Distribution) -> Tensor:
        """Compute log pi_prox(a|s), (B,)."""
        return proximal.log_prob(minibatch.action)


class RecentProximal(_FrozenCopy):
    """pi_prox = pi_recent, "the policy immediately preceding the current iteration" (section 5.1)."""

    def __init__(self, module: nn.Module) -> None:
        """``module``: the policy network, observation -> (B, P); a frozen copy is kept."""
        self._source = module
        self.module = copy.deepcopy(module).requires_grad_(False)

    def before_iteration(self) -> None:
        """Copy the current policy."""
        self.module.load_state_dict(self._source.state_dict())

    def after_gradient_step(self) -> None:
        """Keep the copy: it stays until the next iteration."""

    def reset(self) -> None:
        """Copy the current policy."""
        self.before_iteration()

    def state_dict(self) -> dict[str, Any]:
        """Empty: every iteration starts with a fresh copy."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the restored policy."""
        self.before_iteration()


class EwmaProximal(_FrozenCopy):
    """pi_prox = the exponentially-weighted moving average of the policy's weights (section 4 and appendix A).

    ``theta_prox = (theta_t + beta theta_{t-1} + ... + beta^t theta_0) / (1 + beta + ... + beta^t)`` over the values of
    theta after each gradient step, theta_0 the initial one. Updated after every gradient step of the *policy*, not
    touched by the boundaries between iterations, and re-initialised after an auxiliary phase.
    """

    def __init__(self, module: nn.Module, center_of_mass: float | Tensor = 8.0) -> None:
        """Start the average at theta_0 = the present weights of ``module``.

        Args:
            module: the policy network, observation -> (B, P); value networks need no average (footnote of 5.3).
            center_of_mass: average age of a term in gradient steps, beta/(1-beta), at least 0; float64 (R,) for R
                stacked runs, whose parameters have a leading run axis.

        Raises:
            ValueError: a centre of mass is negative or not finite.
        """
        centers = torch.as_tensor(center_of_mass)
        if not bool(((centers >= 0) & torch.isfinite(centers)).all()):
            raise ValueError(f"center_of_mass {center_of_mass} must be a finite number of gradient steps, at least 0")
        self.beta = decay_of(center_of_mass)
        """Decay rate of the average."""
        self.module = copy.deepcopy(module).requires_grad_(False)
        """The network that holds the average; fp32, without gradient."""
        self._average: list[Tensor] = list(self.module.parameters())
        self._current: list[Tensor] = list(module.parameters())
        self._buffers = list(zip(self.module.buffers(), module.buffers(), strict=True))
        self._terms = 1  # theta_0

    def before_iteration(self) -> None:
        """Keep the average: it continues from iteration to iteration."""

    @torch.no_grad()
    def after_gradient_step(self) -> None:
        """theta_prox <- EWMA_beta(theta); buffers are copied, which an average of counters or flags would spoil."""
        self._terms += 1
        # appendix A: theta_prox <- theta/w + (1 - 1/w) theta_prox, with w = 1 + beta + ... + beta^(terms-1)
        self._move(1 / sum_of_powers(self.beta, self._terms))

    def _move(self, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor):
            for average, current in zip(self._average, self._current, strict=True):
                average.lerp_(current, weight.to(current).view(-1, *[1] * (current.dim() - 1)))
        else:
            torch._foreach_lerp_(self._average, self._current, weight)
        for average, current in self._buffers:
            average.copy_(current)

    def reset(self) -> None:
        """Re-initialise: theta_prox <- theta, w <- 1."""
        self._terms = 0
        self.after_gradient_step()

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights and the number of terms."""
        return {"module": self.module.state_dict(), "terms": self._terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.module.load_state_dict(state["module"])
        self._terms = state["terms"]


def decay_of(center_of_mass: Number) -> Number:
    """Beta of an EWMA whose centre of mass is beta/(1-beta)."""
    return center_of_mass / (1 + center_of_mass)


def sum_of_powers(beta: Number, terms: int) -> Number:
    """``1 + beta + ... + beta^(terms-1)``, the weight w of appendix A, for 0 <= beta < 1 and terms >= 1."""
    if isinstance(beta, Tensor):
        return torch.where(beta < 1, torch.expm1(terms * beta.log()) / (beta - 1), float(terms))
    if beta == 0:
        return 1.0
    if beta == 1:  # a centre of mass beyond 2^53, where beta/(1-beta) has rounded
        return float(terms)
    return math.expm1(terms * math.log(beta)) / (beta - 1)
