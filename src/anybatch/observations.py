"""Observations: one tensor or array, or a flat dictionary of them, with the same leading axes; and their sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sequences:
    """Inputs of recurrent networks: K pieces of L successive steps, flattened to B = K*L."""

    observation: Observation
    """(B, ...), piece after piece."""
    first: torch.Tensor
    """(B,) bool, the step is the first of its episode, before which the state is zero."""
    state: torch.Tensor
    """(B, S) state before each step; only that before the first step of a piece is used."""
    steps: int
    """L."""

    @property
    def device(self) -> torch.device:
        """Device of the observations."""
        return leaves(self.observation)[0].device


Inputs: TypeAlias = Observation | Sequences
"""Inputs of networks: observations, in sequences if the networks are recurrent."""
