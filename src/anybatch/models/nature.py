"""The small convolutional network of the DQN paper in Nature, for images where IMPALA is too slow."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from anybatch.errors import ConfigError
from anybatch.models.images import image_shape, to_nchw
from anybatch.models.layers import positive_integer

_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, kernel, stride
_SMALLEST = 36


class NatureEncoder(nn.Module):
    """Three convolutions (8/4, 4/2, 3/1) and a dense layer, with relu: images to (B, F). Orthogonal initialisation.

    `out_features` is the size F of the dense layer. Images are HWC, CHW or HW, or
    stacks of them with the stack first, whose channels are concatenated; uint8 is divided by 255.

    Raises ConfigError if the observation space holds no images, or images under 36 pixels.
    """

    low_precision = True
    """May run in bfloat16."""
    recordable = True
    """Its operations depend on shapes alone."""

    def __init__(self, observation_space: gym.Space[Any], *, out_features: int = 512) -> None:
        super().__init__()
        self.out_features = positive_integer("out_features", out_features)
        self._layout, in_channels, height, width = image_shape("nature", observation_space)
        if min(height, width) < _SMALLEST:
            raise ConfigError(
                f"model.encoder is nature, which needs images of at least {_SMALLEST} x {_SMALLEST} pixels, "
                f"but these are {height} x {width}; use impala or mlp."
            )
        modules: list[nn.Module] = []
        for channels, kernel, stride in _LAYERS:
            modules += [nn.Conv2d(in_channels, channels, kernel, stride), nn.ReLU()]
            in_channels, height, width = channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        modules += [nn.Flatten(), nn.Linear(in_channels * height * width, self.out_features), nn.ReLU()]
        for module in modules:
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        self.layers = nn.Sequential(*modules)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, F), at least 0, of images (B, ...)."""
        features: Tensor = self.layers(to_nchw(images, self._layout))
        return features
