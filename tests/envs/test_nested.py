"""Nested Dict and Tuple spaces become one flat dictionary, in every kind of vector, and in trained policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from anybatch.config.schema import EnvConfig
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.errors import EnvError
from anybatch.presets import ppo
from anybatch.runs.evaluation import load_policy
from anybatch.runs.saved_spaces import difference, from_plain, to_plain
from anybatch.training import resume, train

BOX = spaces.Box(-1, 9, (2,), np.float32)
NESTED = spaces.Dict(
    {
        "arm": spaces.Dict({"joints": BOX, "grip": spaces.Discrete(2)}),
        "sensors": spaces.Tuple([BOX, spaces.Discrete(3)]),
    }
)
NAMES = {"arm.grip", "arm.joints", "sensors.0", "sensors.1"}


class Robot(gymnasium.Env[Any, Any]):
    """Numbers that count the steps of an episode of 2 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, pair: bool = False) -> None:
        self.pair = pair
        self.observation_space: Any = spaces.Tuple([BOX, NESTED["arm"]]) if pair else NESTED

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), 1.0, False, self.t == 2, {}

    def observe(self) -> Any:
        vector = np.full(2, self.t, np.float32)
        arm = {"joints": vector, "grip": self.t % 2}
        return (vector, arm) if self.pair else {"arm": arm, "sensors": (vector + 0.5, self.t % 3)}


def vector(num_envs: int, kind: str, mode: str) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    cls: Any = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[kind]
    return cls([Robot] * num_envs, autoreset_mode=AutoresetMode[mode])


CASES = [
    (Robot, {}),
    (vector, {"kind": "sync", "mode": "SAME_STEP"}),
    (vector, {"kind": "async", "mode": "SAME_STEP"}),
    (vector, {"kind": "sync", "mode": "NEXT_STEP"}),
]


@pytest.mark.parametrize(("env", "options"), CASES)
def test_entries_are_named_by_their_way(env: Any, options: dict[str, Any]) -> None:
    games = make(EnvConfig(id=environment_id(env), options=options), 2, 0)
    assert set(games.observation_space.spaces) == NAMES  # type: ignore[attr-defined]
    games.reset()
    steps = [games.step(np.zeros(2, np.int64)) for _ in range(2)]
    observation, final = steps[0].observation, steps[1].final_observation
    assert isinstance(observation, dict) and isinstance(final, dict)
    assert {key: x.tolist() for key, x in observation.items()} == {
        "arm.grip": [1, 1],
        "arm.joints": [[1, 1]] * 2,
        "sensors.0": [[1.5, 1.5]] * 2,
        "sensors.1": [1, 1],
    }
    assert final["sensors.0"].tolist() == [[2.5, 2.5]] * 2 and final["arm.grip"].tolist() == [0, 0]
    games.close()


def test_names_that_coincide_are_refused() -> None:
    odd = Robot()
    odd.observation_space = spaces.Dict({"a": spaces.Dict({"b": BOX}), "a.b": BOX})
    with pytest.raises(EnvError, match=r"two keys that read 'a.b'"):
        make(EnvConfig(id=environment_id(lambda: odd)), 1, 0)


def test_spaces_are_saved() -> None:
    restored = from_plain(to_plain(NESTED))
    assert restored == NESTED
    assert difference((NESTED, BOX), (restored, BOX), "it") is None
    other = spaces.Dict({**NESTED.spaces, "sensors": spaces.Tuple([BOX, spaces.Discrete(4)])})
    assert "the policy was trained with the observation space" in str(difference((NESTED, BOX), (other, BOX), "it"))


@pytest.mark.parametrize("pair", [False, True])
def test_policies_take_what_the_environment_gives(pair: bool, tmp_path: Path) -> None:
    small = {"num_envs": 2, "rollout_steps": 8, "minibatches": 2, "device": "cpu", "log.tensorboard": False}
    config = ppo(Robot, **small, total_env_steps=32, env_options={"pair": pair}, **{"observation.normalize": True})
    train(config, tmp_path, seed=1, quiet=True)
    resume(tmp_path, total_env_steps=48, quiet=True)
    policy = load_policy(tmp_path, device="cpu")
    observation, _ = Robot(pair).reset(seed=1)
    assert policy.act(observation) in (0, 1)
