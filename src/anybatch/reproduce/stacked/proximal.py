"""The proximal policies of R runs that have different kinds of them.

Runs with few environments are bound by overhead: one stack of three kinds takes as long as a stack of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anybatch.minibatches import Minibatch
from anybatch.models.distributions import Distribution
from anybatch.proximal import EwmaProximal


class MixedProximal(EwmaProximal):
    """A proximal policy for each of R runs: behavior, recent or ewma; see :mod:`anybatch.proximal`.

    The copy that a recent policy needs is an average that moves before each iteration alone, and then all the way.
    """

    def __init__(self, module: nn.Module, kinds: Sequence[str], center_of_mass: float | Tensor) -> None:
        """Start every average at the present weights.

        Args:
            module: the policies of all runs.
            kinds: behavior, recent or ewma, for each run.
            center_of_mass: (R,) those of the averages; unused elsewhere.
        """
        super().__init__(module, center_of_mass)
        self._behavior = torch.tensor([kind == "behavior" for kind in kinds])
        self._recent = torch.tensor([kind == "recent" for kind in kinds])

    @torch.no_grad()
    def before_iteration(self) -> None:
        """Copy the recent policies."""
        super()._move(self._recent.double())

    def params(self, minibatch: Minibatch) -> Tensor:
        """Raw distribution parameters (R, B, P), recorded or computed."""
        return torch.where(self._behavior[:, None, None], minibatch.behavior_params, super().params(minibatch))

    def log_prob(self, minibatch: Minibatch, proximal: Distribution) -> Tensor:
        """Log pi_prox(a|s), (R, B), recorded or computed."""
        return torch.where(self._behavior[:, None], minibatch.behavior_logp, super().log_prob(minibatch, proximal))

    def _move(self, weight: float | Tensor) -> None:
        super()._move(torch.where(self._recent, 0.0, weight))
