"""Training runs through, and stays finite, for every kind of environment, action and observation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from anybatch.presets import ppo_ewma
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import train

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
PICTURE = spaces.Box(0, 255, (16, 16, 3), np.uint8)


class Any_(gymnasium.Env[Any, Any]):
    """Random observations and rewards; checks that its actions are valid."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.observation_space.sample(), float(self.np_random.normal()), self.steps == 5, self.steps == 9, {}


class TinyEncoder(nn.Module):
    """A user's encoder."""

    def __init__(self, observation_space: spaces.Box, size: int = 4) -> None:
        super().__init__()
        self.out_features = size
        self.layer = nn.Linear(observation_space.shape[0], size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


KINDS = {
    "discrete": (VECTOR, spaces.Discrete(3)),
    "discrete from 5": (VECTOR, spaces.Discrete(3, start=5)),
    "multi-discrete": (VECTOR, spaces.MultiDiscrete([2, 3])),
    "table of multi-discrete": (VECTOR, spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [0, 7]])),
    "multi-binary": (VECTOR, spaces.MultiBinary(4)),
    "table of bits": (VECTOR, spaces.MultiBinary((2, 2))),
    "box of integers": (VECTOR, spaces.Box(np.array([[-2, 0]], np.int8), np.array([[1, 3]], np.int8), dtype=np.int8)),
    "bounded box": (VECTOR, spaces.Box(np.array([0, -3], np.float32), np.array([10, 3], np.float32))),
    "unbounded box": (VECTOR, spaces.Box(-np.inf, np.inf, (2, 2), np.float32)),
    "picture": (PICTURE, spaces.Discrete(3)),
    "dictionary": (spaces.Dict({"camera": PICTURE, "joints": VECTOR}), spaces.Box(-1, 1, (2,), np.float32)),
    "discrete observation": (spaces.Discrete(7), spaces.Discrete(2)),
}
SMALL = {"num_envs": 4, "rollout_steps": 8, "minibatches": 2, "total_env_steps": 96, "tensorboard": False}


def run(env: Any, tmp_path: Path, **changes: Any) -> None:
    train(ppo_ewma(env, **SMALL, **changes), tmp_path / "run", quiet=True)
    progress = read_progress(tmp_path / "run" / "progress.csv")
    assert progress["env_steps"] == [32, 64, 96]
    for column in ("policy_loss", "value_loss", "entropy", "kl_behavior", "advantage_std"):
        assert np.isfinite(progress[column]).all(), column
    assert len(evaluate(load_policy(tmp_path / "run"), episodes=3).returns) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", ["clip", "kl"])
def test_spaces(kind: str, objective: str, tmp_path: Path) -> None:
    run(lambda: Any_(*KINDS[kind]), tmp_path, objective=objective)


@pytest.mark.parametrize("env", ["gym:Pendulum-v1", "gym:FrozenLake-v1"])
def test_gymnasium(env: str, tmp_path: Path) -> None:
    run(env, tmp_path, env_options={"max_episode_steps": 5})


@pytest.mark.procgen
@pytest.mark.parametrize("env", ["envpool:Catch-v0", "envpool:Pendulum-v1"])
def test_envpool(env: str, tmp_path: Path) -> None:
    run(env, tmp_path)


def test_id_that_the_user_registered(tmp_path: Path) -> None:
    gymnasium.register("Mine-v0", lambda: Any_(*KINDS["discrete"]))
    run("gym:Mine-v0", tmp_path)


@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_architectures_and_own_encoder(architecture: str, tmp_path: Path) -> None:
    encoder = f"{TinyEncoder.__module__}:TinyEncoder"
    run("gym:CartPole-v1", tmp_path, architecture=architecture, encoder=encoder, model_options={"size": 6})


def test_separate_epochs_and_sgd(tmp_path: Path) -> None:
    run("gym:CartPole-v1", tmp_path, policy_epochs=1, value_epochs=2, **{"optimizer.kind": "sgd"})
