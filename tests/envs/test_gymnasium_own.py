"""Gymnasium's own environments, vector environments and checker with our adapters and environments."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from anybatch.config.schema import EnvConfig
from anybatch.envs.base import VectorEnv, derive_seeds
from anybatch.envs.contract import CheckedEnv
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id

ROOT = Path(__file__).parents[2]
IDS = {"CartPole-v1": 12, "Pendulum-v1": 9, "FrozenLake-v1": 7, "MountainCarContinuous-v0": 8}
"""Time limits: episodes of CartPole and FrozenLake end both ways, those of the others by the limit."""
NUM_ENVS, STEPS = 3, 40
CLASSES = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}


def single(task: str) -> gymnasium.Env:
    return gymnasium.make(task, max_episode_steps=IDS[task])


def vector(num_envs: int, task: str, kind: str, mode: str) -> gymnasium.vector.VectorEnv:
    return CLASSES[kind]([lambda: single(task)] * num_envs, autoreset_mode=AutoresetMode[mode])


def adapters(task: str) -> list[VectorEnv]:
    """Every way from Gymnasium's environments to our interface, with the same seeds."""
    options: list[dict[str, Any]] = [{"kind": kind, "mode": mode.name} for kind in CLASSES for mode in AutoresetMode]
    own = [EnvConfig(id=environment_id(vector), options={"task": task, **x}) for x in options]
    modes = [{"vectorization": kind} for kind in CLASSES]
    ours = [EnvConfig(id=environment_id(single), options={"task": task, **x}) for x in modes]
    return [make(config, NUM_ENVS, 4) for config in (*own, *ours)]


def by_hand(task: str, actions: list[np.ndarray]) -> list[tuple[Any, ...]]:
    """What happens with no vector environment at all: each is reset by hand when its episode has ended."""
    envs = [single(task) for _ in range(NUM_ENVS)]
    observations = [env.reset(seed=seed)[0] for env, seed in zip(envs, derive_seeds(4, NUM_ENVS), strict=True)]
    rows: list[tuple[Any, ...]] = [(np.array(observations),)]
    for action in actions:
        results = [env.step(x) for env, x in zip(envs, action, strict=True)]
        last, reward, terminated, truncated = (np.array(x) for x in list(zip(*results, strict=True))[:4])
        observation = last.copy()
        for i in np.flatnonzero(terminated | truncated):
            observation[i] = envs[i].reset()[0]
        cut = truncated & ~terminated
        rows.append((observation, reward.astype(np.float32), terminated, truncated, last[cut]))
    return rows


@pytest.mark.parametrize("task", IDS)
def test_every_way_of_resetting_gives_the_same_episodes(task: str) -> None:
    space = single(task).action_space
    space.seed(0)
    actions = [np.array([space.sample() for _ in range(NUM_ENVS)]) for _ in range(STEPS)]
    expected = by_hand(task, actions)
    ends = np.array([row[2] | row[3] for row in expected[1:]])
    assert ends.sum(0).min() >= 3  # episodes of every environment
    for env in adapters(task):
        assert np.array_equal(env.reset(), expected[0][0])
        for action, (observation, reward, terminated, truncated, last) in zip(actions, expected[1:], strict=True):
            steps = env.step(action)
            assert np.array_equal(steps.observation, observation)
            assert np.array_equal(steps.reward, reward)
            assert np.array_equal(steps.terminated, terminated) and np.array_equal(steps.truncated, truncated)
            final = np.zeros((0,)) if steps.final_observation is None else steps.final_observation
            assert len(final) == len(last)
            assert not len(last) or np.array_equal(final, last)
        env.close()


OWN = sorted(
    x for x, spec in gymnasium.registry.items() if re.search("classic_control|toy_text", str(spec.entry_point))
)


@pytest.mark.parametrize("task", OWN)
@pytest.mark.filterwarnings("ignore")
def test_our_wrapper_passes_gymnasium_s_checker(task: str) -> None:
    """:class:`CheckedEnv` is around environments that run in processes."""
    env = gymnasium.make(task, disable_env_checker=True)
    check_env(CheckedEnv(env, task, 0, os.getpid()), skip_render_check=True, skip_close_check=True)


def documented() -> dict[str, str]:
    """Source of the environments that the documentation ships, by class."""
    page = (ROOT / "docs/your-own-environment.md").read_text()
    blocks = re.findall(r'```python title="\w+\.py"\n(.*?)```', page, re.DOTALL)
    return {name: block for block in blocks for name in re.findall(r"^class (\w+)\(gym\.Env\)", block, re.MULTILINE)}


@pytest.mark.parametrize("name", documented())
def test_documented_environments_pass_gymnasium_s_checker(name: str) -> None:
    namespace: dict[str, Any] = {"__name__": name}
    exec(documented()[name], namespace)
    check_env(namespace[name](), skip_render_check=True)
