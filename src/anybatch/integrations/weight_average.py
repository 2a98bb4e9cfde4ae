"""The proximal EWMA of a large model's trained weights, without a second model: in fp32, on any device.

:class:`anybatch.proximal.EwmaProximal` keeps a copy of the network, which is the fastest for small ones. Here only
the average of the trained parameters is kept (an adapter's, not its base model's); it replaces them in the model for a
forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from anybatch.config.validation import check_number
from anybatch.errors import ConfigError
from anybatch.proximal import accumulate_, decay_of, sum_of_powers


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Let a model be in evaluation mode, without dropout; its modules return to the modes in which they were.

    Args:
        model: the model.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class WeightAverage:
    """The bias-corrected EWMA of named parameters after each gradient step (section 4 and appendix A).

    >>> average = WeightAverage(model.named_parameters(), center_of_mass=8.0)
    >>> with average.applied(model), torch.no_grad():
    ...     logp_proximal = log_probs(model, batch)

    Call :meth:`after_gradient_step` after every gradient step, and evaluate the average before the forward pass that
    carries a gradient. The same numbers as :class:`anybatch.proximal.EwmaProximal`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Parameter]],
        center_of_mass: float = 8.0,
        device: torch.device | str | None = None,
    ) -> None:
        """Start the average at the present weights.

        Args:
            parameters: names and parameters, of which those that require a gradient are averaged.
            center_of_mass: beta/(1-beta), in gradient steps, at least 0.
            device: where the average is kept, in fp32 at least: 4 bytes a parameter; None is where the parameters are.
                From another device it is copied for each forward pass.

        Raises:
            ConfigError: ``center_of_mass`` is out of range, or no parameter requires a gradient.
        """
        check_number("center_of_mass", center_of_mass, of="gradient steps", at_least=0)
        self.beta = decay_of(center_of_mass)
        """Decay rate of the average."""
        self.parameters = {name: x for name, x in parameters if x.requires_grad}
        """The averaged parameters by name."""
        if not self.parameters:
            raise ConfigError("no parameter requires a gradient, so there is nothing to average")
        self.average: list[Tensor] = [
            x.detach().to(device=device, dtype=torch.promote_types(x.dtype, torch.float32), copy=True)
            for x in self.parameters.values()
        ]
        """The average of each parameter."""
        self.terms = 1
        """Number of weights in the average: the initial ones, and those after each gradient step."""

    @torch.no_grad()
    def after_gradient_step(self) -> None:
        """theta_prox <- EWMA_beta(theta)."""
        self.terms += 1
        weight = 1 / sum_of_powers(self.beta, self.terms)
        for average, theta in zip(self.average, self.parameters.values(), strict=True):  # one on the device at a time
            accumulate_([average], [theta.detach().to(average.device, average.dtype)], weight)

    def reset(self) -> None:
        """Re-initialise: theta_prox <- theta, w <- 1."""
        self.terms = 0
        self.after_gradient_step()

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Let the average take the place of the weights, and the model be in evaluation mode, without dropout.

        Args:
            model: the model that has the parameters; its modules return to the modes in which they were.
        """
        weights = [x.data for x in self.parameters.values()]
        try:
            for x, average in zip(self.parameters.values(), self.average, strict=True):
                x.data = average.to(x.device, x.dtype)
            torch.clear_autocast_cache()  # else autocast takes the bf16 copies that it made of the other weights
            with evaluation_mode(model):
                yield
        finally:
            for x, data in zip(self.parameters.values(), weights, strict=True):
                x.data = data
            torch.clear_autocast_cache()

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, and the number of terms."""
        return {"average": dict(zip(self.parameters, self.average, strict=True)), "terms": self.terms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: with the same names and shapes.

        Raises:
            ConfigError: the names or shapes are others.
        """
        if state["average"].keys() != self.parameters.keys():
            changed = sorted(state["average"].keys() ^ self.parameters.keys())
            raise ConfigError(f"the saved average is of different parameters: {', '.join(changed[:5])}")
        for name, average in zip(self.parameters, self.average, strict=True):
            if (shape := tuple(state["average"][name].shape)) != average.shape:
                raise ConfigError(f"the saved average of {name} has shape {shape}, but needs {tuple(average.shape)}")
        for name, average in zip(self.parameters, self.average, strict=True):
            average.copy_(state["average"][name])
        self.terms = int(state["terms"])
