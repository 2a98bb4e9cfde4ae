"""The scaling rules as options of functions and of the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_type_hints

from anybatch.config.validation import check_choice, check_positive

AdamStep: TypeAlias = Literal["sqrt", "linear", "none"]
"""Divisor of Adam's step size: sqrt(c), c, or none."""
AdamBetas: TypeAlias = bool | Literal["keep", "both", "beta2"]
"""Decay rates of Adam that are raised to the power 1/c: none (keep, or False), both (or True), or the second."""

WithNoise: TypeAlias = Literal["sqrt", "none"]
"""Factor of a limit that is compared with gradients: sqrt(c), as their noise grows, or none."""

Epochs: TypeAlias = Literal["at-once", "spread"]
"""Several passes over a sample: all in its iteration, or as far apart in environment steps as at the tuned batch."""

RuleName: TypeAlias = Literal["paper", "fixed-minibatch"]
"""Change the step size with the minibatch size (paper), or keep both and change the number of minibatches."""


@dataclass(frozen=True)
class Rules:
    """Adjustments to make; by default the paper's, otherwise its ablations."""

    adam_step: AdamStep = "sqrt"
    """Divide Adam's step size by sqrt(c), by c, or not at all if minibatches are c times smaller."""
    adam_betas: AdamBetas = False
    """Raise Adam's decay rates to the power 1/c."""
    ewma: bool = True
    """Keep the age of the proximal policy in environment steps."""
    advantage_norm: bool = True
    """Keep the number of samples over which the advantages' mean and standard deviation are averaged."""
    policy_iterations: bool = True
    """Keep the number of samples in a phase of PPG."""
    auxiliary: bool = True
    """Keep the auxiliary minibatch per worker, and scale the auxiliary step size by the number of workers."""
    staleness: bool = True
    """Keep the age of delayed and asynchronous data in environment steps."""
    max_grad_norm: WithNoise = "none"
    """Multiply the maximum norm of the gradient by sqrt(c), as its noise grows, or leave it unchanged."""
    adam_eps: WithNoise = "sqrt"
    """Multiply Adam's epsilon by sqrt(c), as its denominator grows, if it is above the usual 1e-8; or leave it
    unchanged."""
    adaptive_step: bool = True
    """Keep the speed at which kl_target changes the step size; scale the KL divergences that depend on the batch."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, as measured by a run: step sizes change less near it, and not beyond; None
    assumes that it is far above both batches, as the paper does."""
    epochs: Epochs = "at-once"
    """Make all passes over a sample at once, or spread them over c iterations, as far apart as they were. Passes that
    are spread already (epoch_window above 1) stay so in both cases."""

    def __post_init__(self) -> None:
        """Raise a ConfigError for an option that is not one of its choices: other text would count as yes or no."""
        for name, kind in get_type_hints(type(self)).items():
            check_choice(name, getattr(self, name), kind)
        if self.noise_scale is not None:
            check_positive("noise_scale", self.noise_scale)

    @property
    def betas(self) -> tuple[bool, bool]:
        """Whether Adam's first and second decay rate are raised to the power 1/c."""
        return self.adam_betas in (True, "both"), self.adam_betas in (True, "both", "beta2")


@dataclass(frozen=True)
class Adjustments(Rules):
    """Adjustment of the hyperparameters to a changed batch."""

    adam_betas: Literal["keep", "both", "beta2"] = "keep"
    """Raise Adam's decay rates to the power 1/c."""
    rule: RuleName = "paper"
    """Change the step size with the minibatch size (paper), or keep both and change the number of minibatches."""

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of :func:`anybatch.scaling.rescale`."""
        return {x.name: getattr(self, x.name) for x in dataclasses.fields(Adjustments)}


@dataclass(frozen=True)
class TrainScaling(Adjustments):
    """Adjustment of the other hyperparameters to a changed batch."""

    off: bool = False
    """Adjust nothing: train with the hyperparameters as they are."""
