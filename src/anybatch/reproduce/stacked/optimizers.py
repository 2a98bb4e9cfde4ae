"""Adam over stacked weights, with a step size and decay rates for each run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch.nn import Parameter
from torch.optim import Adam

from anybatch.config.schema import OptimizerConfig


class StackedAdam(Adam):
    """Adam's fused form over matrices (R, P), called once for each stretch of rows with equal numbers.

    One call reads and writes every array once, where Adam written out over the whole stack takes nine passes.
    """

    def __init__(self, matrices: Sequence[Parameter], configs: Sequence[OptimizerConfig]) -> None:
        """Start without moments.

        Args:
            matrices: the weights (R, P) to train.
            configs: of the R runs; the fewer changes from one to the next, the fewer calls.
        """
        self._matrices = matrices
        self._stretches: list[slice] = []
        groups: list[dict[str, Any]] = []
        for (config, _), rows in groupby(enumerate(configs), key=_number_of_call):
            start = self._stretches[-1].stop if self._stretches else 0
            stretch = slice(start, start + len(list(rows)))
            self._stretches.append(stretch)
            parts = [Parameter(matrix.detach()[stretch]) for matrix in matrices]  # in the same memory
            groups.append({"params": parts, "lr": config.step_size, "betas": config.adam_betas, "eps": config.adam_eps})
        super().__init__(groups, fused=True)
        self.register_step_pre_hook(_split_gradients)


def _number_of_call(numbered: tuple[int, OptimizerConfig]) -> tuple[OptimizerConfig, int]:
    """Equal for runs whose step sizes are always equal; adaptive ones have a call each."""
    number, config = numbered
    return config, number if config.adaptive_step else 0


def _split_gradients(optimizer: StackedAdam, *_: Any) -> None:
    """Give each part its rows of the gradients."""
    for group, stretch in zip(optimizer.param_groups, optimizer._stretches, strict=True):
        for part, matrix in zip(group["params"], optimizer._matrices, strict=True):
            part.grad = None if matrix.grad is None else matrix.grad[stretch]
