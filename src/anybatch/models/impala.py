"""The IMPALA convolutional network, the encoder of all the paper's Procgen experiments."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.models.images import image_shape, onednn_bf16, to_nchw
from anybatch.models.layers import normalized_conv, normalized_linear, positive_integer

_STACK_CHANNELS = (16, 32, 32)
_DENSE_NORM = 1.4


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, norm: float) -> None:
        super().__init__()
        self.first = normalized_conv(channels, channels, norm)
        self.second = normalized_conv(channels, channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.second(functional.relu(self.first(functional.relu(x))))
        return x + inner


class _Stack(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, blocks: int, residual_norm: float) -> None:
        super().__init__()
        self.conv = normalized_conv(in_channels, out_channels, norm=1.0)
        self.blocks = nn.Sequential(*[_ResidualBlock(out_channels, residual_norm) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.max_pool2d(self.conv(x), kernel_size=3, stride=2, padding=1)
        features: Tensor = self.blocks(pooled)
        return features


class ImpalaEncoder(nn.Module):
    """Three stacks of a convolution, a max-pool and residual blocks, then a dense layer: images to (B, F).

    `width` multiplies the channels 16, 32, 32, which `channels` replaces by one number for all stacks; `blocks` is the
    number of residual blocks in a stack, and `out_features` the size F of the dense layer. Weights start with a fixed
    norm per output unit (first convolution of a stack 1, residual convolutions sqrt(1/sqrt(stacks)/sqrt(blocks)), dense
    1.4), biases at 0, as in the published code. Images are HWC, CHW or HW, or stacks of them with the stack first,
    whose channels are concatenated; uint8 is divided by 255.

    Raises ConfigError if the observation space holds no images.
    """

    low_precision = True
    """May run in bfloat16."""
    recordable = True
    """Its operations depend on shapes alone."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        *,
        width: int = 1,
        channels: int | None = None,
        blocks: int = 2,
        out_features: int = 256,
    ) -> None:
        super().__init__()
        width, blocks = positive_integer("width", width), positive_integer("blocks", blocks)
        of_stacks = _STACK_CHANNELS if channels is None else (positive_integer("channels", channels),) * 3
        self.out_features = positive_integer("out_features", out_features)
        self._layout, depth, height, width_px = image_shape("impala", observation_space)
        residual_norm = math.sqrt(1 / math.sqrt(len(of_stacks)) / math.sqrt(blocks))
        stacks = []
        for number in of_stacks:
            stacks.append(_Stack(depth, width * number, blocks, residual_norm))
            depth, height, width_px = width * number, (height + 1) // 2, (width_px + 1) // 2
        self.stacks = nn.Sequential(*stacks)
        self.dense = normalized_linear(depth * height * width_px, self.out_features, _DENSE_NORM)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, F), at least 0, of images (B, ...)."""
        x = to_nchw(images, self._layout)
        if onednn_bf16(x):
            features = functional.relu(self.stacks(x.bfloat16().to_mkldnn())).to_dense()
        else:
            features = functional.relu(self.stacks(x))
        return functional.relu(self.dense(features.flatten(1)))
