"""A Gymnasium vector environment, with any way of resetting that leaves no rows without a transition."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from anybatch.envs.base import EpisodeInfo, Observation, Steps
from anybatch.envs.contract import call_render, call_reset, call_step, spaces_of, user_code, warn_about_normalizers
from anybatch.envs.masks import InfoMask, mask_entry, warn_about_unused_mask
from anybatch.envs.snapshot import custom_state, restore_custom_state
from anybatch.envs.spaces import Actions, Observations, check_reward, picture, take
from anybatch.errors import EnvError, UserCodeError, shown
from anybatch.system.signals import describe_exit

_MOST_SUSPICIOUS = 3
_EXIT_SECONDS = 2.0  # after its connection has broken


class GymnasiumVector:
    """Wraps a `gymnasium.vector.VectorEnv`; see :class:`anybatch.envs.base.VectorEnv`.

    A vector environment in SAME_STEP mode reports last observations in `infos["final_obs"]`. In DISABLED mode, and for
    Gymnasium's Sync- and AsyncVectorEnv in NEXT_STEP mode, finished environments are reset right after the step.
    Raises EnvError for any other one, which would have rows without a transition.
    """

    bootstrap_truncated = True
    episode_info: EpisodeInfo | None = None

    def __init__(
        self,
        env: gymnasium.vector.VectorEnv[Any, Any, Any],
        seeds: Sequence[int],
        *,
        env_id: str,
        copies_final_observation: bool = False,
        action_mask: str = "auto",
    ) -> None:
        """`seeds`: one for each of its environments; one that is not Gymnasium's gets the first of them.

        `copies_final_observation`: the environments are wrapped in
        :class:`anybatch.envs.contract.CheckedEnv`. `action_mask` is env.action_mask.
        """
        self.num_envs = int(env.num_envs)
        self._env = env
        self._env_id = env_id
        self._base = env.unwrapped
        with contextlib.ExitStack() as undo:
            undo.callback(env.close)
            self._same_step = _autoreset_mode(env, env_id) == AutoresetMode.SAME_STEP
            native = spaces_of(env, env_id, ("single_",))
            self._info_mask = InfoMask.of(action_mask, *native, env_id)
            self._masks = np.ones((self.num_envs, self._info_mask.size if self._info_mask else 0), np.float32)
            self.native_spaces = (self._info_mask.space if self._info_mask else native[0], native[1])
            self._action_mask, self._mask = action_mask, mask_entry(action_mask, *self.native_spaces, env_id)
            self._observations = Observations(self.native_spaces[0], env_id, self._mask)
            self._actions = Actions(native[1], env_id)
            undo.pop_all()
        warn_about_normalizers(env, env_id)
        if self._same_step and type(env) is SyncVectorEnv:
            env.autoreset_mode = AutoresetMode.DISABLED  # to read the last observations before the reset
            self._same_step = False
        self._final_may_be_overwritten = not copies_final_observation
        self._suspicious: dict[str, int] = {}  # truncations in a row, by the entry of the observation
        self.observation_space: gymnasium.Space[Any] = self._observations.space
        self.action_space: gymnasium.Space[Any] = self._actions.space
        self.takes_one_seed = not isinstance(self._base, SyncVectorEnv | AsyncVectorEnv)
        self._seed: list[int] | int | None = int(seeds[0]) if self.takes_one_seed else list(seeds)
        self._steps = 0
        self._last: Observation | None = None

    def reset(self) -> Observation:
        raw, infos = self._call(lambda: call_reset(self._env.reset, self._env_id, seed=self._seed))
        if self._seed is not None:
            warn_about_unused_mask(self._action_mask, self._mask, infos, self.native_spaces[1], self._env_id)
        self._seed = None
        self._take_masks(infos, np.ones(self.num_envs, np.bool_))
        self._last = self._batch(raw)
        self._observations.check_masks(self._last)
        return self._last

    def step(self, action: np.ndarray) -> Steps:
        native = self._actions.native(action, self.num_envs)
        raw, raw_reward, raw_terminated, raw_truncated, infos = self._call(
            lambda: call_step(self._env.step, native, self._env_id)
        )
        self._steps += 1
        reward = self._vector(raw_reward, np.float32, "rewards")
        terminated = self._vector(raw_terminated, np.bool_, "terminations")
        truncated = self._vector(raw_truncated, np.bool_, "truncations")
        done = terminated | truncated
        # where the environments reset in the same step, infos are those of the new episodes
        self._take_masks(infos, np.ones_like(done) if self._same_step else ~done)
        observation = self._batch(raw)
        check_reward(reward, self._env_id)
        if self.episode_info is not None:
            ends = infos.get("final_info", infos) if self._same_step else infos
            self.episode_info.take_batch(ends, terminated | truncated)
        final_index = np.flatnonzero(truncated & ~terminated)
        final: Observation | None = None
        if self._same_step:
            if len(final_index):
                final = self._final(infos, final_index)
                if self._final_may_be_overwritten:
                    self._check_not_overwritten(final, take(observation, final_index), final_index)
        else:
            if len(final_index):
                final = take(observation, final_index)
            if done.any():
                # Rows that are not reset come back unchanged.
                options = {"reset_mask": done}
                raw, infos = self._call(lambda: call_reset(self._env.reset, self._env_id, options=options))
                self._take_masks(infos, done)
                observation = self._batch(raw)
        self._observations.check_masks(observation)
        self._last = observation
        numbers = None if self.episode_info is None else self.episode_info.pop()
        return Steps(observation, reward, terminated, truncated, final_index, final, numbers)

    def save_state(self) -> dict[str, Any] | None:
        """The result of the environment's method `get_state()`; None if it has none, or not plain data."""
        return custom_state(self._env, self._env_id)

    def load_state(self, state: dict[str, Any]) -> None:
        """Pass the state to the environment's method `set_state(state)`."""
        restore_custom_state(self._env, state, self._env_id)
        self._seed = None

    def render(self) -> np.ndarray:
        """The frame of environment 0, or its image observation if it draws none."""
        if self._env.render_mode == "rgb_array":
            frames = self._call(lambda: call_render(self._env.render, self._env_id))
            if frames is not None:
                return np.asarray(frames[0])
        return picture(self._last, self._env_id)

    def close(self) -> None:
        with user_code(f"close of {self._env_id}"):
            self._call(self._env.close)

    def _call(self, call: Callable[[], Any]) -> Any:
        """Call the vector environment; if the call fails, end its processes, and explain the death of one of them.

        An interrupt counts: the processes would not answer the next call, nor a call to close them.
        """
        try:
            return call()
        except BaseException as error:
            if not isinstance(self._base, AsyncVectorEnv):
                if isinstance(error, UserCodeError):
                    error.locate(f"after {self._steps} steps")
                raise
            cause = error.__cause__ if isinstance(error, UserCodeError) else error
            lost = isinstance(cause, EOFError | ConnectionError)
            reason = _describe_dead_process(self._base, self._env_id) if lost else ""
            _kill(self._base)
            if lost:
                raise EnvError(reason) from error
            raise

    def _take_masks(self, infos: dict[str, Any], rows: np.ndarray) -> None:
        """Keep the masks of some environments, (N,) bool, if they come from infos."""
        if self._info_mask:
            self._info_mask.masks(infos, np.flatnonzero(rows), self._masks)

    def _batch(self, raw: Any) -> Observation:
        if self._info_mask:
            raw = self._info_mask.join_batch(raw, self._masks)
        observation = self._observations.batch(raw, self.num_envs, copy=True)  # its buffers may be reused
        self._observations.check_finite(observation)
        return observation

    def _vector(self, raw: Any, dtype: type[np.generic], name: str) -> np.ndarray:
        given = np.asarray(raw)
        if given.dtype.kind not in "buif":  # the text "False" would count as true
            raise EnvError(f"The {name} of {self._env_id} are {shown(raw)}, but must be numbers.")
        array = np.array(given, dtype=dtype)
        if array.shape != (self.num_envs,):
            raise EnvError(
                f"The {name} of {self._env_id} have shape {array.shape}, but must have shape {(self.num_envs,)}."
            )
        return array

    def _final(self, infos: dict[str, Any], index: np.ndarray) -> Observation:
        stored = infos.get("final_obs")
        if stored is None:
            raise EnvError(
                f"{self._env_id} resets in the same step, but does not report the last observation of a truncated "
                'episode in infos["final_obs"], without which its value cannot be bootstrapped.'
            )
        final = self._observations.empty(len(index))
        for row, env_index in enumerate(index.tolist()):
            one = _row(stored, env_index)
            one = self._info_mask.join_final(one) if self._info_mask else one
            self._observations.put(final, row, one, env_index)
        self._observations.check_finite(final, index)
        return final

    def _check_not_overwritten(self, final: Observation, first: Observation, index: np.ndarray) -> None:
        """Raise EnvError if last observations (K, ...) are again and again the first ones of the next episode.

        An environment that reuses its array overwrites the last observation when it is reset in the same step. Entries
        that had this value one step earlier as well, such as a goal, do not count.
        """
        if self._last is None:  # in the first step after a restored state
            return
        before = take(self._last, index)
        for name, last in final.items() if isinstance(final, dict) else (("", final),):
            begin, earlier = (x[name] if isinstance(x, dict) else x for x in (first, before))
            equal, stood = ((last == x).reshape(len(index), -1).all(axis=1) for x in (begin, earlier))
            reused = last.ndim > 1 and bool((equal & ~stood).all())
            self._suspicious[name] = self._suspicious.get(name, 0) + len(index) if reused else 0
            if self._suspicious[name] >= _MOST_SUSPICIOUS:
                raise EnvError(
                    f"Environment {int(index[0])} of {self._env_id} reports the first observation of the next episode "
                    f"as the last one of a truncated episode, as in the {self._suspicious[name] - 1} truncations "
                    "before: its array is probably reused by the reset. Use AutoresetMode.NEXT_STEP or DISABLED, or "
                    "have step return a copy."
                )


def _describe_dead_process(env: AsyncVectorEnv, env_id: str) -> str:
    for process in env.processes:  # one whose connection broke has died or is about to
        process.join(_EXIT_SECONDS / len(env.processes))
    for index, process in enumerate(env.processes):
        if process.exitcode is not None:
            return f"The process of environment {index} of {env_id} {describe_exit(process.exitcode)}."
    return f"The connection to a process of {env_id} has broken."


def _row(stored: Any, index: int) -> Any:
    """One of many observations: an array of them, or an array for every entry of Dict and Tuple spaces."""
    if isinstance(stored, dict):
        return {key: _row(value, index) for key, value in stored.items()}
    return tuple(_row(value, index) for value in stored) if isinstance(stored, tuple) else stored[index]


def _kill(env: AsyncVectorEnv) -> None:
    """End the processes of a vector environment whose own close() would wait for answers that never come."""
    for process in env.processes:
        process.kill()
        process.join()
    for pipe in env.parent_pipes:
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    env.closed = True


def _autoreset_mode(env: gymnasium.vector.VectorEnv[Any, Any, Any], env_id: str) -> AutoresetMode:
    """The autoreset mode of `env`; raises EnvError for one that is unknown or leaves rows without a transition."""
    advice = (
        'make it reset in the same step (metadata["autoreset_mode"] = AutoresetMode.SAME_STEP and infos["final_obs"]), '
        'or disable automatic resets (AutoresetMode.DISABLED, with reset(options={"reset_mask": ...}))'
    )
    try:
        mode = AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError as error:
        raise EnvError(
            f'{env_id} does not declare its autoreset mode in metadata["autoreset_mode"]: {advice}.'
        ) from error
    if mode == AutoresetMode.NEXT_STEP:
        base = env.unwrapped
        # Without shared memory an AsyncVectorEnv does not note the reset, and would reset once more.
        resets_singly = isinstance(base, SyncVectorEnv) or (isinstance(base, AsyncVectorEnv) and base.shared_memory)
        if not resets_singly:
            raise EnvError(f"{env_id} resets in the step after an episode's end, which is not a transition: {advice}.")
    return mode
