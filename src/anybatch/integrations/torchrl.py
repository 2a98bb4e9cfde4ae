"""The proximal EWMA for TorchRL's losses (extra ``anybatch[torchrl]``).

TorchRL's ``ClipPPOLoss`` and ``KLPENPPOLoss`` have the decoupled objectives of section 2 since 0.14: with
``delay_actor=True`` their target actor is the proximal policy, and ``max_importance_ratio`` is our cap. What they lack
is the average itself: their ``SoftUpdate`` gives the initial weights far more weight than appendix A does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from anybatch.errors import ConfigError
from anybatch.proximal import decay_of, sum_of_powers

try:
    from torchrl.objectives import LossModule
    from torchrl.objectives.utils import TargetNetUpdater
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"anybatch.integrations.torchrl needs TorchRL: pip install 'anybatch[torchrl]' ({error})", name=error.name
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
            center_of_mass: beta/(1-beta), in gradient steps, at least 0.

        Raises:
            ConfigError: ``center_of_mass`` is out of range.
        """
        if not 0 <= center_of_mass < math.inf:
            raise ConfigError(f"center_of_mass is {center_of_mass}, but must be a finite number, at least 0")
        super().__init__(loss_module)
        self.beta = decay_of(center_of_mass)
        self.terms = 1

    def step(self) -> None:
        """theta_prox <- EWMA_beta(theta)."""
        self.terms += 1
        super().step()

    def reset(self) -> None:
        """Re-initialise: theta_prox <- theta, w <- 1."""
        self.terms = 0
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """The state beside that of the loss module, which holds the average."""
        return {**super().state_dict(), "terms": self.terms}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        self.terms = int(state_dict["terms"])

    def _step(self, p_source: Any, p_target: Any) -> None:
        p_target.data.lerp_(p_source.data, 1 / sum_of_powers(self.beta, self.terms))
