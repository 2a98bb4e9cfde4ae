"""The gradient noise scale, estimated while training: up to which batch the scaling rules hold.

McCandlish et al. (2018, "An empirical model of large-batch training") define the simple noise scale
``B_simple = tr(Sigma) / |G|^2``: G the true gradient, Sigma the covariance of the gradient of one sample. At a batch of
that size signal and noise of a gradient step are equal; far below it SGD and Adam are batch size-invariant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

_FEWEST_STEPS, _MOST_STEPS = 8, 64
_SPAN = 32  # windows
_SUMS = ("sum", "squares", "products")


def signal_and_noise(
    small_norm_squared: float, large_norm_squared: float, small: float, large: float
) -> tuple[float, float]:
    """Unbiased estimates of ``|G|^2`` and ``tr(Sigma)`` from gradients at two batch sizes.

    A mean gradient g over B samples has ``E|g|^2 = |G|^2 + tr(Sigma)/B``. Two sizes make two equations, solved by
    ``|G|^2 = (B2 |g2|^2 - B1 |g1|^2) / (B2 - B1)`` and ``tr(Sigma) = (|g1|^2 - |g2|^2) / (1/B1 - 1/B2)`` (appendix A.1
    of McCandlish et al.). It holds whether or not g1 and g2 share samples. The first can be negative by chance.

    Args:
        small_norm_squared: mean of ``|g1|^2`` over gradients of ``small`` samples.
        large_norm_squared: ``|g2|^2`` of a gradient of ``large`` samples.
        small: B1, in samples.
        large: B2, above B1.

    Returns:
        ``|G|^2`` and ``tr(Sigma)``.
    """
    signal = (large * large_norm_squared - small * small_norm_squared) / (large - small)
    noise = (small_norm_squared - large_norm_squared) / (1 / small - 1 / large)
    return signal, noise


class NoiseScale:
    """Running estimate from the gradients of consecutive steps, which training has anyway.

    A window of k gradient steps gives the mean of ``|g_i|^2`` (B samples each) and the norm of the mean gradient (k B
    samples). Parameters move within a window, which is kept so short that they hardly do: about the age of the proximal
    policy. Signal and noise, as shares of the window's mean ``|g_i|^2`` so that no window of long gradients outweighs
    all that follow, are smoothed over windows separately, and only then divided, since a ratio of noisy estimates is
    biased.

    For Adam the same is done for gradients over Adam's denominator ``sqrt(v_hat) + eps``, the one that the last step
    of the window uses: the noise scale of the update rather than of the gradient, and a mean over components of
    ``Sigma_i / G_i^2``, the ratio in appendix C on which the square root rule rests.

    Where weights swing about a minimum within a window, its mean hides the signal. The correlation of successive
    gradients, ``r = E[g_i g_{i+1}] / E[g_i^2]``, does not: it is the signal's share of a gradient where weights stand
    still, and minus that share for SGD at rest on a noisy quadratic, so B (1 - |r|) / |r| is the noise scale there too.
    """

    def __init__(self, steps: int, *, adam: bool, device: torch.device | None = None) -> None:
        """Start without an estimate.

        Args:
            steps: gradient steps of a window, at least 2.
            adam: whether to estimate the preconditioned noise scale too.
            device: device of the gradients, to which :meth:`load_state_dict` moves the window.
        """
        if steps < 2:
            raise ValueError(f"a window of {steps} gradient steps has no second batch size")
        self._steps = steps
        self._device = device
        self._kinds = ("noise_scale", "noise_scale_adam") if adam else ("noise_scale",)
        self._signal = dict.fromkeys(self._kinds, 0.0)
        self._noise = dict.fromkeys(self._kinds, 0.0)
        self._correlation = self._weight = 0.0
        self._window: dict[str, Any] = {}

    def add(self, parameters: Sequence[Parameter], optimizer: Optimizer, samples: int) -> None:
        """Take the gradient of one step, mean over ``samples``, before the optimiser uses it."""
        gradient = torch.cat([x.grad.reshape(-1) for x in parameters if x.grad is not None])
        if not self._window:
            self._window = {"taken": 0} | {name: torch.zeros_like(gradient) for name in _SUMS}
        window = self._window
        if window["taken"]:
            window["products"].addcmul_(gradient, window["previous"])
        window["previous"] = gradient
        window["taken"] += 1
        window["sum"] += gradient
        window["squares"].addcmul_(gradient, gradient)
        if window["taken"] == self._steps:
            self._end_window(parameters, optimizer, samples)

    def result(self) -> dict[str, float]:
        """Noise scales in samples by column; NaN while there is none, or noise hides the signal altogether.

        Besides, ``gradient_correlation`` of successive gradients, over Adam's denominator where there is one.
        """
        correlation = self._correlation / self._weight if self._weight else math.nan
        scales = {kind: ratio(self._noise[kind], self._signal[kind]) for kind in self._kinds}
        return {**scales, "gradient_correlation": correlation}

    def state_dict(self) -> dict[str, Any]:
        return {
            "signal": dict(self._signal),
            "noise": dict(self._noise),
            "correlation": [self._correlation, self._weight],
            "window": dict(self._window),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._signal, self._noise = dict(state["signal"]), dict(state["noise"])
        self._window = {k: x.to(self._device) if isinstance(x, Tensor) else x for k, x in state["window"].items()}
        self._correlation, self._weight = state.get("correlation", (0.0, 0.0))
        if "products" not in self._window:  # of an earlier version
            self._window = {}

    def _end_window(self, parameters: Sequence[Parameter], optimizer: Optimizer, samples: int) -> None:
        moments = (
            self._window["squares"] / self._steps,
            (self._window["sum"] / self._steps).square_(),
            self._window["products"] / (self._steps - 1),
        )
        keep = (_SPAN - 1) / (_SPAN + 1)
        correlation = 0.0
        for kind in self._kinds:
            if kind == "noise_scale_adam":
                squared_denominator = adam_denominator(parameters, optimizer).square_()
                moments = tuple(x.div_(squared_denominator) for x in moments)
            small, large, product = (float(x.sum(dtype=torch.float64)) for x in moments)
            if small > 0:
                signal, noise = signal_and_noise(1.0, large / small, samples, samples * self._steps)
                self._signal[kind] = keep * self._signal[kind] + signal
                self._noise[kind] = keep * self._noise[kind] + noise
                correlation = product / small
        self._correlation, self._weight = keep * self._correlation + correlation, keep * self._weight + 1.0
        self._window = {}


def ratio(noise: float, signal: float) -> float:
    """``tr(Sigma) / |G|^2`` in samples, or NaN where the signal is not above 0."""
    return noise / signal if signal > 0 else math.nan


def adam_denominator(parameters: Sequence[Parameter], optimizer: Optimizer) -> Tensor:
    """Adam's ``sqrt(v_hat) + eps`` for its coming step, flat, of the parameters that have a gradient.

    It counts the present gradient, as Adam does: else a weight that has had none so far would be divided by eps alone.
    """
    group = optimizer.param_groups[0]
    beta2, eps, flat = group["betas"][1], group["eps"], []
    for parameter in parameters:
        if parameter.grad is not None:
            state = optimizer.state[parameter]
            squares = (1 - beta2) * parameter.grad.square()
            steps = 1.0
            if state:
                squares.add_(state["exp_avg_sq"], alpha=beta2)
                steps += float(state["step"])
            flat.append((squares / (1 - beta2**steps)).sqrt_().add_(eps).reshape(-1))
    return torch.cat(flat)


def window_steps(minibatches: int, center_of_mass: float) -> int:
    """Gradient steps of a window: whole iterations, about as many steps as the proximal policy is old."""
    steps = min(max(_FEWEST_STEPS, minibatches, center_of_mass), max(_MOST_STEPS, minibatches))
    return math.ceil(steps / minibatches) * minibatches
