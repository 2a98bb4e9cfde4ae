"""Meaning of ``env.action_mask``, and the space of a mask among converted observations; without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from gymnasium import spaces

MASK_KEY = "action_mask"
"""Key of a mask that ``auto`` looks for, and the one that ``info`` stands for."""
OBSERVATION_KEY = "observation"
"""Key of an observation that is no Dict, beside its mask."""


class ActionMask(spaces.MultiBinary):
    """Legal actions, int8 (n,): 1 for a legal one; of a MultiDiscrete the blocks of its parts, one after the other.

    An entry of this type in a Dict of converted observations masks the policy. It is no input of the networks.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: choices of each part of an action; one number for a Discrete."""
        self.sizes = tuple(sizes)
        super().__init__(sum(self.sizes))


def info_key(setting: str) -> str | None:
    """The key of ``info`` that ``env.action_mask`` names by ``info`` or ``info:KEY``; None if it names none."""
    if setting == "info":
        return MASK_KEY
    return setting.removeprefix("info:") if setting.startswith("info:") else None
