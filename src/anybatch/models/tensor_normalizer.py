"""Normalisation of one rollout's observations on their device, for environments of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anybatch.models.normalizer import ObservationNormalizer
from anybatch.normalize import RunningMoments
from anybatch.observations import Observation


class TensorNormalizing:
    """:func:`anybatch.models.normalizer.rollout_normalizer` for tensors: the same numbers, on their device."""

    def __init__(self, normalizer: ObservationNormalizer, device: torch.device) -> None:
        """Take the present statistics of ``normalizer``.

        Before the first update there are none; then they are those of the rollout's own observations so far.
        """
        self._normalizer = normalizer
        self._scaled: Callable[[Observation], Observation] = normalizer.at_present(device)
        self._each = RunningMoments()  # of each environment, (N, F)
        self._first = None if bool(normalizer.count > 0) else RunningMoments()

    def step(self, t: int, observation: Observation) -> Observation:
        """Normalise the observations (N, ...) of step ``t``, and count them."""
        raw = self._normalizer.vectors(observation).double()
        one = torch.ones((), dtype=torch.float64)
        self._each.add(raw, torch.zeros_like(raw), one)
        if self._first is not None:
            self._first.add(raw.mean(0), raw.var(0, correction=0), one * len(raw))
            self._scaled = self._normalizer.with_moments(self._first.mean, self._first.var)
        return self._scaled(observation)

    def __call__(self, observation: Observation) -> Observation:
        """Normalise further observations (B, ...) without counting them."""
        return self._scaled(observation)

    def moments(self) -> Tensor:
        """Mean and population variance of each environment's counted observations, float64 (N, 2, F)."""
        return torch.stack([self._each.mean, self._each.var], dim=-2)
