"""Recognition of image observations, and their conversion to the float NCHW tensors that convolutions take."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from anybatch.errors import ConfigError

Layout: TypeAlias = Literal["HWC", "CHW", "HW", "SHWC", "SCHW"]
"""Order of an image's axes; S counts the frames of a stack, whose channels are concatenated."""
_CHANNELS = (1, 3, 4)


def image_layout(space: gym.Space[Any]) -> Layout | None:
    """The layout of the images of an observation space; None if it holds no images.

    A three-dimensional Box is an image: the last axis holds the channels if it has length 1, 3 or 4, else the first if
    it has, else the shorter of the two. A two-dimensional uint8 Box is a grey image. A four-dimensional Box is a stack
    of frames, with the stack first, if height and width exceed the other two axes. Nothing else is an image.
    """
    if not isinstance(space, gym.spaces.Box):
        return None
    if len(space.shape) == 2:
        return "HW" if space.dtype == np.uint8 else None
    if len(space.shape) == 3:
        return _frame_layout(space.shape)
    if len(space.shape) == 4:
        frames, *frame = space.shape
        layout = _frame_layout(tuple(frame))
        channels, height, width = _channels_first(layout, tuple(frame))
        if min(height, width) > max(frames, channels):
            return "SHWC" if layout == "HWC" else "SCHW"
    return None


def _frame_layout(shape: tuple[int, ...]) -> Literal["HWC", "CHW"]:
    first, last = shape[0], shape[-1]
    return "HWC" if last in _CHANNELS or (first not in _CHANNELS and last <= first) else "CHW"


def _channels_first(layout: Literal["HWC", "CHW"], shape: tuple[int, ...]) -> tuple[int, int, int]:
    if layout == "HWC":
        return shape[2], shape[0], shape[1]
    return shape[0], shape[1], shape[2]


def image_shape(encoder: str, space: gym.Space[Any]) -> tuple[Layout, int, int, int]:
    """Layout, channels (of all frames), height and width of `space`'s images.

    Raises ConfigError, naming `encoder`, if it has none.
    """
    layout = image_layout(space)
    if layout is None or space.shape is None:
        raise ConfigError(
            f"model.encoder is {encoder}, which needs images, but the observation space is {space}; use mlp or auto."
        )
    if layout == "HW":
        return layout, 1, space.shape[0], space.shape[1]
    if layout == "HWC" or layout == "CHW":
        return layout, *_channels_first(layout, space.shape)
    channels, height, width = _channels_first("HWC" if layout == "SHWC" else "CHW", space.shape[1:])
    return layout, space.shape[0] * channels, height, width


def to_nchw(images: Tensor, layout: Layout) -> Tensor:
    """Float images (B, C, H, W) from images (B, *layout); uint8 is divided by 255.

    HWC images become a view in PyTorch's channels_last memory format, without a copy. Under bfloat16 autocast uint8 is
    converted directly to bfloat16: 0 to 255 are exact there, and the quotient rounds as it would after float32, so the
    first convolution gets the same bits with less memory traffic. Everything else becomes float32.
    """
    if layout == "HWC":
        images = images.permute(0, 3, 1, 2)
    elif layout == "HW":
        images = images.unsqueeze(1)
    elif layout == "SHWC":
        images = images.permute(0, 1, 4, 2, 3).flatten(1, 2)
    elif layout == "SCHW":
        images = images.flatten(1, 2)
    if images.dtype != torch.uint8:
        return images.float()
    device = images.device.type
    halved = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
    return (images.bfloat16() if halved else images.float()) / 255


def onednn_bf16(images: Tensor) -> bool:
    """Whether convolutions should run on tensors in oneDNN's layout: on a CPU, under bfloat16 autocast.

    The arithmetic is the same, but max-pooling keeps a byte per output instead of a 64-bit index, and its backward
    pass does not fill the gradient with zeros first. With AVX512-BF16 the forward pass ran 1.36 times as fast, forward
    and backward together 1.16 times.
    """
    return (
        not torch.compiler.is_compiling()  # which does not support these tensors
        and images.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # elsewhere PyTorch uses a slower fallback
        and not torch._C._functorch.is_functorch_wrapped_tensor(images)
    )
