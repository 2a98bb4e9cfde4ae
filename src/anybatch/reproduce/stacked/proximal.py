"""The proximal policies of R runs, of any kind each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.config.schema import PolicyConfig
from anybatch.proximal import decay_of


class StackedProximal:
    """A proximal policy for each of R runs; see :mod:`anybatch.proximal` for the three kinds.

    One matrix holds the averages, and the copies of those that are the policy before the iteration. A run whose
    proximal policy is the behaviour policy keeps an unused row.
    """

    def __init__(self, configs: Sequence[PolicyConfig], policy: Tensor) -> None:
        """Start every average at the present weights.

        Args:
            configs: of the R runs.
            policy: (R, P) the policies' weights, which are read, never changed.
        """
        kinds = [config.proximal for config in configs]
        centers = torch.tensor([[config.center_of_mass] for config in configs], dtype=torch.float64)
        self._policy = policy
        self.weights = policy.clone()
        """(R, P), used where ``recorded`` is False."""
        self.recorded = torch.tensor([[kind == "behavior"] for kind in kinds])
        """(R, 1) bool, the proximal policy is the one that was recorded when the actions were sampled."""
        self.any_recorded = bool(self.recorded.any())
        """Whether any run has that."""
        self.needed = bool((~self.recorded).any())
        """Whether any run has a proximal policy besides the recorded one."""
        self._recent = torch.tensor([i for i, kind in enumerate(kinds) if kind == "recent"], dtype=torch.int64)
        self._average = torch.tensor([[kind == "ewma"] for kind in kinds])
        self._averages = bool(self._average.any())
        self._beta = decay_of(centers)
        self._terms = torch.ones_like(centers)  # w of appendix A: 1 + beta + ... over the terms so far

    def before_iteration(self) -> None:
        """Copy the policies as they are now, where the proximal policy is the one before the iteration."""
        self._copy(self._recent)

    def after_gradient_step(self) -> None:
        """theta_prox <- theta/w_new + (1 - 1/w_new) theta_prox, with w_new = 1 + beta w (appendix A)."""
        if self._averages:
            self._terms = 1 + self._beta * self._terms
            self.weights.lerp_(self._policy, torch.where(self._average, 1 / self._terms, 0.0).float())

    def reset(self, runs: Tensor) -> None:
        """Forget the past of the runs with these numbers: theta_prox <- theta, w <- 1."""
        self._terms[runs] = 1.0
        self._copy(runs)

    def _copy(self, runs: Tensor) -> None:
        if len(runs):
            self.weights[runs] = self._policy[runs]
