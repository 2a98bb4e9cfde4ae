"""Stacks of images: order, beginnings and ends of episodes, saved state, and what trains on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from anybatch.config.io import override
from anybatch.config.schema import EnvConfig
from anybatch.envs.base import VectorEnv
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.envs.spaces import picture
from anybatch.errors import ConfigError, EnvError
from anybatch.models.images import image_layout
from anybatch.presets import ppo
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.training import resume, train


class Film(gymnasium.Env[Any, Any]):
    """Every pixel is 10 times the episode plus its step; episodes are cut after ``length`` steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3, shape: str = "HW", entries: bool = False) -> None:
        self.length, self.entries = length, entries
        sizes = {"HW": (12, 12), "HWC": (12, 12, 3), "CHW": (3, 12, 12)}[shape]
        self.image = spaces.Box(0, 255, sizes, np.uint8)
        pose = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space: Any = spaces.Dict({"eye": self.image, "pose": pose}) if entries else self.image
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self.frame(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.frame(), float(action), False, self.t == self.length, {}

    def frame(self) -> Any:
        image = np.full(self.image.shape, 10 * self.episode + self.t, np.uint8)
        return {"eye": image, "pose": np.zeros(2, np.float32)} if self.entries else image


def made(frames: int = 3, num_envs: int = 2, **options: Any) -> VectorEnv:
    return make(EnvConfig(id=environment_id(Film), frame_stack=frames, options=options), num_envs, 0)


def pixels(observation: Any) -> list[int]:
    """One pixel of each frame of the first environment."""
    image = observation["eye"] if isinstance(observation, dict) else observation
    return [int(x) for x in image[0].reshape(len(image[0]), -1)[:, 0]]


@pytest.mark.parametrize("entries", [False, True])
def test_by_hand(entries: bool) -> None:
    env = made(entries=entries)
    kept = env.reset()
    assert pixels(kept) == [0, 0, 0]
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(5)]
    assert pixels(kept) == [0, 0, 0]  # what was returned does not change
    # the third step ends the episode with frame 3, and begins the next with frame 10
    assert [pixels(s.observation) for s in steps] == [[0, 0, 1], [0, 1, 2], [10, 10, 10], [10, 10, 11], [10, 11, 12]]
    assert pixels(steps[2].final_observation) == [1, 2, 3]
    assert steps[0].final_observation is None
    if entries:
        assert steps[0].observation["pose"].shape == (2, 2)  # type: ignore[index, call-overload]


@pytest.mark.parametrize(("shape", "expected"), [("HW", (4, 12, 12)), ("HWC", (4, 12, 12, 3)), ("CHW", (4, 3, 12, 12))])
def test_spaces(shape: str, expected: tuple[int, ...]) -> None:
    env = made(4, shape=shape)
    assert env.observation_space.shape == env.native_spaces[0].shape == expected
    assert env.observation_space.dtype == np.uint8
    assert made(1).observation_space.shape == (12, 12)


def test_the_state_has_the_stacks() -> None:
    env, other = made(), made()
    env.reset()
    env.step(np.zeros(2, np.int64))
    state = env.save_state()
    assert state is not None
    other.load_state(state)
    for _ in range(4):
        one, two = (x.step(np.zeros(2, np.int64)).observation for x in (env, other))
        assert np.array_equal(one, two)  # type: ignore[arg-type]


def test_returns_of_whole_games_pass_through() -> None:
    env = made()
    env.reset()
    inner = env._env  # type: ignore[attr-defined]
    step, games = inner.step, (np.array([1.0, 2.0], np.float32), np.array([True, False]))
    inner.step = lambda action: replace(step(action), games=games)
    assert env.step(np.zeros(2, np.int64)).games is games


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="no image to stack: it is Box"):
        make(EnvConfig(id="gym:CartPole-v1", frame_stack=2), 1, 0)


@pytest.mark.parametrize("shape", ["HW", "HWC", "CHW"])
def test_stacks_whose_axes_encoders_would_confuse_are_refused(shape: str) -> None:
    assert image_layout(made(11, shape=shape).native_spaces[0]) == {"HW": "CHW", "HWC": "SHWC", "CHW": "SCHW"}[shape]
    with pytest.raises(ConfigError, match=r"env\.frame_stack is 12, but .* height and width must be above 12$"):
        made(12, shape=shape)


@pytest.mark.parametrize("frames", [2, 4, 8])
def test_the_picture_of_a_stack_of_grey_frames_is_the_last(frames: int) -> None:
    stack = np.arange(frames, dtype=np.uint8)[None, :, None, None] * np.ones((1, 1, 12, 12), np.uint8)
    shown = picture(stack, "x")
    assert shown.shape == (12, 12, 3) and (shown == frames - 1).all()


@pytest.mark.parametrize("encoder", ["auto", "mlp"])
def test_runs_train_resume_and_evaluate(encoder: str, tmp_path: Path) -> None:
    small = {"num_envs": 2, "rollout_steps": 8, "minibatches": 2, "device": "cpu", "log.tensorboard": False}
    config = ppo(Film, **small, env_options={"shape": "HWC"}, frame_stack=3, encoder=encoder, total_env_steps=64)
    train(config, tmp_path / "whole", seed=1, quiet=True)
    train(override(config, {"total_env_steps": 32}), tmp_path / "half", seed=1, quiet=True)
    resume(tmp_path / "half", total_env_steps=64, quiet=True)
    one, other = (load_policy(tmp_path / x, device="cpu") for x in ("half", "whole"))
    for name, value in one.agent.state_dict().items():
        assert torch.equal(value, other.agent.state_dict()[name])
    assert len(evaluate(one, episodes=3).returns) == 3
    assert one.act(np.zeros((3, 12, 12, 3), np.uint8)) in (0, 1)
    words = r"has shape \(12, 12, 3\), but its space has \(3, 12, 12, 3\); stack the last 3, oldest first \(env.frame"
    with pytest.raises(EnvError, match=words):
        one.act(np.zeros((12, 12, 3), np.uint8))
