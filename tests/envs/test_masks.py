"""Masks of illegal actions, from an entry of the observation and from info."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from anybatch.config.masks import ActionMask
from anybatch.config.schema import EnvConfig
from anybatch.envs.base import VectorEnv
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.errors import ConfigError, EnvError


class Moving(gymnasium.Env[Any, Any]):
    """The legal action of three is the step modulo 3; episodes of ``length`` steps are cut, with a mask of zeros."""

    def __init__(self, where: str = "info", length: int = 2) -> None:
        self.where, self.length = where, length
        box = spaces.Box(0, 10, (1,), np.float32)
        self.observation_space: Any = box
        if where == "key":
            self.observation_space = spaces.Dict({"action_mask": spaces.Box(0, 1, (3,), np.int8), "observation": box})
        self.action_space = spaces.Discrete(3, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._result()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action == 5 + self.t % 3, "an illegal action"
        self.t += 1
        observation, info = self._result()
        return observation, 1.0, False, self.t == self.length, info

    def _result(self) -> tuple[Any, dict[str, Any]]:
        mask = np.zeros(3, np.int8)
        mask[self.t % 3] = self.t < self.length
        observation = np.array([self.t], np.float32)
        if self.where == "key":
            return {"action_mask": mask, "observation": observation}, {}
        return observation, {"action_mask": mask}


def by_key() -> Moving:
    return Moving("key")


def by_info() -> Moving:
    return Moving("info")


def vector(num_envs: int, kind: str, mode: str) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    cls: Any = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[kind]
    return cls([by_info] * num_envs, autoreset_mode=AutoresetMode[mode])


def made(env: Any, action_mask: str = "auto", num_envs: int = 2, **options: Any) -> VectorEnv:
    return make(EnvConfig(id=environment_id(env), action_mask=action_mask, options=options), num_envs, 0)


CASES = [
    (by_key, "auto", {}),
    (by_key, "action_mask", {}),
    (by_info, "info", {}),
    (by_info, "info:action_mask", {"vectorization": "async"}),
    (vector, "info", {"kind": "sync", "mode": "SAME_STEP"}),
    (vector, "info", {"kind": "sync", "mode": "NEXT_STEP"}),
    (vector, "info", {"kind": "async", "mode": "SAME_STEP"}),
]


@pytest.mark.parametrize(("env", "setting", "options"), CASES)
def test_masks_are_those_of_the_observations_to_act_on(env: Any, setting: str, options: dict[str, Any]) -> None:
    games = made(env, setting, **options)
    assert isinstance(games.observation_space, spaces.Dict)
    assert isinstance(games.observation_space["action_mask"], ActionMask)
    observation = games.reset()
    for t in [0, 1, 0, 1, 0]:
        assert isinstance(observation, dict)
        assert observation["observation"].tolist() == [[t], [t]]
        assert observation["action_mask"].tolist() == [np.eye(3)[t].tolist()] * 2
        assert observation["action_mask"].dtype == np.int8
        step = games.step(observation["action_mask"].argmax(1))
        observation = step.observation
        if t == 1:  # the mask of an observation after which nothing is chosen is not looked at
            assert isinstance(step.final_observation, dict)
            assert step.final_observation["observation"].tolist() == [[2.0], [2.0]]
    games.close()


def test_none_leaves_the_entry_as_it_is() -> None:
    assert type(made(by_key, "none").observation_space["action_mask"]) is spaces.Box  # type: ignore[index]
    assert isinstance(made(by_info, "none").observation_space, spaces.Box)


def test_auto_warns_of_a_mask_in_info() -> None:
    with pytest.warns(UserWarning, match="set env.action_mask to info to train with it, or to none"):
        made(by_info).reset()


class Odd(gymnasium.Env[Any, Any]):
    """A mask as the test wants it."""

    def __init__(self, mask: Any, action_space: spaces.Space[Any], shape: tuple[int, ...]) -> None:
        self.mask, self.action_space = mask, action_space
        self.observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.Box(0, 1, shape)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return {"x": np.zeros(2, np.float32), "action_mask": self.mask}, {}


def odd(mask: Any, action_space: spaces.Space[Any], shape: tuple[int, ...] | None = None) -> VectorEnv:
    return made(lambda: Odd(mask, action_space, np.shape(mask) if shape is None else shape))


def test_a_table_for_a_multi_discrete_is_its_rows_one_after_the_other() -> None:
    observation = odd(np.array([[1, 0], [0, 1]], np.float32), spaces.MultiDiscrete([2, 2])).reset()
    assert observation["action_mask"].tolist() == [[1, 0, 0, 1]] * 2  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("mask", "space", "sentence"),
    [
        ([0.0, 0.0], spaces.Discrete(2), r"The action mask of environment 0 of .* allows nothing: at least one choice"),
        ([1.0, 1, 0, 0], spaces.MultiDiscrete([2, 2]), "allows nothing in part 1 of the action"),
        ([1.0, 0.5], spaces.Discrete(2), r"entry 'action_mask', is 0.5 at \[1\], but a mask must have 1 or 0"),
        ([np.nan, 1], spaces.Discrete(2), "is nan"),
    ],
)
def test_wrong_masks_are_refused(mask: Any, space: Any, sentence: str) -> None:
    with pytest.raises(EnvError, match=sentence):
        odd(np.array(mask, np.float32), space).reset()


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(EnvError, match="but a mask of its actions must have 3 numbers"):
        odd(np.ones(2), spaces.Discrete(3))
    with pytest.raises(ConfigError, match="only Discrete and MultiDiscrete actions can be masked"):
        made(lambda: Odd(np.ones(2), spaces.Box(-1, 1, (2,)), (2,)), "action_mask")
    with pytest.raises(ConfigError, match="only Discrete and MultiDiscrete actions can be masked"):
        made("gym:Pendulum-v1", "info")
    with pytest.raises(ConfigError, match=r"'legal', but the observation of .* is only action_mask, observation"):
        made(by_key, "legal")
    with pytest.raises(ConfigError, match=r"has an entry of that name; set env.action_mask action_mask"):
        made(by_key, "info")
    with pytest.raises(EnvError, match="The info of environment 0 of gym:CartPole-v1 has no 'action_mask'"):
        made("gym:CartPole-v1", "info").reset()


def test_a_box_of_actions_is_never_masked_by_itself() -> None:
    games = made(lambda: Odd(np.ones(2, np.float32), spaces.Box(-1, 1, (2,)), (2,)))
    assert type(games.observation_space["action_mask"]) is spaces.Box  # type: ignore[index]
