"""A Gymnasium vector environment that somebody else made, whichever way it resets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from anybatch.envs.base import Observation, Steps
from anybatch.envs.spaces import Actions, Observations, check_reward, picture, take
from anybatch.errors import EnvError


class GymnasiumVector:
    """Wraps a `gymnasium.vector.VectorEnv`; see :class:`anybatch.envs.base.VectorEnv`.

    SAME_STEP ones are taken as they are, with the last observations from `infos["final_obs"]`. DISABLED ones, and
    Gymnasium's own Sync- and AsyncVectorEnv in NEXT_STEP, have their finished environments reset right after the step.
    Raises EnvError for one that offers no way to avoid rows without a transition.
    """

    bootstrap_truncated = True

    def __init__(self, env: gymnasium.vector.VectorEnv[Any, Any, Any], seeds: Sequence[int], *, env_id: str) -> None:
        """`seeds`: one for each of its environments."""
        self.num_envs = int(env.num_envs)
        self._env = env
        self._env_id = env_id
        self._same_step = _autoreset_mode(env, env_id) == AutoresetMode.SAME_STEP
        self._observations = Observations(env.single_observation_space, env_id)
        self._actions = Actions(env.single_action_space, env_id)
        self.observation_space: gymnasium.Space[Any] = self._observations.space
        self.action_space: gymnasium.Space[Any] = self._actions.space
        self._seeds: list[int] | None = list(seeds)
        self._last: Observation | None = None

    def reset(self) -> Observation:
        """Begin an episode everywhere."""
        raw, _ = self._env.reset(seed=self._seeds)  # type: ignore[arg-type]  # it does take lists
        self._seeds = None
        self._last = self._batch(raw)
        return self._last

    def step(self, action: np.ndarray) -> Steps:
        """Act everywhere; finished environments are reset before this returns."""
        raw, raw_reward, raw_terminated, raw_truncated, infos = self._env.step(
            self._actions.native(action, self.num_envs)
        )
        observation = self._batch(raw)
        reward = self._flags(raw_reward, np.float32, "rewards")
        terminated = self._flags(raw_terminated, np.bool_, "terminations")
        truncated = self._flags(raw_truncated, np.bool_, "truncations")
        check_reward(reward, self._env_id)
        final_index = np.flatnonzero(truncated & ~terminated)
        final: Observation | None = None
        if self._same_step:
            if len(final_index):
                final = self._final(infos, final_index)
        else:
            if len(final_index):
                final = take(observation, final_index)
            done = terminated | truncated
            if done.any():
                # Rows that are not reset come back as they were.
                observation = self._batch(self._env.reset(options={"reset_mask": done})[0])
        self._last = observation
        return Steps(observation, reward, terminated, truncated, final_index, final)

    def save_state(self) -> dict[str, Any] | None:
        """What the environment's own `get_state()` returns; None if it has none."""
        get_state = getattr(self._env, "get_state", None)
        if not callable(get_state) or not hasattr(self._env, "set_state"):
            return None
        return {"env": copy.deepcopy(get_state())}  # it is kept while the environment goes on

    def load_state(self, state: dict[str, Any]) -> None:
        """Hand the state to the environment's own `set_state(state)`."""
        if not hasattr(self._env, "set_state"):
            raise EnvError(f"The state of {self._env_id} cannot be restored: it has no set_state().")
        self._env.set_state(state["env"])
        self._seeds = None

    def render(self) -> np.ndarray:
        """The frame of environment 0, or its image observation where it draws none."""
        if self._env.render_mode == "rgb_array":
            frames = self._env.render()
            if frames is not None:
                return np.asarray(frames[0])
        return picture(self._last, self._env_id)

    def close(self) -> None:
        """Close the vector environment."""
        self._env.close()

    def _batch(self, raw: Any) -> Observation:
        observation = self._observations.batch(raw, self.num_envs, copy=True)  # its buffers may be reused
        self._observations.check_finite(observation)
        return observation

    def _flags(self, raw: Any, dtype: type[np.generic], what: str) -> np.ndarray:
        array = np.array(raw, dtype=dtype)
        if array.shape != (self.num_envs,):
            raise EnvError(f"The {what} of {self._env_id} have shape {array.shape}, not {(self.num_envs,)}.")
        return array

    def _final(self, infos: dict[str, Any], index: np.ndarray) -> Observation:
        stored = infos.get("final_obs")
        if stored is None:
            raise EnvError(
                f"{self._env_id} resets in the same step and does not report the last observation of a truncated "
                'episode in infos["final_obs"], without which its value cannot be bootstrapped.'
            )
        final = self._observations.empty(len(index))
        for row, env_index in enumerate(index.tolist()):
            # An array of observations, or for Dict spaces also one array for every key.
            one = {k: v[env_index] for k, v in stored.items()} if isinstance(stored, dict) else stored[env_index]
            self._observations.put(final, row, one, env_index)
        self._observations.check_finite(final, index)
        return final


def _autoreset_mode(env: gymnasium.vector.VectorEnv[Any, Any, Any], env_id: str) -> AutoresetMode:
    """How `env` resets; raises EnvError if it does not say, or in a way that leaves rows without a transition."""
    advice = (
        'make it reset in the same step (metadata["autoreset_mode"] = AutoresetMode.SAME_STEP and infos["final_obs"]), '
        'or not by itself (AutoresetMode.DISABLED, with reset(options={"reset_mask": ...}))'
    )
    try:
        mode = AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError as error:
        raise EnvError(f'{env_id} does not say how it resets in metadata["autoreset_mode"]: {advice}.') from error
    if mode == AutoresetMode.NEXT_STEP:
        base = env.unwrapped
        # Without shared memory an AsyncVectorEnv forgets to note the reset, and would reset once more.
        single = isinstance(base, SyncVectorEnv) or (isinstance(base, AsyncVectorEnv) and base.shared_memory)
        if not single:
            raise EnvError(
                f"{env_id} resets in the step after an episode's end, a row that is no transition: {advice}."
            )
    return mode
