"""The proximal EWMA for TorchRL's losses (extra ``anybatch[torchrl]``).

TorchRL's ``ClipPPOLoss`` and ``KLPENPPOLoss`` have the decoupled objectives of section 2 since 0.14: with
``delay_actor=True`` their target actor is the proximal policy, and ``max_importance_ratio`` is our cap. They lack
the average itself: their ``SoftUpdate`` gives the initial weights far more weight than appendix A does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anybatch.config.validation import check_positive
from anybatch.errors import install_command
from anybatch.proximal import accumulate_, decay_of, full_precision, sum_of_powers

try:
    from torchrl.objectives import LossModule
    from torchrl.objectives.utils import TargetNetUpdater
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"anybatch.integrations.torchrl needs TorchRL: {install_command('torchrl')} ({error})", name=error.name
    ) from error


class EwmaUpdate(TargetNetUpdater):
    """Target parameters = the bias-corrected EWMA of the parameters after each gradient step (appendix A).

    >>> loss = ClipPPOLoss(actor, critic, delay_actor=True, max_importance_ratio=100.0)
    >>> average = EwmaUpdate(loss, center_of_mass=8.0)

    Call ``average.step()`` after every gradient step of the policy. The same numbers as
    :class:`anybatch.proximal.EwmaProximal`; ``SoftUpdate(eps=beta)`` has the same limit, but after the first step with
    beta = 8/9 it gives the initial weights 8/9 where appendix A gives them 8/17.
    """

    def __init__(self, loss_module: LossModule, center_of_mass: float = 8.0) -> None:
        """Start the average at the present weights.

        Args:
            loss_module: a TorchRL loss with target parameters (``delay_actor=True``).
            center_of_mass: beta/(1-beta), in gradient steps, above 0.

        Raises:
            ConfigError: ``center_of_mass`` is out of range.
        """
        check_positive("center_of_mass", center_of_mass)
        self.beta = decay_of(center_of_mass)
        super().__init__(loss_module)

    def init_(self) -> None:
        """Start the average at the present weights, which the target parameters become."""
        super().init_()
        names = list(self._sources.keys(True, True))
        self._theta = [self._sources[name] for name in names]
        self._prox = [self._targets[f"target_{name[0]}", *name[1:]] for name in names]
        self.average: list[Tensor] = []
        """The average of each parameter: the target itself, or an fp32 tensor of which a bf16 or fp16 one is a copy."""
        self._follow_targets()
        self.terms = 1

    @torch.no_grad()
    def step(self) -> None:
        """theta_prox <- EWMA_beta(theta)."""
        if [(x.dtype, x.device) for x in self._prox] != self._placement:
            self._follow_targets()
        self.terms += 1
        theta = [x.data for x in self._theta]
        accumulate_(self.average, theta, 1 / sum_of_powers(self.beta, self.terms), self._narrow)

    def reset(self) -> None:
        """Re-initialise: theta_prox <- theta, w <- 1."""
        self.terms = 0
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """The state beside that of the loss module, which holds the average where the target is fp32."""
        average = {"average": self.average} if self._narrow else {}
        return {**super().state_dict(), "terms": self.terms, **average}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        self.terms = int(state_dict["terms"])
        for x, saved in zip(self.average, state_dict.get("average", self._prox), strict=True):
            x.copy_(saved)  # the state of fp32 targets has no copies: the targets themselves are the averages

    def _follow_targets(self) -> None:
        """Keep the averages, in fp32 at least, where the targets are: the loss module may have been moved or cast."""
        averages, self.average = self.average, full_precision(self._prox)
        for x, previous in zip(self.average, averages, strict=False):  # none at the start
            if x is not previous:
                x.copy_(previous)
        self._narrow = [(x, average) for x, average in zip(self._prox, self.average, strict=True) if x is not average]
        self._placement = [(x.dtype, x.device) for x in self._prox]
