"""N copies of a Gymnasium environment, stepped one after another in this process."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from anybatch.envs import snapshot
from anybatch.envs.base import EpisodeInfo, Observation, Steps
from anybatch.envs.contract import call_render, call_reset, spaces_of, step_one, user_code, warn_about_normalizers
from anybatch.envs.masks import InfoMask, mask_entry, warn_about_unused_mask
from anybatch.envs.spaces import Actions, Observations, check_reward, picture, same_observations, take
from anybatch.errors import EnvError, UserCodeError, shown

_NONE = np.empty(0, np.int64)


class GymnasiumLoop:
    """N Gymnasium environments; see :class:`anybatch.envs.base.VectorEnv`.

    At N = 1 it has half the overhead of Gymnasium's SyncVectorEnv (17 microseconds a step). Its state can be saved if
    :mod:`anybatch.envs.snapshot` can save the environments.
    """

    bootstrap_truncated = True
    episode_info: EpisodeInfo | None = None

    def __init__(
        self,
        make_env: Callable[[], gymnasium.Env[Any, Any]],
        seeds: Sequence[int],
        *,
        env_id: str,
        action_mask: str = "auto",
    ) -> None:
        """`seeds`: one for each of the N environments; `action_mask` is env.action_mask."""
        self.num_envs = num_envs = len(seeds)
        self._env_id = env_id
        self._envs: list[gymnasium.Env[Any, Any]] = []
        with contextlib.ExitStack() as undo:  # closes those that are made if a later one fails
            undo.callback(self.close)
            for _ in range(num_envs):
                self._envs.append(make_env())
            native = _common_spaces(self._envs, env_id)
            self._info_mask = InfoMask.of(action_mask, *native, env_id)
            self.native_spaces = (self._info_mask.space if self._info_mask else native[0], native[1])
            self._action_mask, self._mask = action_mask, mask_entry(action_mask, *self.native_spaces, env_id)
            self._observations = Observations(self.native_spaces[0], env_id, self._mask)
            self._actions = Actions(self.native_spaces[1], env_id)
            undo.pop_all()
        warn_about_normalizers(self._envs[0], env_id)
        self.observation_space: gymnasium.Space[Any] = self._observations.space
        self.action_space: gymnasium.Space[Any] = self._actions.space
        self._seeds: list[int] | list[None] = list(seeds)
        self._steps = 0
        self._last: Observation | None = None

    def reset(self) -> Observation:
        observation = self._observations.empty(self.num_envs)
        for index, env in enumerate(self._envs):
            self._observations.put(observation, index, self._first(env, index, seed=self._seeds[index]))
        self._seeds = [None] * self.num_envs  # later resets continue the random streams
        self._observations.check_finite(observation)
        self._observations.check_masks(observation)
        self._last = observation
        return observation

    def step(self, action: np.ndarray) -> Steps:
        """Act everywhere; finished environments are reset before this returns."""
        native = self._actions.native(action, self.num_envs)
        observation = self._observations.empty(self.num_envs)
        reward = np.empty(self.num_envs, np.float32)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        final: Observation | None = None
        index, self._steps, info_mask = 0, self._steps + 1, self._info_mask
        try:
            for index, env in enumerate(self._envs):
                raw, one_reward, ended, cut, info = step_one(env, native[index], self._env_id)
                reward[index] = one_reward if type(one_reward) is float else self._scalar(one_reward, index)
                if ended or cut:
                    terminated[index], truncated[index] = ended, cut
                    if self.episode_info is not None:
                        self.episode_info.take(info, index)
                    if not ended:
                        # Copied before the reset, which may reuse the environment's own array.
                        final = self._observations.empty(self.num_envs) if final is None else final
                        self._observations.put(final, index, info_mask.join_final(raw) if info_mask else raw)
                    raw = self._first(env, index)
                elif info_mask:
                    raw = info_mask.join(raw, info, index)
                self._observations.put(observation, index, raw)
        except UserCodeError as error:
            error.locate(f"environment {index}, step {self._steps}")
            raise
        check_reward(reward, self._env_id)
        self._observations.check_finite(observation)
        self._observations.check_masks(observation)
        self._last = observation
        final_index = _NONE
        if final is not None:
            final_index = np.flatnonzero(truncated & ~terminated)
            final = take(final, final_index)
            self._observations.check_finite(final, final_index)
        numbers = None if self.episode_info is None else self.episode_info.pop()
        return Steps(observation, reward, terminated, truncated, final_index, final, numbers)

    def save_state(self) -> dict[str, Any] | None:
        """The state of all environments, or None if one of them cannot be saved."""
        states = []
        for env in self._envs:
            with user_code(f"get_state of {self._env_id}"):
                state = snapshot.save(env)
            if state is None:
                return None
            states.append(state)
        return {"envs": states}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state; raises EnvError if it is of other environments, or of another number of them."""
        for env, one in zip(self._envs, snapshot.states_of(state, self.num_envs), strict=True):
            snapshot.load(env, one)
        self._seeds = [None] * self.num_envs

    def render(self) -> np.ndarray:
        """The frame of environment 0, or its image observation if it draws none."""
        if self._envs[0].render_mode == "rgb_array":
            frame = call_render(self._envs[0].render, self._env_id)
            if isinstance(frame, np.ndarray):
                return frame
        return picture(self._last, self._env_id)

    def close(self) -> None:
        failures: list[Exception] = []
        for env in reversed(self._envs):
            try:
                with user_code(f"close of {self._env_id}"):
                    env.close()
            except Exception as error:  # the others are closed all the same, but not after an interrupt
                failures.append(error)
        if failures:
            raise failures[0]

    def _first(self, env: gymnasium.Env[Any, Any], index: int, **arguments: Any) -> Any:
        """The first observation of an episode, with its mask if that comes from info."""
        raw, info = call_reset(env.reset, self._env_id, **arguments)
        if self._info_mask:
            return self._info_mask.join(raw, info, index)
        if arguments and not index:  # at the beginning of a run
            warn_about_unused_mask(self._action_mask, self._mask, info, self.native_spaces[1], self._env_id)
        return raw

    def _scalar(self, reward: Any, index: int) -> float:
        try:
            return float(reward)
        except (TypeError, ValueError) as error:
            raise EnvError(
                f"The reward of environment {index} of {self._env_id} is {shown(reward)}, but must be a single number."
            ) from error


def _common_spaces(
    envs: Sequence[gymnasium.Env[Any, Any]], env_id: str
) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Observation and action space; raises EnvError if copies are the same object, or have other spaces."""
    if len({id(getattr(env, "unwrapped", env)) for env in envs}) < len(envs):
        raise EnvError(
            f"Copies of {env_id} are the same object, or wrappers around the same object; create a new environment in "
            "each call."
        )
    first = spaces_of(envs[0], env_id)
    for index, env in enumerate(envs[1:], start=1):
        for name, same, one, other in zip(
            ("observation_space", "action_space"),
            (same_observations, operator.eq),
            spaces_of(env, env_id),
            first,
            strict=True,
        ):
            if not same(one, other):
                raise EnvError(
                    f"The {name} of environment {index} of {env_id} is {shown(one)}, but that of environment 0 is "
                    f"{shown(other)}: all copies must have the same spaces."
                )
    return first
