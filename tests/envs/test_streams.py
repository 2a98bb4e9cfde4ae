"""Whatever the episodes' lengths and ends, every way of resetting gives the stream that they define."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from anybatch.config.schema import EnvConfig
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id


class Scripted(gymnasium.Env):
    """Episodes of the given (length, truncated), over and over; the observation is (episode, step)."""

    observation_space = spaces.Box(0, 1000, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, script: list[tuple[int, bool]]) -> None:
        self.script, self.at = script, np.array([-1.0, 0.0])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.at[:] = self.at[0] + 1, 0
        return self.at, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.at[1] += 1
        length, truncated = self.script[int(self.at[0]) % len(self.script)]
        end = self.at[1] == length
        return self.at.copy(), float(self.at @ [100, 1]), bool(end and not truncated), bool(end and truncated), {}


scripts = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=40, deadline=None)
@given(scripts, st.sampled_from([None, *AutoresetMode]))
def test_stream_is_the_scripts(script: list[list[tuple[int, bool]]], mode: AutoresetMode | None) -> None:
    makers = iter(script)

    def single() -> gymnasium.Env:
        return Scripted(next(makers))

    def vector(num_envs: int) -> gymnasium.vector.VectorEnv:
        return SyncVectorEnv([lambda s=s: Scripted(s) for s in script], autoreset_mode=mode)

    env = make(EnvConfig(id=environment_id(single if mode is None else vector)), len(script), 0)
    assert env.reset().tolist() == [[0, 0]] * len(script)
    episode, step = np.zeros(len(script), int), np.zeros(len(script), int)
    for _ in range(15):
        steps = env.step(np.zeros(len(script), np.int64))
        step += 1
        now = [s[e % len(s)] for s, e in zip(script, episode, strict=True)]
        end = np.array([length for length, _ in now]) == step
        cut = end & np.array([truncated for _, truncated in now])
        assert steps.reward.tolist() == (100.0 * episode + step).tolist()
        assert steps.terminated.tolist() == (end & ~cut).tolist() and steps.truncated.tolist() == cut.tolist()
        assert steps.final_index.tolist() == np.flatnonzero(cut).tolist()
        if cut.any():
            assert steps.final_observation.tolist() == np.stack([episode, step], 1)[cut].tolist()
        else:
            assert steps.final_observation is None
        episode[end] += 1
        step[end] = 0
        assert steps.observation.tolist() == np.stack([episode, step], 1).tolist()
