"""A small dense network for observations that are not images."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.errors import EnvError
from anybatch.models.layers import ArrayFunction, dense_in_numpy, finite_number, positive_integer


class MlpEncoder(nn.Module):
    """`depth` dense tanh layers of `width` units: observations to (B, width). Orthogonal initialisation with a gain.

    A Box is flattened and cast to float32 (uint8 also divided by its largest bound), a Discrete or MultiDiscrete
    becomes one-hot, a MultiBinary zeros and ones.

    Raises EnvError for any other observation space.
    """

    low_precision = False
    """Always runs in float32: it is too small to gain from bfloat16, and its inputs may need the precision."""

    def __init__(
        self, observation_space: gym.Space[Any], *, width: int = 64, depth: int = 2, gain: float = math.sqrt(2)
    ) -> None:
        super().__init__()
        self.out_features = positive_integer("width", width)
        self._starts: tuple[int, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._scale = 1.0
        size = self._prepare(observation_space)
        self._dense: list[nn.Linear] = []
        for _ in range(positive_integer("depth", depth)):
            layer = nn.Linear(size, width)
            nn.init.orthogonal_(layer.weight, finite_number("gain", gain))
            nn.init.zeros_(layer.bias)
            self._dense.append(layer)
            size = width
        self.layers = nn.Sequential(*[module for layer in self._dense for module in (layer, nn.Tanh())])

    def _prepare(self, space: gym.Space[Any]) -> int:
        """Prepare the conversion of observations to vectors; returns their length."""
        if isinstance(space, gym.spaces.Discrete):
            self._starts, self._sizes = (int(space.start),), (int(space.n),)
            return int(space.n)
        if isinstance(space, gym.spaces.MultiDiscrete):
            self._starts = tuple(int(start) for start in space.start.reshape(-1))
            self._sizes = tuple(int(size) for size in space.nvec.reshape(-1))
            return sum(self._sizes)
        if isinstance(space, gym.spaces.Box) and space.dtype == np.uint8:
            self._scale = 1.0 / max(1.0, float(space.high.max()))
        elif not isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
            raise EnvError(
                f"Observation space {space} is not supported; supported are Box, Discrete, MultiDiscrete, MultiBinary "
                "and a Dict of those."
            )
        return int(np.prod(space.shape))

    def vectors(self, observation: Tensor) -> Tensor:
        """Observations (B, ...) as the float32 vectors (B, F) that the first layer takes."""
        x = observation.flatten(1) if observation.dim() > 1 else observation.unsqueeze(-1)
        if self._sizes:
            ranges = zip(x.unbind(-1), self._starts, self._sizes, strict=True)
            # A comparison, not functional.one_hot, which looks at the data and so does not run under vmap.
            hot = [c.unsqueeze(-1) == torch.arange(a, a + n, device=x.device) for c, a, n in ranges]
            x = torch.cat(hot, dim=-1)
        x = x.float()
        return x if self._scale == 1.0 else x * self._scale

    def forward(self, observation: Tensor) -> Tensor:
        """Features (B, width), between -1 and 1, of observations (B, ...)."""
        features = self.vectors(observation)
        for layer in self._dense:  # calling the modules would take longer than the arithmetic of a small batch
            features = torch.tanh(functional.linear(features, layer.weight, layer.bias))
        return features

    @property
    def recordable(self) -> bool:
        """Whether its operations depend on shapes alone, as they do unless a subclass overrides :meth:`vectors`."""
        return type(self).vectors is MlpEncoder.vectors

    def in_numpy(self) -> ArrayFunction | None:
        """:meth:`forward` on arrays, for acting on a CPU; see :mod:`anybatch.sampling.numpy_policy`.

        None in a subclass that overrides :meth:`vectors`.
        """
        if type(self).vectors is not MlpEncoder.vectors:
            return None
        layers = [dense_in_numpy(layer) for layer in self._dense]
        hot = [np.arange(start, start + size) for start, size in zip(self._starts, self._sizes, strict=True)]

        def forward(observation: np.ndarray) -> np.ndarray:
            x = observation.reshape(len(observation), -1)
            if hot:
                x = np.concatenate([x[:, i, None] == choices for i, choices in enumerate(hot)], axis=1)
            features = x.astype(np.float32, copy=False)
            if self._scale != 1.0:
                features = features * np.float32(self._scale)
            for layer in layers:
                features = np.tanh(layer(features))
            return features

        return forward
