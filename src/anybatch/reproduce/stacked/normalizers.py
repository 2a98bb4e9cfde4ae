"""Normalisation of the advantages and rewards of R runs, with statistics for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.config.schema import AdvantageConfig, RewardConfig
from anybatch.normalize import RunningMoments, discounted_returns, scaled_reward, span_decay, standardized


class StackedAdvantageNormalizer:
    """:class:`anybatch.normalize.AdvantageNormalizer` for R runs with their own spans."""

    def __init__(self, configs: Sequence[AdvantageConfig]) -> None:
        """Start without history."""
        self._decay = span_decay(torch.tensor([config.span for config in configs], dtype=torch.float64))
        self._moments = RunningMoments((len(configs),))

    def update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Add an iteration: the means and population variances (R,) of each run's ``count`` advantages."""
        self._moments.add(mean, var, count, self._decay)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Weighted means and variances (R,)."""
        return self._moments.mean, self._moments.var

    def __call__(self, advantage: Tensor) -> Tensor:
        """Normalised advantages (R, N, T) in fp32."""
        mean, var = (moment[:, None, None] for moment in self.moments())
        return standardized(advantage, mean, var)


class StackedRewardNormalizer:
    """:class:`anybatch.normalize.RewardNormalizer` for R runs."""

    def __init__(self, runs: int, num_envs: int, config: RewardConfig) -> None:
        """Start without history."""
        self._config = config
        self._return = torch.zeros(runs, num_envs, dtype=torch.float64)
        self._moments = RunningMoments((runs,))

    def __call__(self, reward: Tensor, first: Tensor) -> Tensor:
        """Normalise a rollout's rewards (R, N, T), after adding it to the statistics.

        Args:
            reward: (R, N, T) raw rewards.
            first: (R, N, T) bool, the step was the first of its episode.
        """
        raw = reward.double()
        returns = discounted_returns(raw, first, self._return, self._config.return_discount)
        self._return = returns[-1]
        self._moments.add(*moments_of_runs(returns.transpose(0, 1)))
        return scaled_reward(raw, self._moments.var[:, None, None], self._config.bound)


def moments_of_runs(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (R,), population variance (R,) and count of each run's values (R, ...), in float64."""
    values = values.double().flatten(1)
    count = torch.tensor(float(values.shape[1]), dtype=torch.float64)
    return values.mean(1), values.var(1, correction=0), count
