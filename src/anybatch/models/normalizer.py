"""Normalisation of observations by running statistics, which belong to the policy and are saved with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from anybatch.distributed.collectives import pooled_moments
from anybatch.errors import ConfigError
from anybatch.models.images import image_layout
from anybatch.normalize import RunningMoments
from anybatch.observations import Observation

EnvObservation = np.ndarray | dict[str, np.ndarray]
_EPSILON = 1e-8


class ObservationNormalizer(nn.Module):
    """Shifts and scales vectors by the mean and standard deviation of all observations trained on, and clips them.

    Statistics change once an iteration, by :meth:`update`, and a rollout is normalised by those that were published
    with the weights that act (:func:`rollout_normalizer`). It stores the normalised observations, so that training,
    however late, sees the numbers that acted: on fresh data every ratio is exactly 1 at the first gradient step. It
    also carries the moments of the raw ones, which :meth:`update` adds when the rollout is trained on. They count
    samples, over all environments and data-parallel workers, so that their time scale does not depend on the batch.

    In a dictionary the vectors of floats are normalised and the rest passes through. F is the number of all normalised
    numbers of an observation. With ``runs``, statistics and observations have a run axis in front.
    """

    count: Tensor
    """Samples so far, float64: (), or (R, 1)."""
    mean: Tensor
    """Their mean, float64: (F,), or (R, F)."""
    squares: Tensor
    """Sums of squared deviations from it, float64, of the same shape."""

    def __init__(self, space: gym.Space[Any], clip: float = 10.0, *, runs: int | None = None) -> None:
        """Start without statistics.

        Args:
            space: of a single observation.
            clip: bound on the magnitude of normalised numbers.
            runs: number of stacked runs R.

        Raises:
            ConfigError: no part of the observation is a vector of floats.
        """
        super().__init__()
        self._space = space
        self.clip = clip
        self.entries = vectors_of(space)
        """Shape of each vector and its place among the F numbers, by key; None is the key of an observation without."""
        if not self.entries:
            found = " ".join(str(space).split())
            raise ConfigError(
                f"observation.normalize is true, but the observation space is {found}: only vectors of floats are "
                "normalised, and the networks scale images of bytes; set it to false"
            )
        size = max(place.stop for _, place in self.entries.values())
        lead = () if runs is None else (runs,)
        self.register_buffer("count", torch.zeros((*lead, 1) if lead else (), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(*lead, size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(*lead, size, dtype=torch.float64))

    def empty(self, runs: int | None = None) -> ObservationNormalizer:
        """One for the same observations without statistics, of R stacked runs if ``runs`` is given."""
        return ObservationNormalizer(self._space, self.clip, runs=runs)

    def update(self, moments: Tensor, steps: int) -> None:
        """Add a rollout, together with those of the other workers.

        Args:
            moments: (N, 2, F) mean and population variance of each environment's raw observations over its T steps.
            steps: T.
        """
        means, variances = moments.double().cpu().unbind(-2)
        mean = means.mean(-2)
        var = variances.mean(-2) + (means - mean.unsqueeze(-2)).square().mean(-2)
        self.add(*pooled_moments(mean, var, steps * means.shape[-2]))

    def add(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Add ``count`` observations of mean and population variance (F,), or (R, F), float64."""
        running = RunningMoments()
        running.weight, running.mean, running.squares = self.count.cpu(), self.mean.cpu(), self.squares.cpu()
        running.add(mean, var, count)
        for buffer, value in ((self.count, running.weight), (self.mean, running.mean), (self.squares, running.squares)):
            buffer.copy_(value)

    def shift_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean, and 1 over the standard deviation, float32 (F,), or (R, 1, F); 0 and 1 without statistics."""
        count, mean, squares = (buffer.cpu().numpy() for buffer in (self.count, self.mean, self.squares))
        scale = np.where(count > 0, 1 / np.sqrt(squares / np.maximum(count, 1) + _EPSILON), 1.0)
        shape = mean.shape if mean.ndim == 1 else (len(mean), 1, mean.shape[-1])
        return mean.astype(np.float32).reshape(shape), scale.astype(np.float32).reshape(shape)

    def normalize(self, observation: EnvObservation) -> EnvObservation:
        """Normalise observations (B, ...) by the present statistics; without any they stay as they are."""
        return _Shift(self)(observation)

    def forward(self, observation: Observation) -> Observation:
        """:meth:`normalize` of tensors, for exporting a policy; without gradients."""
        scale = torch.where(self.count > 0, 1 / (self.squares / self.count.clamp(min=1) + _EPSILON).sqrt(), 1.0)
        shift, scale = (x.float() if x.dim() == 1 else x.float().unsqueeze(-2) for x in (self.mean, scale))
        return self._shifted(shift, scale, observation)

    def at_present(self, device: torch.device) -> Callable[[Observation], Observation]:
        """:meth:`normalize` as a function of tensors on ``device``, which keeps the present statistics."""
        shift, scale = (torch.from_numpy(x).to(device) for x in self.shift_and_scale())
        return functools.partial(self._shifted, shift, scale)

    def with_moments(self, mean: Tensor, var: Tensor) -> Callable[[Observation], Observation]:
        """The function that normalises by a mean and a variance (F,), float64."""
        return functools.partial(self._shifted, mean.float(), (var + _EPSILON).rsqrt().float())

    def vectors(self, observation: Observation) -> Tensor:
        """The numbers of observations (B, ...) that are normalised, (B, F)."""
        if not isinstance(observation, dict):
            return observation.reshape(len(observation), -1)
        entries = [observation[str(key)] for key in self.entries]
        return torch.cat([x.reshape(len(x), -1) for x in entries], dim=-1)

    def _shifted(self, shift: Tensor, scale: Tensor, observation: Observation) -> Observation:
        def one(x: Tensor, shape: tuple[int, ...], place: slice) -> Tensor:
            vectors = x.reshape(*x.shape[: x.dim() - len(shape)], -1)
            return ((vectors - shift[..., place]) * scale[..., place]).clamp(-self.clip, self.clip).view(x.shape)

        if not isinstance(observation, dict):
            return one(observation, *self.entries[None])
        entries = self.entries
        return {key: one(x, *entries[key]) if key in entries else x for key, x in observation.items()}


class _Shift:
    """The function of an :class:`ObservationNormalizer` with its statistics as they were when this was made."""

    def __init__(self, normalizer: ObservationNormalizer) -> None:
        shift, scale = normalizer.shift_and_scale()
        self._low, self._high = np.array(-normalizer.clip, np.float32), np.array(normalizer.clip, np.float32)
        self._numbers = {
            key: (shape, shift[..., place], scale[..., place]) for key, (shape, place) in normalizer.entries.items()
        }

    def __call__(self, observation: EnvObservation) -> EnvObservation:
        numbers = self._numbers
        if not isinstance(observation, dict):
            return self._one(observation, *numbers[None])
        return {key: self._one(x, *numbers[key]) if key in numbers else x for key, x in observation.items()}

    def _one(self, array: np.ndarray, shape: tuple[int, ...], shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
        x = flat(array, shape) - shift
        np.multiply(x, scale, out=x)
        np.minimum(x, self._high, out=x)
        np.maximum(x, self._low, out=x)
        return x if len(shape) == 1 else x.reshape(array.shape)


class RolloutNormalizer(Protocol):
    """Normalises the observations of one rollout."""

    def step(self, t: int, observation: EnvObservation) -> EnvObservation:
        """Normalise the observations (N, ...) of step ``t``, and count them."""

    def __call__(self, observation: EnvObservation) -> EnvObservation:
        """Normalise further observations (B, ...), such as the last ones of episodes, without counting them."""

    def moments(self) -> Tensor | None:
        """Mean and population variance of each environment's counted observations, float64 (N, 2, F)."""


def rollout_normalizer(normalizer: ObservationNormalizer | None, steps: int, num_envs: int) -> RolloutNormalizer:
    """For a rollout of T steps and N environments, which is not normalised without a ``normalizer``."""
    return Unchanged() if normalizer is None else _Normalizing(normalizer, steps, num_envs)


class Unchanged:
    """A :class:`RolloutNormalizer` that leaves observations as they are."""

    def step(self, t: int, observation: EnvObservation) -> EnvObservation:
        return observation

    def __call__(self, observation: EnvObservation) -> EnvObservation:
        return observation

    def moments(self) -> None:
        return None


class _Normalizing:
    """Statistics do not change during a rollout, except before the first update, when there are none yet.

    Then they are those of the rollout's own observations up to the present step, of this worker.
    """

    def __init__(self, normalizer: ObservationNormalizer, steps: int, num_envs: int) -> None:
        mean = normalizer.mean
        self._entries = normalizer.entries
        self._raw = np.empty((steps, *mean.shape[:-1], num_envs, mean.shape[-1]), dtype=np.float32)
        self._shift = _Shift(normalizer)
        started = bool((normalizer.count > 0).all())
        self._first = None if started else normalizer.empty(len(mean) if mean.dim() > 1 else None)

    def step(self, t: int, observation: EnvObservation) -> EnvObservation:
        raw = self._raw[t]
        if not isinstance(observation, dict):
            raw[...] = flat(observation, self._entries[None][0])
        else:
            for key, (shape, place) in self._entries.items():
                raw[..., place] = flat(observation[str(key)], shape)
        if self._first is not None:
            observations = torch.from_numpy(raw).double()
            mean, var = observations.mean(-2), observations.var(-2, correction=0)
            self._first.add(mean, var, torch.tensor(float(raw.shape[-2]), dtype=torch.float64))
            self._shift = _Shift(self._first)
        return self._shift(observation)

    def __call__(self, observation: EnvObservation) -> EnvObservation:
        return self._shift(observation)

    def moments(self) -> Tensor:
        mean = self._raw.mean(0, dtype=np.float64)
        deviation = self._raw - mean.astype(np.float32)
        squares = np.einsum("t...,t...->...", deviation, deviation, dtype=np.float64) / len(deviation)
        var = np.maximum(squares - deviation.mean(0, dtype=np.float64) ** 2, 0)
        return torch.from_numpy(np.stack([mean, var], axis=-2))


def flat(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Observations (..., *shape) as vectors (..., F)."""
    return array if len(shape) == 1 else array.reshape(*array.shape[: array.ndim - len(shape)], -1)


def vectors_of(space: gym.Space[Any]) -> dict[str | None, tuple[tuple[int, ...], slice]]:
    """Shape of each entry that is normalised, floats that are no image, and its place among all features."""
    spaces = space.spaces if isinstance(space, gym.spaces.Dict) else {None: space}
    entries: dict[str | None, tuple[tuple[int, ...], slice]] = {}
    start = 0
    for key, entry in spaces.items():
        if isinstance(entry, gym.spaces.Box) and entry.dtype.kind == "f" and image_layout(entry) is None:
            shape = tuple(entry.shape)
            entries[key] = (shape, slice(start, start + int(np.prod(shape))))
            start = entries[key][1].stop
    return entries
