"""Observations: one tensor or array, or a flat dictionary of them, with the same leading axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")

Observation: TypeAlias = torch.Tensor | dict[str, torch.Tensor]
"""One tensor (B, ...), or one such tensor for each key of a dictionary observation."""


def map_observation(fn: Callable[[A], B], observation: A | dict[str, A]) -> B | dict[str, B]:
    """Apply ``fn`` to the tensor or array, or to each one of a dictionary; the structure stays."""
    if isinstance(observation, dict):
        return {key: fn(value) for key, value in observation.items()}
    return fn(observation)


def leaves(observation: A | dict[str, A]) -> list[A]:
    """The tensor or array itself, or those of a dictionary in its order."""
    return list(observation.values()) if isinstance(observation, dict) else [observation]
