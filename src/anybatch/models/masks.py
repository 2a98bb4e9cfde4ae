"""Masks of illegal actions: the entry of an observation that rules out choices of the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from torch import Tensor

from anybatch.config.masks import OBSERVATION_KEY, ActionMask
from anybatch.errors import EnvError
from anybatch.observations import Sequences

ILLEGAL = -1e9
"""Logit of an illegal action. Its probability is exactly 0 in float32, so that it adds nothing to log-probabilities of
legal actions, entropies, KL divergences and their gradients; minus infinity would make NaN of some."""


@dataclass(frozen=True)
class Masking:
    """Separates the mask from the rest of a Dict observation, and applies it to the policy's logits.

    The masked logits are what is recorded as the behaviour policy's parameters. Every other policy (recent, EWMA, the
    old one of PPG) applies the same mask, which is stored with the observation.
    """

    key: str
    alone: bool
    """Whether the rest is the single entry ``observation``, which the encoder then takes as it is."""

    @classmethod
    def of(cls, space: gym.Space[Any]) -> Masking | None:
        """For converted observations of ``space``; None if they have no mask.

        Raises EnvError if they are nothing else.
        """
        if not isinstance(space, gym.spaces.Dict):
            return None
        key = next((key for key, entry in space.spaces.items() if isinstance(entry, ActionMask)), None)
        if key is None:
            return None
        rest = [name for name in space.spaces if name != key]
        if not rest:
            raise EnvError(f"The observation contains only the mask {key!r}, but the networks need another entry.")
        return cls(key, rest == [OBSERVATION_KEY])

    def encoder_space(self, space: gym.Space[Any]) -> gym.Space[Any]:
        """The space of the encoder's input."""
        assert isinstance(space, gym.spaces.Dict)
        rest = gym.spaces.Dict({key: entry for key, entry in space.spaces.items() if key != self.key})
        return rest[OBSERVATION_KEY] if self.alone else rest

    def rest(self, observation: Any) -> Any:
        """The observations (B, ...) without the mask, as the encoder takes them; tensors or arrays."""
        if isinstance(observation, Sequences):
            return replace(observation, observation=self.rest(observation.observation))
        if self.alone:
            return observation[OBSERVATION_KEY]
        return {key: value for key, value in observation.items() if key != self.key}

    def apply(self, params: Tensor, observation: Any) -> Tensor:
        """Logits (..., P) in which those of illegal actions are :data:`ILLEGAL`."""
        if isinstance(observation, Sequences):
            observation = observation.observation
        return params.masked_fill(observation[self.key] == 0, ILLEGAL)

    def apply_in_numpy(self, params: np.ndarray, observation: Any) -> np.ndarray:
        """:meth:`apply` on arrays."""
        return np.where(observation[self.key] == 0, np.float32(ILLEGAL), params)
