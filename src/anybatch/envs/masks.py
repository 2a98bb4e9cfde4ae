"""Masks of illegal actions: an entry of a Dict observation, or of ``info``, which then becomes such an entry."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from anybatch.config.masks import MASK_KEY, OBSERVATION_KEY, info_key
from anybatch.errors import ConfigError, EnvError, shown


@dataclass(frozen=True)
class MaskEntry:
    """The entry of a Dict observation that holds the mask."""

    key: str
    sizes: tuple[int, ...]
    """Choices of each part of an action; one number for a Discrete."""


def mask_entry(
    setting: str, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], env_id: str
) -> MaskEntry | None:
    """The mask that ``env.action_mask`` names; None for none.

    ``observation_space`` is the native one, that of :class:`InfoMask` if the mask comes from ``info``.

    Raises:
        ConfigError: it names an entry that does not exist, or the actions are of another kind.
        EnvError: the entry is no mask of the actions.
    """
    key = info_key(setting) or (MASK_KEY if setting == "auto" else setting)
    entries = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {}
    sizes = _sizes(action_space)
    if setting == "none" or (setting == "auto" and (sizes is None or key not in entries)):
        return None
    if sizes is None:
        raise ConfigError(
            f"env.action_mask is {setting!r}, but only Discrete and MultiDiscrete actions can be masked, while "
            f"the action space of {env_id} is a {type(action_space).__name__}; set it to none"
        )
    if key not in entries:
        has = f"only {', '.join(map(str, entries))}" if entries else "no Dict"
        raise ConfigError(
            f"env.action_mask is {setting!r}, but the observation of {env_id} is {has}: give the key of an entry of a "
            "Dict observation, info for info['action_mask'], info:KEY, or none"
        )
    entry = entries[key]
    if not isinstance(entry, spaces.Box | spaces.MultiBinary) or int(np.prod(entry.shape)) != sum(sizes):
        raise EnvError(
            f"The observation of {env_id} has an entry {key!r} with the space {entry}, but a mask of its actions must "
            f"have {sum(sizes)} numbers, 1 for a legal action and 0 for an illegal one; env.action_mask none makes it "
            "an ordinary entry."
        )
    return MaskEntry(key, sizes)


class InfoMask:
    """Moves a mask from ``info`` into the observation; one that is no Dict becomes the entry ``observation`` of one.

    Raises ConfigError if the observation has an entry of this name already.
    """

    def __init__(self, key: str, observation_space: gymnasium.Space[Any], sizes: tuple[int, ...], env_id: str) -> None:
        self._key, self._size, self._env_id = key, sum(sizes), env_id
        self._is_dict = isinstance(observation_space, spaces.Dict)
        before = observation_space.spaces if isinstance(observation_space, spaces.Dict) else None
        if key in (before if before is not None else (OBSERVATION_KEY,)):
            raise ConfigError(
                f"env.action_mask names {key!r} in info, but the observation of {env_id} has an entry of that name; "
                f"set env.action_mask {key}"
            )
        entries: dict[str, Any] = {OBSERVATION_KEY: observation_space} if before is None else dict(before)
        self.space = spaces.Dict({**entries, key: spaces.MultiBinary(self._size)})
        """Of an observation with its mask."""

    @classmethod
    def of(
        cls, setting: str, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], env_id: str
    ) -> InfoMask | None:
        """For the mask of ``info`` that ``env.action_mask`` names; None if it names none."""
        key, sizes = info_key(setting), _sizes(action_space)
        # mask_entry refuses other actions
        return None if key is None or sizes is None else cls(key, observation_space, sizes, env_id)

    def join(self, raw: Any, info: Mapping[str, Any], index: int) -> dict[Any, Any]:
        """The observation with the mask of its ``info``; ``index`` is the environment's number."""
        return self._joined(raw, self._mask(info, index))

    def join_final(self, raw: Any) -> dict[Any, Any]:
        """The last observation of an episode, after which nothing is chosen: its info need not have a mask."""
        return self._joined(raw, np.ones(self._size, np.int8))

    def masks(self, infos: Mapping[str, Any], rows: np.ndarray, into: np.ndarray) -> None:
        """Write the masks of some ``rows`` (K,) of a vector environment's infos into ``into`` (N, n)."""
        for row in rows.tolist():
            into[row] = self._mask({self._key: infos[self._key][row]} if self._key in infos else {}, row)

    def join_batch(self, raw: Any, masks: np.ndarray) -> dict[Any, Any]:
        """Observations (N, ...) with masks (N, n)."""
        return self._joined(raw, masks)

    @property
    def size(self) -> int:
        """Number n of all choices."""
        return self._size

    def _mask(self, info: Mapping[str, Any], index: int) -> np.ndarray:
        if self._key not in info:
            raise EnvError(
                f"The info of environment {index} of {self._env_id} has no {self._key!r}, which env.action_mask names: "
                "reset and step must return it."
            )
        return self._flat(info[self._key], index)

    def _flat(self, value: Any, index: int) -> np.ndarray:
        parts = value if isinstance(value, tuple | list) else [value]
        mask = np.concatenate([np.ravel(part) for part in parts]) if len(parts) else np.zeros(0)
        if mask.size != self._size or mask.dtype.kind not in "biuf":
            raise EnvError(
                f"The mask in the info of environment {index} of {self._env_id} is {shown(value)}, but must be "
                f"{self._size} numbers, 1 for a legal action and 0 for an illegal one."
            )
        return mask

    def _joined(self, raw: Any, mask: np.ndarray) -> dict[Any, Any]:
        entries = dict(raw) if self._is_dict else {OBSERVATION_KEY: raw}
        return {**entries, self._key: mask}


def warn_about_unused_mask(
    setting: str, entry: MaskEntry | None, info: Mapping[str, Any], action_space: gymnasium.Space[Any], env_id: str
) -> None:
    """Warn if ``info`` has a mask that ``auto`` ignores, since the spaces do not show it."""
    if setting == "auto" and entry is None and MASK_KEY in info and _sizes(action_space) is not None:
        warnings.warn(
            f"{env_id} returns {MASK_KEY!r} in info, which is not used: set env.action_mask to info to train with it, "
            "or to none to ignore it",
            stacklevel=2,
        )


def _sizes(action_space: gymnasium.Space[Any]) -> tuple[int, ...] | None:
    if isinstance(action_space, spaces.Discrete):
        return (int(action_space.n),)
    if isinstance(action_space, spaces.MultiDiscrete):
        return tuple(int(size) for size in action_space.nvec.reshape(-1))
    return None
