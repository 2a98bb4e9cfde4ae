"""The proximal policy: what the policy is kept close to, or rather what limits how fast it moves (section 2).

All three answer the same question, "which raw distribution parameters did the proximal policy give these samples?",
and are told of every gradient step.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anybatch.minibatches import Minibatch

Number = TypeVar("Number", float, Tensor)


class ProximalPolicy(Protocol):
    """What the policy phase needs of a proximal policy."""

    def before_iteration(self) -> None:
        """Called before the first gradient step of an iteration."""

    def params(self, minibatch: Minibatch) -> Tensor:
        """(B, P) raw distribution parameters of the proximal policy for a minibatch, without gradient."""

    def after_gradient_step(self) -> None:
        """Called after every gradient step of the policy."""

    def reset(self) -> None:
        """Forget the past: called at the start of each policy phase of PPG."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""


class BehaviorProximal:
    """pi_prox = pi_behav, the coupled objectives of PPO: the parameters were recorded when the actions were sampled."""

    def before_iteration(self) -> None:
        """Nothing to do."""

    def params(self, minibatch: Minibatch) -> Tensor:
        """(B, P) the recorded parameters."""
        return minibatch.behavior_params

    def after_gradient_step(self) -> None:
        """Nothing to do."""

    def reset(self) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class RecentProximal:
    """pi_prox = pi_recent, "the policy immediately preceding the current iteration" (section 5.1)."""

    def __init__(self, module: nn.Module) -> None:
        """``module``: the policy network, observation -> (B, P); a frozen copy is kept."""
        self._source = module
        self.module = copy.deepcopy(module).requires_grad_(False)

    def before_iteration(self) -> None:
        """Copy the policy as it is now."""
        self.module.load_state_dict(self._source.state_dict())

    def params(self, minibatch: Minibatch) -> Tensor:
        """(B, P) parameters of the policy before this iteration."""
        return _frozen_params(self.module, minibatch)

    def after_gradient_step(self) -> None:
        """Nothing to do: the copy stays until the next iteration."""

    def reset(self) -> None:
        """Copy the policy as it is now."""
        self.before_iteration()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: every iteration starts with a fresh copy."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the restored policy."""
        self.before_iteration()


class EwmaProximal:
    """pi_prox = the exponentially-weighted moving average of the policy's weights (section 4 and appendix A).

    ``theta_prox = (theta_t + beta theta_{t-1} + ... + beta^t theta_0) / (1 + beta + ... + beta^t)`` over the values of
    theta after each gradient step, theta_0 the initial one. Updated after every gradient step of the *policy*, not
    touched by the boundaries between iterations, and re-initialised after an auxiliary phase.
    """

    def __init__(self, module: nn.Module, center_of_mass: float = 8.0) -> None:
        """Start the average at theta_0 = ``module``'s present weights.

        Args:
            module: the policy network, observation -> (B, P); value networks need no average (footnote of 5.3).
            center_of_mass: average age of a term in gradient steps, beta/(1-beta), at least 0.
        """
        if not center_of_mass >= 0 or math.isinf(center_of_mass):
            raise ValueError(f"center_of_mass {center_of_mass} must be a finite number of gradient steps, at least 0")
        self.beta = decay_of(center_of_mass)
        self.module = copy.deepcopy(module).requires_grad_(False)
        """The network that holds the average; fp32, without gradient."""
        self._average: list[Tensor] = list(self.module.parameters())
        self._current: list[Tensor] = list(module.parameters())
        self._buffers = list(zip(self.module.buffers(), module.buffers(), strict=True))
        self._terms = 1  # theta_0

    def before_iteration(self) -> None:
        """Nothing to do: the average runs on from iteration to iteration."""

    def params(self, minibatch: Minibatch) -> Tensor:
        """(B, P) parameters of the averaged policy."""
        return _frozen_params(self.module, minibatch)

    @torch.no_grad()
    def after_gradient_step(self) -> None:
        """theta_prox <- EWMA_beta(theta); buffers are copied, which an average of counters or flags would spoil."""
        self._terms += 1
        # appendix A: theta_prox <- theta/w + (1 - 1/w) theta_prox, with w = 1 + beta + ... + beta^(terms-1)
        torch._foreach_lerp_(self._average, self._current, 1 / sum_of_powers(self.beta, self._terms))
        for average, current in self._buffers:
            average.copy_(current)

    def reset(self) -> None:
        """Re-initialise: theta_prox <- theta, w <- 1."""
        self._terms = 0
        self.after_gradient_step()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the averaged weights and the number of terms."""
        return {"module": self.module.state_dict(), "terms": self._terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.module.load_state_dict(state["module"])
        self._terms = state["terms"]


def _frozen_params(module: nn.Module, minibatch: Minibatch) -> Tensor:
    with torch.no_grad():
        params: Tensor = module(minibatch.observation)
    return params


def decay_of(center_of_mass: Number) -> Number:
    """Beta of an EWMA whose centre of mass is beta/(1-beta); a number, or one for each run."""
    return center_of_mass / (1 + center_of_mass)


def sum_of_powers(beta: float, terms: int) -> float:
    """``1 + beta + ... + beta^(terms-1)``, the weight w of appendix A, for 0 <= beta < 1 and terms >= 1."""
    if beta == 0:
        return 1.0
    if beta == 1:  # a centre of mass beyond 2^53, where beta/(1-beta) has rounded
        return float(terms)
    return math.expm1(terms * math.log(beta)) / (beta - 1)
