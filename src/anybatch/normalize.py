"""Normalisation of advantages (over iterations) and of rewards (over the whole run)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.distributed.collectives import moments
from anybatch.distributed.state import Slot, State

_EPSILON = 1e-8


class RunningMoments:
    """Weighted mean and variance of everything added so far, in Welford's form, which cannot go negative.

    A single number each, or one for each of R stacked runs.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        """Nothing added yet; ``shape`` is that of the mean, (R,) for stacked runs."""
        self.weight = torch.zeros(shape, dtype=torch.float64)
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.squares = torch.zeros(shape, dtype=torch.float64)  # weighted sum of squared deviations from the mean

    def add(self, mean: Tensor, var: Tensor, count: Tensor, decay: float | Tensor = 1.0) -> None:
        """Add ``count`` values by their mean and population variance, after multiplying older weights by ``decay``."""
        old = decay * self.weight
        weight = old + count
        shift = mean - self.mean
        self.squares = decay * self.squares + count * var + shift.square() * old * count / weight
        self.mean = self.mean + shift * count / weight
        self.weight = weight

    @property
    def var(self) -> Tensor:
        """The weighted variance, at least 0."""
        return self.squares / self.weight.clamp(min=1e-300)


def span_decay(span: float | Tensor) -> float | Tensor:
    """Decay rate beta of an EWMA whose span is ``2/(1-beta) - 1``."""
    return (span - 1) / (span + 1)


def standardized(advantage: Tensor, mean: float | Tensor, var: float | Tensor) -> Tensor:
    """``(advantage - mean) / (std + 1e-8)`` in fp32; any shapes that broadcast."""
    # in float64: for constant data a rounding error of the mean must not be divided by epsilon
    return ((advantage.double() - mean) / (var**0.5 + _EPSILON)).float()


def discounted_returns(reward: Tensor, first: Tensor, carried: Tensor, discount: float) -> Tensor:
    """Discounted sums of the rewards so far, along each environment.

    Args:
        reward: (..., N, T) float64 rewards.
        first: (..., N, T) bool, the step was the first of its episode.
        carried: (..., N) the sums before the first step.
        discount: of the running sum.

    Returns:
        (T, ..., N) sums; the last one is carried on to the next call.
    """
    keep = discount * (~first).double()
    returns = []
    for reward_t, keep_t in zip(reward.unbind(-1), keep.unbind(-1), strict=True):
        carried = torch.addcmul(reward_t, keep_t, carried)
        returns.append(carried)
    return torch.stack(returns)


def scaled_reward(reward: Tensor, var: Tensor, clip: float) -> Tensor:
    """Rewards over the standard deviation of their discounted return, clipped to plus or minus ``clip``, in fp32.

    Args:
        reward: (..., N, T) float64 rewards.
        var: that return's variance; any shape that broadcasts.
        clip: the bound.
    """
    return (reward * (var + _EPSILON).rsqrt()).clamp(-clip, clip).float()


class AdvantageNormalizer:
    """Shifts and scales advantages by moments that are weighted over iterations (section 4, third adjustment).

    An EWMA of the mean and variance with span ``2/(1-beta) - 1`` iterations, every iteration weighted by its number
    of samples, the current one included. Span 1 uses the current iteration alone.
    """

    def __init__(self, span: float = 1.0) -> None:
        """Start without history; ``span`` is the effective sample size in iterations, at least 1."""
        if not 1 <= span < math.inf:
            raise ValueError(f"advantage span {span} must be finite and at least 1, the current iteration alone")
        self.span = span
        self._moments = RunningMoments()

    @property
    def decay(self) -> float:
        """The EWMA's decay rate beta, from span = 2/(1-beta) - 1."""
        return float(span_decay(self.span))

    def update(self, mean: Tensor | float, var: Tensor | float, count: Tensor | float) -> None:
        """Add an iteration: the mean and (population) variance of its ``count`` advantages, over all workers."""
        mean, var, count = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (mean, var, count))
        self._moments.add(mean, var, count, self.decay)

    def moments(self) -> tuple[float, float]:
        """Weighted mean and variance; the variance is never negative."""
        return float(self._moments.mean), float(self._moments.var)

    def __call__(self, advantage: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return ``(advantage - mean) / (std + 1e-8)`` in fp32, any shape; entries that are not ``valid`` become 0."""
        normalized = standardized(advantage, *self.moments())
        return normalized if valid is None else torch.where(valid, normalized, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        moments = self._moments
        return {"weight": moments.weight, "mean": moments.mean, "squares": moments.squares}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` gave."""
        moments = self._moments
        moments.weight, moments.mean, moments.squares = state["weight"], state["mean"], state["squares"]


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
        self._moments = RunningMoments()

    def __call__(self, reward: Tensor, first: Tensor) -> Tensor:
        """Normalise a rollout's rewards, after adding it to the statistics.

        Args:
            reward: (N, T) raw rewards.
            first: (N, T) bool, the step was the first of its episode.

        Returns:
            (N, T) fp32 rewards.
        """
        raw = reward.double().cpu()
        returns = discounted_returns(raw, first.cpu(), self._return, self.discount)
        self._return = returns[-1]
        self._moments.add(*moments(returns))
        return scaled_reward(raw, self._moments.var, self.clip).to(reward.device)

    worker_keys: frozenset[str] = frozenset({"return"})

    def state_dict(self) -> State:
        """Running returns (N,) of this worker's environments, and the moments."""
        moments = self._moments
        return {"return": self._return, "count": moments.weight, "mean": moments.mean, "squares": moments.squares}

    def load_state_dict(self, state: State) -> None:
        """Restore :meth:`state_dict`."""
        moments = self._moments
        self._return, moments.weight = state["return"], state["count"]
        moments.mean, moments.squares = state["mean"], state["squares"]

    def merge(self, workers: Sequence[State]) -> State:
        """The running returns of all workers."""
        return {"return": torch.cat([worker["return"] for worker in workers])}

    def split(self, merged: State, slot: Slot) -> State:
        """The running returns of one worker."""
        return {"return": merged["return"][slot.envs].clone()}
