"""Normalisation of advantages (over iterations) and of rewards (over the whole run)."""

from __future__ import annotations

import torch
from torch import Tensor

from anybatch.distributed import moments

_EPSILON = 1e-8


class AdvantageNormalizer:
    """Shifts and scales advantages by moments that are weighted over iterations (section 4, third adjustment).

    An EWMA of the mean and variance with span ``2/(1-beta) - 1`` iterations, every iteration weighted by its number
    of samples, the current one included. Span 1 uses the current iteration alone. The variance is accumulated in
    Welford's form, which cannot go negative.
    """

    def __init__(self, span: float = 1.0) -> None:
        """Start without history; ``span`` is the effective sample size in iterations, at least 1."""
        if span < 1:
            raise ValueError(f"advantage span {span} is below 1, the current iteration alone")
        self.span = span
        self._weight = torch.zeros((), dtype=torch.float64)
        self._mean = torch.zeros((), dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)  # weighted sum of squared deviations from the mean

    @property
    def decay(self) -> float:
        """The EWMA's decay rate beta, from span = 2/(1-beta) - 1."""
        return (self.span - 1) / (self.span + 1)

    def update(self, mean: Tensor | float, var: Tensor | float, count: Tensor | float) -> None:
        """Add an iteration: the mean and (population) variance of its ``count`` advantages, over all workers."""
        mean, var, count = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (mean, var, count))
        old = self.decay * self._weight
        weight = old + count
        shift = mean - self._mean
        self._squares = self.decay * self._squares + count * var + shift.square() * old * count / weight
        self._mean = self._mean + shift * count / weight
        self._weight = weight

    def moments(self) -> tuple[float, float]:
        """Weighted mean and variance; the variance is never negative."""
        return float(self._mean), float(self._squares / self._weight.clamp(min=1e-300))

    def __call__(self, advantage: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return ``(advantage - mean) / (std + 1e-8)`` in fp32, any shape; entries that are not ``valid`` become 0."""
        mean, var = self.moments()
        # in float64: for constant data a rounding error of the mean must not be divided by epsilon
        normalized = ((advantage.double() - mean) / (var**0.5 + _EPSILON)).float()
        return normalized if valid is None else torch.where(valid, normalized, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"weight": self._weight, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._weight, self._mean, self._squares = state["weight"], state["mean"], state["squares"]


class RewardNormalizer:
    """Divides rewards by the running standard deviation of their discounted return, then clips them.

    The discounted return runs along each environment; the reward of a terminal step counts towards the return that it
    ends. The statistics cover everything seen so far, over all workers. Its discount is its own (0.99 where GAE uses
    0.999), as in the authors' published code.
    """

    def __init__(self, num_envs: int, discount: float = 0.99, clip: float = 10.0) -> None:
        """``num_envs``: environments of this worker; ``clip``: bound on the normalised reward's magnitude."""
        self.discount = discount
        self.clip = clip
        self._return = torch.zeros(num_envs, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.float64)
        self._mean = torch.zeros((), dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)

    def __call__(self, reward: Tensor, first: Tensor) -> Tensor:
        """Normalise a rollout's rewards, after adding it to the statistics.

        Args:
            reward: (N, T) raw rewards.
            first: (N, T) bool, the step was the first of its episode.

        Returns:
            (N, T) fp32 rewards.
        """
        raw, starts = reward.double().cpu(), first.cpu()
        keep = torch.where(starts, 0.0, self.discount).double()
        returns = []
        for reward_t, keep_t in zip(raw.unbind(1), keep.unbind(1), strict=True):
            self._return = torch.addcmul(reward_t, keep_t, self._return)
            returns.append(self._return)
        self._update(*moments(torch.stack(returns)))
        scale = (self._squares / self._count + _EPSILON).rsqrt()
        return (raw * scale).clamp(-self.clip, self.clip).float().to(reward.device)

    def _update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        total = self._count + count
        shift = mean - self._mean
        self._squares = self._squares + count * var + shift.square() * self._count * count / total
        self._mean = self._mean + shift * count / total
        self._count = total

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"return": self._return, "count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._return, self._count = state["return"], state["count"]
        self._mean, self._squares = state["mean"], state["squares"]
