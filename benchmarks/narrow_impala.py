"""IMPALA with three narrow stacks of one residual block, for runs on a few CPU cores."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.models.images import image_shape, onednn_bf16, to_nchw
from anybatch.models.layers import normalized_conv, normalized_linear, positive_integer

_STACKS = 3
_DENSE_NORM = 1.4


class _Stack(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = normalized_conv(in_channels, out_channels, norm=1.0)
        residual_norm = math.sqrt(1 / math.sqrt(_STACKS))
        self.first = normalized_conv(out_channels, out_channels, residual_norm)
        self.second = normalized_conv(out_channels, out_channels, residual_norm)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.conv(x), kernel_size=3, stride=2, padding=1)
        inner: Tensor = self.second(functional.relu(self.first(functional.relu(x))))
        return x + inner


class NarrowImpala(nn.Module):
    """Images to (B, out_features): every stack has `channels` channels, and is initialised as in IMPALA here.

    IMPALA has 16, 32 and 32 channels and two residual blocks a stack. With 16 channels, which fill the vectors of
    AVX512-BF16, this network has about a third of its multiplications; with 8, 16 and 16 it was slower.
    """

    low_precision = True

    def __init__(self, observation_space: gym.Space[Any], *, channels: int = 16, out_features: int = 256) -> None:
        super().__init__()
        channels = positive_integer("channels", channels)
        self.out_features = positive_integer("out_features", out_features)
        self._layout, depth, height, width = image_shape("narrow_impala:NarrowImpala", observation_space)
        stacks = []
        for _ in range(_STACKS):
            stacks.append(_Stack(depth, channels))
            depth, height, width = channels, (height + 1) // 2, (width + 1) // 2
        self.stacks = nn.Sequential(*stacks)
        self.dense = normalized_linear(channels * height * width, self.out_features, _DENSE_NORM)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, out_features), at least 0, of images (B, ...)."""
        x = to_nchw(images, self._layout)
        if onednn_bf16(x):
            features = functional.relu(self.stacks(x.bfloat16().to_mkldnn())).to_dense()
        else:
            features = functional.relu(self.stacks(x))
        return functional.relu(self.dense(features.flatten(1)))
