"""EnvPool environments, stepped by EnvPool's threads."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from anybatch.envs.base import EpisodeInfo, Observation, Steps
from anybatch.envs.masks import mask_entry
from anybatch.envs.spaces import Actions, Observations, check_reward, picture, take, write
from anybatch.errors import ConfigError, EnvError, install_command, shown
from anybatch.system.qt import load_qt

# Keys of EnvPool's configuration that anybatch sets itself.
_RESERVED = frozenset(
    {"num_envs", "batch_size", "num_threads", "max_num_players", "base_path"}
    | {"seed", "env_seed", "gym_reset_return_info"}
)
# Options that end the process, without an exception, where they are 0 or negative.
_ENDS_THE_PROCESS = frozenset({"stack_num", "noop_max", "img_height", "img_width", "size"})


def import_envpool() -> Any:
    """The envpool module; raises EnvError if it is not installed."""
    load_qt()  # before the import: without Qt, EnvPool disables Procgen for the rest of the process
    try:
        return importlib.import_module("envpool")
    except ImportError as error:
        raise EnvError(f"EnvPool is required but not installed ({error}): {install_command('procgen')}.") from error


def task_ids() -> list[str]:
    """All EnvPool ids, Procgen included, sorted."""
    return sorted(import_envpool().list_all_envs())


def task_families() -> dict[str, list[str]]:
    """EnvPool's ids, sorted, by family (atari, mujoco.gym, ...)."""
    import_envpool()
    try:
        specs = importlib.import_module("envpool.registration").registry.specs
        families = {name: str(specs[name][0]).removeprefix("envpool.") for name in task_ids()}
    except (
        ImportError,
        AttributeError,
        KeyError,
        TypeError,
        IndexError,
    ):  # the families are not part of EnvPool's public interface
        families = dict.fromkeys(task_ids(), "all families")
    return {
        family: [name for name in families if families[name] == family] for family in sorted(set(families.values()))
    }


def make_spec(task_id: str, env_id: str, **config: Any) -> Any:
    """EnvPool's specification of a task, without starting it.

    Raises ConfigError for an unknown task and EnvError for one that EnvPool cannot describe.
    """
    pool = import_envpool()
    if task_id not in pool.list_all_envs():
        others = [name for family, names in task_families().items() if family != "procgen" for name in names]
        close = difflib.get_close_matches(task_id, others, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join('envpool:' + name for name in close)}?" if close else "."
        raise ConfigError(f"env.id is {env_id!r}, but EnvPool has no environment {task_id!r}{hint}")
    try:
        return pool.make_spec(task_id, **config)
    except Exception as error:  # C++ raises any kind
        raise EnvError(f"EnvPool cannot make {env_id}: {error}") from error


def check_options(options: Mapping[str, Any], spec: Any, env_id: str, *, reserved: frozenset[str]) -> dict[str, Any]:
    """`options` converted to EnvPool's types; raises ConfigError for an unknown name or a wrong type."""
    defaults: dict[str, Any] = spec.config._asdict()
    allowed = sorted(set(defaults) - _RESERVED - reserved)
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in allowed:
            raise ConfigError(f"env.options has {name!r}, but {env_id} takes only {', '.join(allowed)}.")
        kind = type(defaults[name])
        if kind is bool and value in (0, 1) and not isinstance(value, str):
            value = bool(value)
        elif kind is float and type(value) is int:
            value = float(value)
        elif kind is int and type(value) is float and value.is_integer():
            value = int(value)  # 1e6 is an integer
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"env.options.{name} is {shown(value)}, but {env_id} needs the type {kind.__name__}.")
        if kind is int and not (1 if name in _ENDS_THE_PROCESS else -(2**31)) <= value < 2**31:
            least = 1 if name in _ENDS_THE_PROCESS else "-2**31"
            raise ConfigError(f"env.options.{name} is {shown(value)}, but must be at least {least} and below 2**31.")
        checked[name] = value
    return checked


class EnvPoolVectorEnv:
    """N copies of one EnvPool task; see :class:`anybatch.envs.base.VectorEnv`.

    EnvPool resets on the step after the end of an episode, which would be a row without a transition. Resetting the
    finished environments at once avoids such rows. EnvPool's state cannot be saved.
    """

    episode_info: EpisodeInfo | None = None

    def __init__(
        self,
        task_id: str,
        seeds: Sequence[int],
        *,
        env_id: str,
        options: Mapping[str, Any],
        threads: int = 0,
        bootstrap_truncated: bool = True,
        render_size: int | None = None,
        rendering: bool = False,
        action_mask: str = "auto",
    ) -> None:
        """`seeds`: one for each of the N environments.

        `render_size`: width and height of frames in pixels; None is the environment's default. `action_mask` is
        env.action_mask.
        """
        spec = make_spec(task_id, env_id)
        if spec.config.max_num_players != 1:
            raise EnvError(f"{env_id} has several players, but anybatch supports only one.")
        self.num_envs = num_envs = len(seeds)
        self.bootstrap_truncated = bootstrap_truncated
        self._env_id = env_id
        self._episodic_life = bool(options.get("episodic_life"))  # of Atari: an episode ends with a life
        self._has_games = self._episodic_life or bool(options.get("reward_clip"))
        config: dict[str, Any] = {**options, "num_envs": num_envs, "batch_size": num_envs, "num_threads": threads}
        if "env_seed" not in spec.config._fields:
            raise EnvError(f"Seeds for the individual environments of {env_id} need EnvPool 1.2 or newer.")
        config["env_seed"] = list(seeds)
        if rendering:
            config["render_mode"] = "rgb_array"
            if render_size is not None:
                config |= {"render_width": render_size, "render_height": render_size}
        try:
            self._pool: Any = import_envpool().make(task_id, env_type="gymnasium", **config)
        except Exception as error:  # C++ raises any kind
            raise EnvError(f"EnvPool cannot make {env_id}: {error}") from error
        with warnings.catch_warnings():
            # EnvPool gives float32 bounds in float64, about which Gymnasium warns.
            warnings.simplefilter("ignore", UserWarning)
            self.native_spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]] = (
                self._pool.observation_space,
                self._pool.action_space,
            )
            mask = mask_entry(action_mask, *self.native_spaces, env_id)
            self._observations = Observations(self.native_spaces[0], env_id, mask)
            self._actions = Actions(self.native_spaces[1], env_id)
        self.observation_space: gymnasium.Space[Any] = self._observations.space
        self.action_space: gymnasium.Space[Any] = self._actions.space
        action_spec = list(self._pool.spec.action_array_spec.values())[-1]
        # EnvPool calls a one-element vector Discrete too, and still expects a vector.
        self._action_shape = (num_envs, *(size for size in action_spec.shape if size != -1))
        self._ids = np.arange(num_envs, dtype=np.int32)
        self._rendering = rendering
        self._last: Observation | None = None

    def reset(self) -> Observation:
        observation = self._reset(self._ids, first=True)
        self._observations.check_masks(observation)
        self._last = observation
        return observation

    def step(self, action: np.ndarray) -> Steps:
        """Act everywhere; finished environments are reset before this returns."""
        native = self._actions.native(action, self.num_envs).reshape(self._action_shape)
        raw, reward, terminated, truncated, info = self._pool.step(native)
        self._check_order(info, self._ids)
        # No copy: EnvPool returns every batch in new memory (a test checks that).
        observation = self._observations.batch(raw, self.num_envs, copy=False)
        reward = np.asarray(reward, dtype=np.float32)
        check_reward(reward, self._env_id)
        self._observations.check_finite(observation)
        final_index = np.flatnonzero(truncated & ~terminated)
        final = take(observation, final_index) if len(final_index) else None
        if self.episode_info is not None:
            self.episode_info.take_batch(info, terminated | truncated)
        done = np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(done):
            write(observation, done, self._reset(done))
        self._observations.check_masks(observation)
        self._last = observation
        games, numbers = None, None if self.episode_info is None else self.episode_info.pop()
        if self._has_games:
            games = np.asarray(info["reward"], dtype=np.float32), info["terminated"].astype(bool) | truncated
        return Steps(observation, reward, terminated, truncated, final_index, final, numbers, games)

    def save_state(self) -> None:
        """Return None, because EnvPool has no access to its state."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Raise EnvError, because there is no state to load."""
        raise EnvError(f"The state of {self._env_id} cannot be restored: EnvPool does not support it.")

    def render(self) -> np.ndarray:
        """EnvPool's frame of environment 0, or its image observation if EnvPool cannot draw it."""
        if self._rendering:
            try:
                return np.array(self._pool.render(env_ids=[0])[0])
            except RuntimeError:  # "render not implemented for this environment"
                self._rendering = False
        return picture(self._last, self._env_id)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None  # EnvPool ends its threads on deletion

    def _reset(self, ids: np.ndarray, *, first: bool = False) -> Observation:
        if self._episodic_life and not first:
            # The step after an end begins the next life, or a new game after the last one; reset always begins a game.
            action = np.zeros((len(ids), *self._action_shape[1:]), dtype=self.action_space.dtype)
            raw, _, _, _, info = self._pool.step(action, ids)
        else:
            raw, info = self._pool.reset(ids)
        self._check_order(info, ids)
        observation = self._observations.batch(raw, len(ids), copy=False, env_index=ids)
        self._observations.check_finite(observation, ids)
        return observation

    def _check_order(self, info: dict[str, Any], expected: np.ndarray) -> None:
        # Holds in EnvPool's synchronous mode; rows of the wrong environment would go unnoticed.
        if not np.array_equal(info["env_id"], expected):
            raise EnvError(f"EnvPool returned the rows of {self._env_id} out of order.")
