"""The scaling rules as command-line options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Adjustments:
    """Which of the rules are applied; the paper's by default."""

    rule: Literal["paper", "fixed-minibatch"] = "paper"
    """Change the step size with the minibatch size (paper), or keep both and change the number of minibatches."""
    adam_step: Literal["sqrt", "linear", "none"] = "sqrt"
    """Divide Adam's step size by sqrt(c), by c, or not at all, where minibatches are c times smaller."""
    adam_betas: Literal["keep", "both", "beta2"] = "keep"
    """Raise Adam's decay rates to the power 1/c."""
    ewma: bool = True
    """Keep the proximal policy's age in environment steps."""
    advantage_norm: bool = True
    """Keep the number of samples behind the advantage moments."""
    policy_iterations: bool = True
    """Keep the samples of a phase of PPG."""
    auxiliary: bool = True
    """Keep the auxiliary phase's minibatch per worker, and change its step size with the workers alone."""

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of :func:`anybatch.scaling.rescale`."""
        betas = {"keep": False, "both": True, "beta2": "beta2"}[self.adam_betas]
        return {x.name: getattr(self, x.name) for x in dataclasses.fields(Adjustments)} | {"adam_betas": betas}


@dataclass(frozen=True)
class TrainScaling(Adjustments):
    """What happens to the other hyperparameters when the batch is changed."""

    off: bool = False
    """Nothing: train with the numbers as they are."""
