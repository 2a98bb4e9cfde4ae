"""Observations: one tensor, or a flat dictionary of tensors, with the same leading axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Observation: TypeAlias = torch.Tensor | dict[str, torch.Tensor]
"""One tensor (B, ...), or one such tensor for each key of a dictionary observation."""


def map_observation(fn: Callable[[torch.Tensor], torch.Tensor], observation: Observation) -> Observation:
    """Apply `fn` to the tensor, or to each tensor of a dictionary; the structure stays."""
    if isinstance(observation, dict):
        return {key: fn(value) for key, value in observation.items()}
    return fn(observation)


def first_leaf(observation: Observation) -> torch.Tensor:
    """The tensor itself, or the first one of a dictionary: enough to ask for the device or the leading axes."""
    return next(iter(observation.values())) if isinstance(observation, dict) else observation


def batch_size(observation: Observation) -> int:
    """Length B of the first axis."""
    return first_leaf(observation).shape[0]
