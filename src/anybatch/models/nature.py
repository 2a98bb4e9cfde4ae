"""The convolutional network of the DQN paper in Nature, for images where IMPALA is too slow, and one for few pixels."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from anybatch.errors import ConfigError
from anybatch.models.images import Layout, image_shape, to_nchw
from anybatch.models.layers import positive_integer

_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, kernel, stride
_SMALLEST = 36
KERNEL, STRIDE = 3, 2
"""Of :class:`SmallConvEncoder`."""


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


class SmallConvEncoder(nn.Module):
    """A 3x3 convolution with stride 2, and a dense layer of ``width`` units: images to (B, width), between -1 and 1.

    A Box of two axes is an image of one channel, whatever its dtype. With ``categories``, the numbers of uint8 images
    are names, such as the kinds of objects of MiniGrid: each channel becomes that many channels of zeros and ones, and
    is all zeros for numbers from ``categories`` on. Orthogonal initialisation with gain sqrt(2).

    Raises ConfigError if the observation space holds no images, or images under 3 pixels.
    """

    low_precision = False
    """Always runs in float32: it is too small to gain from bfloat16."""
    recordable = True
    """Its operations depend on shapes alone."""

    def __init__(
        self, observation_space: gym.Space[Any], *, channels: int = 8, width: int = 32, categories: int | None = None
    ) -> None:
        super().__init__()
        self._categories = None if categories is None else positive_integer("categories", categories)
        self.out_features = positive_integer("width", width)
        self._layout: Layout = "HW"
        if isinstance(observation_space, gym.spaces.Box) and len(observation_space.shape) == 2:
            in_channels, (height, width_in) = 1, observation_space.shape
        else:
            self._layout, in_channels, height, width_in = image_shape("small-conv", observation_space)
        if min(height, width_in) < KERNEL:
            raise ConfigError(
                f"model.encoder is small-conv, which needs images of at least {KERNEL} x {KERNEL} pixels, but these "
                f"are {height} x {width_in}; use mlp."
            )
        self.conv = nn.Conv2d(
            in_channels * (self._categories or 1), positive_integer("channels", channels), KERNEL, STRIDE
        )
        rows, columns = ((size - KERNEL) // STRIDE + 1 for size in (height, width_in))
        self.dense = nn.Linear(channels * rows * columns, width)
        for layer in (self.conv, self.dense):
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def images(self, observation: Tensor) -> Tensor:
        """Observations (B, ...) as float images (B, C, H, W)."""
        if self._categories is None:
            return to_nchw(observation, self._layout)
        numbers = to_nchw(observation.float(), self._layout).unsqueeze(2)
        names = torch.arange(self._categories, device=numbers.device).view(-1, 1, 1)
        return (numbers == names).float().flatten(1, 2)

    def forward(self, observation: Tensor) -> Tensor:
        """Features (B, width) of observations (B, ...)."""
        return torch.tanh(self.dense(torch.relu(self.conv(self.images(observation))).flatten(1)))
