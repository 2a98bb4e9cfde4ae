"""Environments that cost next to nothing, with the spaces of real ones: what is left is the cost of the library."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

_FRAMES = 64
_EPISODE = 250.0  # mean length, in steps


class _Synthetic(gymnasium.vector.VectorEnv):
    """Random frames, rewards and ends of episodes, drawn once and handed out in turn."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    render_mode = None

    def __init__(self, num_envs: int, observation: gymnasium.spaces.Box, action: gymnasium.spaces.Discrete) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = observation, action
        self.observation_space = gymnasium.vector.utils.batch_space(observation, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(action, num_envs)
        random = np.random.default_rng(0)
        shape = (_FRAMES + num_envs, *observation.shape)
        self._frames = (
            random.integers(0, 256, shape, dtype=np.uint8)
            if observation.dtype == np.uint8
            else random.standard_normal(shape, dtype=np.float32)
        )
        self._rewards = (random.random((_FRAMES, num_envs)) < 0.1).astype(np.float32)
        self._done = random.random((_FRAMES, num_envs)) < 1 / _EPISODE
        self._never = np.zeros(num_envs, dtype=bool)
        self._t = 0

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """The first frames."""
        return self._frames[: self.num_envs], {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """The next frames; what was done does not matter."""
        self._t = t = (self._t + 1) % _FRAMES
        return self._frames[t : t + self.num_envs], self._rewards[t], self._done[t], self._never, {}


def procgen_like(num_envs: int) -> gymnasium.vector.VectorEnv:
    """Procgen's spaces: 64x64 RGB frames and 15 actions."""
    return _Synthetic(num_envs, gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8), gymnasium.spaces.Discrete(15))


def cartpole_like(num_envs: int) -> gymnasium.vector.VectorEnv:
    """CartPole's spaces: 4 numbers and 2 actions."""
    return _Synthetic(num_envs, gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32), gymnasium.spaces.Discrete(2))
