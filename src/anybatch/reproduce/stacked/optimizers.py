"""Adam over stacked weights, with a step size and decay rates for each run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from anybatch.config.schema import OptimizerConfig
from anybatch.optimizers import make_optimizer, step_size


class StackedAdam:
    """torch.optim.Adam's fused form over matrices (R, P), called once for each stretch of rows with equal numbers.

    One call reads and writes every array once, where Adam written out over the whole stack takes nine passes.
    """

    def __init__(self, matrices: Sequence[Tensor], configs: Sequence[OptimizerConfig]) -> None:
        """Start without moments.

        Args:
            matrices: the weights (R, P) of the groups to train, changed in place.
            configs: the numbers of the R runs; the fewer changes from one to the next, the fewer calls.
        """
        self._stretches: list[tuple[slice, OptimizerConfig]] = []
        for config, rows in groupby(configs):
            start = self._stretches[-1][0].stop if self._stretches else 0
            self._stretches.append((slice(start, start + len(list(rows))), config))
        self._parameters = [[Parameter(matrix[rows]) for matrix in matrices] for rows, _ in self._stretches]
        self._optimizer = make_optimizer(self._parameters[0], configs[0])
        self._optimizer.param_groups.clear()
        for parameters, (_, config) in zip(self._parameters, self._stretches, strict=True):
            numbers = {"lr": config.step_size, "betas": config.adam_betas, "eps": config.adam_eps}
            self._optimizer.add_param_group({"params": parameters, **numbers})

    def set_progress(self, fraction: float) -> None:
        """Set the step sizes for runs of which ``fraction`` (0 to 1) is done."""
        for group, (_, config) in zip(self._optimizer.param_groups, self._stretches, strict=True):
            group["lr"] = step_size(config, fraction)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take a gradient step.

        Args:
            gradients: (R, P), in the order of the matrices.
        """
        for parameters, (rows, _) in zip(self._parameters, self._stretches, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient[rows]
        self._optimizer.step()


def gradients_of_runs(loss: Tensor, matrices: Sequence[Tensor], runs: int) -> tuple[Tensor, ...]:
    """Each run's own gradient (R, P), from a loss that is the mean over all samples of R runs.

    Every run has as many samples, so R times that mean is the sum of the runs' losses, and a run's weights reach no
    loss but its own.
    """
    return torch.autograd.grad(loss, list(matrices), torch.full_like(loss, float(runs)))
