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
_FEWEST_ITERATIONS = 8
_SUMS = ("sum", "squares", "products")
_ITERATION_SUMS = ("iteration", "iteration_squares", "neighbors", "previous_iteration")


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


def signal_of_distant_pairs(norm_squared: float, mean_norm_squared: float, neighbors: float, count: int) -> float:
    """Mean product of all pairs of gradients that are not neighbours: ``|G|^2`` where only neighbours are correlated.

    ``|g_1 + ... + g_n|^2`` is the sum of n squares, of 2 (n - 1) products of neighbours, and of (n - 1)(n - 2) others.

    Args:
        norm_squared: mean of ``|g_i|^2``.
        mean_norm_squared: ``|g|^2`` of the mean of all gradients.
        neighbors: mean of ``g_i g_{i+1}``.
        count: n, at least 3.
    """
    others = count**2 * mean_norm_squared - count * norm_squared - 2 * (count - 1) * neighbors
    return others / ((count - 1) * (count - 2))


class NoiseScale:
    """Running estimate from the gradients of consecutive steps, which training has anyway.

    A window of k gradient steps gives the mean of ``|g_i|^2`` (B samples each) and the norm of the mean gradient (k B
    samples). Parameters move within a window, which is kept so short that they hardly do: about the age of the proximal
    policy.

    Both sizes must consist of independent samples. Minibatches that are parts of the same trajectories do not: they
    have the trajectory's noise in common, and their mean would count it as signal. There the mean over an iteration
    takes the place of a step, and signal is the mean product of iterations that are not neighbours, since trajectories
    continue from one iteration to the next.

    Signal and noise, as shares of the window's mean ``|g_i|^2`` so that no window of long gradients outweighs
    all that follow, are smoothed over windows separately, and only then divided, since a ratio of noisy estimates is
    biased.

    For Adam the same is done for gradients over Adam's denominator ``sqrt(v_hat) + eps``, the one that the last step
    of the window uses: the noise scale of the update rather than of the gradient, and a mean over components of
    ``Sigma_i / G_i^2``, the ratio in appendix C on which the square root rule rests.

    Where weights swing about a minimum within a window, its mean hides the signal. The correlation of successive
    gradients, ``r = E[g_i g_{i+1}] / E[g_i^2]``, does not: it is the signal's share of a gradient where weights stand
    still, and minus that share for SGD at rest on a noisy quadratic, so B (1 - |r|) / |r| is the noise scale there too.
    Where minibatches share trajectories, only the last step of an iteration and the first of the next make a pair.
    """

    def __init__(
        self, steps: int, *, adam: bool, iteration: int | None = None, device: torch.device | None = None
    ) -> None:
        """Start without an estimate.

        Args:
            steps: gradient steps of a window, at least 2; at least 3 iterations if ``iteration`` is given.
            adam: whether to estimate the preconditioned noise scale too.
            iteration: gradient steps of an iteration, if they share trajectories; None if each has its own.
            device: device of the gradients, to which :meth:`load_state_dict` moves the window.
        """
        if steps < 2:
            raise ValueError(f"a window of {steps} gradient steps has no second batch size")
        if iteration and (steps % iteration or steps < 3 * iteration):
            raise ValueError(f"a window of {steps} gradient steps is not 3 or more whole iterations of {iteration}")
        self._steps = steps
        self._iteration = iteration
        self._sums = _SUMS + _ITERATION_SUMS * bool(iteration)
        self._device = device
        self._kinds = ("noise_scale", "noise_scale_adam") if adam else ("noise_scale",)
        self._signal = dict.fromkeys(self._kinds, 0.0)
        self._noise = dict.fromkeys(self._kinds, 0.0)
        self._correlation = self._weight = 0.0
        self._window: dict[str, Any] = {}

    def add(self, parameters: Sequence[Parameter], optimizer: Optimizer, samples: int) -> None:
        """Take the gradient of one step, mean over ``samples``, before the optimiser uses it."""
        gradient = _flat_gradient(parameters)
        if not self._window or self._window["sum"].shape != gradient.shape:  # a checkpoint's has other parameters
            self._window = {"taken": 0} | {name: torch.zeros_like(gradient) for name in self._sums}
        window = self._window
        if window["taken"] and window["taken"] % (self._iteration or 1) == 0:
            window["products"].addcmul_(gradient, window["previous"])
        window["previous"] = gradient
        window["taken"] += 1
        window["sum"] += gradient
        window["squares"].addcmul_(gradient, gradient)
        if self._iteration:
            self._add_to_iteration(gradient, self._iteration)
        if window["taken"] == self._steps:
            self._end_window(parameters, optimizer, samples)

    def result(self) -> dict[str, float]:
        """Noise scales in samples by column; NaN while there is none, or noise hides the signal altogether.

        Besides, ``gradient_correlation`` of successive gradients, over Adam's denominator where there is one.
        """
        # a mean product of neighbours may exceed the mean square, which counts one more gradient
        correlation = max(-1.0, min(1.0, self._correlation / self._weight)) if self._weight else math.nan
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
        if self._window and not set(self._sums) <= set(self._window) <= {*self._sums, "taken", "previous"}:
            self._window = {}  # of an earlier version, or of other numbers of environments and workers

    def _add_to_iteration(self, gradient: Tensor, steps: int) -> None:
        window = self._window
        window["iteration"].add_(gradient, alpha=1 / steps)
        if window["taken"] % steps == 0:
            window["iteration_squares"].addcmul_(window["iteration"], window["iteration"])
            window["neighbors"].addcmul_(window["iteration"], window["previous_iteration"])  # at first with 0
            window["previous_iteration"] = window["iteration"]
            window["iteration"] = torch.zeros_like(gradient)

    def _end_window(self, parameters: Sequence[Parameter], optimizer: Optimizer, samples: int) -> None:
        window, iterations = self._window, self._steps // (self._iteration or 1)
        moments = [
            window["squares"] / self._steps,
            (window["sum"] / self._steps).square_(),
            window["products"] / (iterations - 1),
        ]
        if self._iteration:
            moments += [window["iteration_squares"] / iterations, window["neighbors"] / (iterations - 1)]
        keep = (_SPAN - 1) / (_SPAN + 1)
        correlation, finite = 0.0, True
        for kind in self._kinds:
            if kind == "noise_scale_adam":
                squared_denominator = adam_denominator(parameters, optimizer).square_()
                moments = [x.div_(squared_denominator) for x in moments]
            small, large, product, *of_iterations = (float(x.sum(dtype=torch.float64)) for x in moments)
            if not all(map(math.isfinite, (small, large, product, *of_iterations))):
                finite = False  # squares overflowed; a sum would never recover from it
            elif small > 0:
                if self._iteration:
                    norm_squared, neighbors = of_iterations
                    signal = signal_of_distant_pairs(norm_squared, large, neighbors, iterations) / small
                    noise = (norm_squared / small - signal) * samples * self._iteration
                else:
                    signal, noise = signal_and_noise(1.0, large / small, samples, samples * self._steps)
                self._signal[kind] = keep * self._signal[kind] + signal
                self._noise[kind] = keep * self._noise[kind] + noise
                correlation = product / small
        if finite:
            self._correlation, self._weight = keep * self._correlation + correlation, keep * self._weight + 1.0
        self._window = {}


def ratio(noise: float, signal: float) -> float:
    """``tr(Sigma) / |G|^2`` in samples, or NaN where the signal is not above 0."""
    return noise / signal if signal > 0 else math.nan


def _flat_gradient(parameters: Sequence[Parameter]) -> Tensor:
    """Gradient of all trained parameters, flat, in fp32; 0 where a step left a layer out."""
    trained = [x for x in parameters if x.requires_grad]
    return torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).reshape(-1) for x in trained]).float()


def adam_denominator(parameters: Sequence[Parameter], optimizer: Optimizer) -> Tensor:
    """Adam's ``sqrt(v_hat) + eps`` for its coming step, flat, of all trained parameters.

    It counts the present gradient, as Adam does: else a weight that has had none so far would be divided by eps alone.
    Where a parameter has no gradient, Adam takes no step, and the denominator is that of its last one, or 1.
    """
    group = optimizer.param_groups[0]
    beta2, eps, flat = group["betas"][1], group["eps"], []
    for parameter in (x for x in parameters if x.requires_grad):
        state = optimizer.state.get(parameter)
        steps = float(state["step"]) if state else 0.0
        if parameter.grad is not None:
            squares, steps = (1 - beta2) * parameter.grad.square(), steps + 1
            if state:
                squares.add_(state["exp_avg_sq"], alpha=beta2)
        elif state and steps:
            squares = state["exp_avg_sq"]
        else:
            flat.append(torch.ones_like(parameter).reshape(-1))
            continue
        flat.append((squares / (1 - beta2**steps)).sqrt_().add_(eps).reshape(-1))
    return torch.cat(flat)


def window_steps(minibatches: int, center_of_mass: float, *, shared_trajectories: bool = False) -> int:
    """Gradient steps of a window: whole iterations, about as many steps as the proximal policy is old.

    At least 8 steps; at least 8 iterations where the minibatches share trajectories, for as many pairs.
    """
    steps = min(max(_FEWEST_STEPS, minibatches, center_of_mass), max(_MOST_STEPS, minibatches))
    iterations = max(math.ceil(steps / minibatches), _FEWEST_ITERATIONS if shared_trajectories else 1)
    return iterations * minibatches
