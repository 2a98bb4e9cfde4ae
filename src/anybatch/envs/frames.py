"""Stacks of the last images of an episode, for any family of environments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from anybatch.envs.base import Observation, Steps, VectorEnv
from anybatch.envs.masks import mask_entry
from anybatch.envs.spaces import Observations
from anybatch.errors import ConfigError


class FrameStack:
    """A vector environment whose images are stacks of the last ``frames``, oldest first; see :class:`VectorEnv`.

    Images (H, W), (H, W, C) or (C, H, W) become (frames, ...), which the convolutional encoders take. The first stack
    of an episode repeats its first image. Entries of a Dict that are no images stay as they are.
    """

    def __init__(self, env: VectorEnv, frames: int, env_id: str, action_mask: str) -> None:
        """Stack the images of ``env``.

        Raises:
            ConfigError: it has none, or one has not more rows and columns than there are frames.
        """
        self.num_envs = env.num_envs
        self.bootstrap_truncated = env.bootstrap_truncated
        self.takes_one_seed = getattr(env, "takes_one_seed", False)
        self._env, self._frames = env, frames
        observation_space, action_space = env.native_spaces
        mask = mask_entry(action_mask, observation_space, action_space, env_id)
        native = _stacked(observation_space, frames, None if mask is None else mask.key)
        self.native_spaces = native, action_space
        self.observation_space: gymnasium.Space[Any] = Observations(native, env_id, mask).space
        self.action_space = env.action_space
        before, after = (_entries(space) for space in (env.observation_space, self.observation_space))
        self._images = [key for key, space in after.items() if space.shape != before[key].shape]
        for key in self._images:
            _check_size(before[key].shape or (), frames, env_id)
        if not self._images:
            words = " ".join(str(observation_space).split())
            raise ConfigError(
                f"env.frame_stack is {frames}, but the observation of {env_id} has no image to stack: it is {words}; "
                "set it to 1"
            )
        self._stacks: dict[Any, np.ndarray] = {}

    def reset(self) -> Observation:
        observation = self._env.reset()
        images = _arrays(observation)
        self._stacks = {key: self._repeated(images[key]) for key in self._images}
        return self._with(observation, self._stacks)

    def step(self, action: np.ndarray) -> Steps:
        steps = self._env.step(action)
        images = _arrays(steps.observation)
        final, last = steps.final_observation, None
        if final is not None:
            finals, index = _arrays(final), steps.final_index
            stacks = {key: self._pushed(self._stacks[key][index], finals[key]) for key in self._images}
            last = self._with(final, stacks)
        new = steps.done
        for key in self._images:
            self._stacks[key] = self._pushed(self._stacks[key], images[key])
            self._stacks[key][new] = self._repeated(images[key][new])
        observation = self._with(steps.observation, self._stacks)
        return replace(steps, observation=observation, final_observation=last)

    def save_state(self) -> dict[str, Any] | None:
        """The state of the environments with the present stacks; None if that of the environments cannot be saved."""
        inner = self._env.save_state()
        stacks = [torch.from_numpy(self._stacks[key].copy()) for key in self._images if self._stacks]
        return None if inner is None else {"inner": inner, "stacks": stacks}

    def load_state(self, state: dict[str, Any]) -> None:
        self._env.load_state(state["inner"])
        self._stacks = {key: stack.numpy().copy() for key, stack in zip(self._images, state["stacks"], strict=True)}

    def render(self) -> np.ndarray:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _repeated(self, images: np.ndarray) -> np.ndarray:
        return np.repeat(images[:, None], self._frames, axis=1)

    @staticmethod
    def _pushed(stacks: np.ndarray, images: np.ndarray) -> np.ndarray:
        return np.concatenate([stacks[:, 1:], images[:, None]], axis=1)

    @staticmethod
    def _with(observation: Observation, stacks: dict[Any, np.ndarray]) -> Observation:
        return {**observation, **stacks} if isinstance(observation, dict) else stacks[None]


def _stacked(space: gymnasium.Space[Any], frames: int, mask: Any) -> Any:
    """The space with stacks in place of its images; ``mask`` is a key of a Dict to leave alone."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(k, x if k == mask else _stacked(x, frames, None)) for k, x in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_stacked(x, frames, None) for x in space.spaces])
    is_image = isinstance(space, spaces.Box) and (
        len(space.shape) == 3 or (len(space.shape) == 2 and space.dtype == np.uint8)
    )
    if not is_image:
        return space
    assert isinstance(space, spaces.Box)
    low, high = (np.repeat(bound[None], frames, axis=0) for bound in (space.low, space.high))
    return spaces.Box(low, high, dtype=space.dtype.type)


def _check_size(shape: tuple[int, ...], frames: int, env_id: str) -> None:
    """Raise ConfigError for images whose stack encoders would take for an image with other axes."""
    least = max(frames, 4)  # an axis of up to 4 can be the channels
    if sorted(shape)[-2] <= least:
        raise ConfigError(
            f"env.frame_stack is {frames}, but the images of {env_id} have shape {shape}: to be recognised in a stack, "
            f"height and width must be above {least}"
        )


def _entries(space: gymnasium.Space[Any]) -> dict[Any, gymnasium.Space[Any]]:
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {None: space}


def _arrays(observation: Observation) -> dict[Any, np.ndarray]:
    return observation if isinstance(observation, dict) else {None: observation}
