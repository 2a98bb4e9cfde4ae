"""Normalisation of advantages (over iterations) and of rewards (over the whole run).

With a run axis, (R, N, T) instead of (N, T), each of R stacked runs has statistics of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.advantages import floating
from anybatch.distributed.collectives import moments
from anybatch.distributed.state import Slot, State
from anybatch.objectives import check_alike, check_mask

_EPSILON = 1e-8


class RunningMoments:
    """Weighted mean and variance of everything added so far, in Welford's form, which cannot go negative."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        """Start empty; ``shape`` is that of the mean: () for one run, (R,) for stacked runs."""
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


class AdvantageNormalizer:
    """Shifts and scales advantages by moments that are weighted over iterations (section 4, third adjustment).

    An EWMA of the mean and variance with span ``2/(1-beta) - 1`` iterations, every iteration weighted by its number
    of samples, the current one included. Span 1 uses the current iteration alone.
    """

    def __init__(self, span: float | Tensor = 1.0) -> None:
        """Start without history.

        Args:
            span: the effective sample size in iterations, at least 1; float64 (R,) for stacked runs.

        Raises:
            ValueError: it is less than 1, or not finite.
        """
        spans = torch.as_tensor(span, dtype=torch.float64)
        if not bool(((spans >= 1) & torch.isfinite(spans)).all()):
            raise ValueError(f"advantage span {span} must be finite and at least 1 (the current iteration only)")
        self.span = spans.cpu() if isinstance(span, Tensor) else span
        self._moments = RunningMoments(tuple(spans.shape))

    @property
    def decay(self) -> float | Tensor:
        """The EWMA's decay rate beta, from span = 2/(1-beta) - 1."""
        return (self.span - 1) / (self.span + 1)

    def update(self, mean: Tensor | float, var: Tensor | float, count: Tensor | float) -> None:
        """Add an iteration: the mean and (population) variance of its ``count`` advantages, over all workers.

        A count of 0 changes nothing, whatever its mean. Values of weight 0 are dropped, even if not finite. A variance
        below 0, as rounding errors of mean squares make it, counts as 0.

        Raises:
            ValueError: an argument is neither a number nor (R,) for R stacked runs.
        """
        mean, var, count = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (mean, var, count))
        runs = self._moments.weight.shape
        for name, x in (("mean", mean), ("var", var), ("count", count)):
            if x.shape not in (runs, torch.Size()):
                allowed = f"a number or {tuple(runs)}, one for each run" if runs else "a number"
                raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be {allowed}")
        moments, names = self._moments, ("weight", "mean", "squares")
        before = [getattr(moments, name) for name in names]
        lost = (self.decay * moments.weight == 0) & ~torch.isfinite(moments.mean + moments.squares)  # 0 * NaN is NaN
        moments.mean, moments.squares = (torch.where(lost, 0.0, x) for x in (moments.mean, moments.squares))
        moments.add(mean, var.clamp(min=0), count, self.decay)
        for name, x in zip(names, before, strict=True):
            setattr(moments, name, torch.where(count > 0, getattr(moments, name), x))

    def moments(self) -> tuple[float, float]:
        """Weighted mean and variance; the variance is never negative. Tensors (R,) for stacked runs."""
        return _float(self._moments.mean), _float(self._moments.var)

    def __call__(self, advantage: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return ``(advantage - mean) / (std + 1e-8)`` in fp32; entries that are not ``valid`` become 0.

        Args:
            advantage: any shape; (R, ...) for R stacked runs.
            valid: bool, the same shape; None means all.

        Raises:
            TypeError: ``advantage`` is no floating-point tensor, or ``valid`` no bool tensor.
            ValueError: the shapes differ, there is no run axis for stacked runs, or no samples were added yet.
        """
        check_alike(0, advantage=advantage)
        if valid is not None:
            check_mask("valid", valid, advantage)
        runs = self._moments.weight.shape
        if runs and advantage.shape[:1] != runs:
            raise ValueError(
                f"advantage has shape {tuple(advantage.shape)}, but must be ({runs[0]}, ...), a row for each run"
            )
        if not bool((self._moments.weight > 0).any()) and (valid is None or bool(valid.any())):
            raise ValueError("advantages cannot be normalised before update(mean, var, count) has added some")
        mean, std = _before(self._moments.mean, advantage), _before(self._moments.var.sqrt(), advantage)
        # in float64: for constant data a rounding error of the mean must not be divided by epsilon
        normalized = ((advantage.double() - mean) / (std + _EPSILON)).float()
        return normalized if valid is None else torch.where(valid, normalized, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """The moments."""
        moments = self._moments
        return {"weight": moments.weight, "mean": moments.mean, "squares": moments.squares}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        moments = self._moments
        moments.weight, moments.mean, moments.squares = (state[name].cpu() for name in ("weight", "mean", "squares"))


class RewardNormalizer:
    """Divides rewards by the running standard deviation of their discounted return, then clips them.

    The discounted return runs along each environment; the reward of a terminal step counts towards the return that it
    ends. The statistics cover all rewards so far, over all workers. Its discount is separate (0.99 where GAE uses
    0.999), as in the authors' published code.
    """

    def __init__(self, num_envs: int, discount: float = 0.99, clip: float = 10.0, *, runs: int | None = None) -> None:
        """Start without history.

        Args:
            num_envs: environments of this worker, of each run, at least 1.
            discount: of the running return, at least 0 and below 1.
            clip: bound on the normalised reward's magnitude, above 0; ``inf`` for none.
            runs: number of stacked runs R; None for a single run, whose rewards have no run axis.

        Raises:
            ValueError: a number is out of range.
        """
        for name, value, allowed, words in (
            ("num_envs", num_envs, num_envs >= 1, "at least 1"),
            ("discount", discount, 0 <= discount < 1, "at least 0 and below 1"),
            ("clip", clip, clip > 0, "above 0"),
        ):
            if not allowed:
                raise ValueError(f"{name} is {value}, but must be {words}")
        self.discount = discount
        self.clip = clip
        shape = () if runs is None else (runs,)
        self._return = torch.zeros(*shape, num_envs, dtype=torch.float64)
        self._moments = RunningMoments(shape)

    def __call__(self, reward: Tensor, first: Tensor) -> Tensor:
        """Normalise a rollout's rewards, after adding it to the statistics.

        Args:
            reward: (N, T) raw rewards, T at least 1.
            first: (N, T) bool, the step was the first of its episode.

        Returns:
            (N, T) fp32 rewards.

        Raises:
            TypeError: ``reward`` is no tensor of numbers, or ``first`` no bool tensor.
            ValueError: the shapes differ, or are not those of N environments.
        """
        check_alike(reward=floating(reward))
        check_mask("first", first, reward)
        if reward.shape[:-1] != self._return.shape or not reward.shape[-1]:
            envs = ", ".join(map(str, self._return.shape))
            raise ValueError(
                f"reward has shape {tuple(reward.shape)}, but must be ({envs}, T): environments, then time, at least 1"
            )
        raw = reward.double()
        returns = self._discounted_returns(raw, first)
        self._return = returns[-1].cpu()
        self._moments.add(*moments(returns.movedim(0, -2), run_axis=raw.dim() > 2))
        scale = _before((self._moments.var + _EPSILON).rsqrt(), raw)
        return (raw * scale).clamp(-self.clip, self.clip).float()

    def _discounted_returns(self, reward: Tensor, first: Tensor) -> Tensor:
        """Discounted sums of the rewards (..., N, T) so far, along each environment: (T, ..., N)."""
        keep = self.discount * (~first).double()
        running, returns = self._return.to(reward.device), []
        for reward_t, keep_t in zip(reward.unbind(-1), keep.unbind(-1), strict=True):
            running = torch.addcmul(reward_t, keep_t, running)
            returns.append(running)
        return torch.stack(returns)

    worker_keys: frozenset[str] = frozenset({"return"})

    def state_dict(self) -> State:
        """Running returns (N,) of this worker's environments, and the moments."""
        moments = self._moments
        return {"return": self._return, "count": moments.weight, "mean": moments.mean, "squares": moments.squares}

    def load_state_dict(self, state: State) -> None:
        """Restore :meth:`state_dict`."""
        moments = self._moments
        if state["return"].shape == self._return.shape:  # else there are other environments, in new episodes
            self._return = state["return"].cpu()
        moments.weight, moments.mean, moments.squares = (state[name].cpu() for name in ("count", "mean", "squares"))

    def merge(self, workers: Sequence[State]) -> State:
        """The running returns of all workers."""
        return {"return": torch.cat([worker["return"] for worker in workers])}

    def split(self, merged: State, slot: Slot) -> State:
        """The running returns of one worker."""
        return {"return": merged["return"][slot.envs].clone()}


def _before(statistic: Tensor, data: Tensor) -> Tensor:
    """A statistic () or (R,), on the device of the data (...) or (R, ...) and with axes added behind, to broadcast."""
    return statistic.reshape((*statistic.shape, *[1] * (data.dim() - statistic.dim()))).to(data.device)


def _float(statistic: Tensor) -> float:
    return statistic if statistic.dim() else float(statistic)  # type: ignore[return-value]
