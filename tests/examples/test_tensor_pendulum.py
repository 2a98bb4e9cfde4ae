"""The example of an environment of tensors: Gymnasium's physics, training on 4,096 instances, resuming, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo_ewma
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train
from tensor_pendulum import SETTINGS, Pendulums


def config(env: Any = Pendulums, **changes: Any) -> TrainConfig:
    small = {"num_envs": 4096, "device": "cpu", "precision": "fp32", "log.tensorboard": False, "log.noise_scale": False}
    return override(ppo_ewma(env, **SETTINGS), {**small, **changes})


def test_physics_and_reward_are_gymnasiums() -> None:
    theirs = gymnasium.make("Pendulum-v1").unwrapped
    theirs.reset(seed=0)
    ours = Pendulums(2)
    ours.reset(seed=0)
    ours.time = torch.tensor([0, 50])
    theirs.state = np.array([float(ours.angle[1]), float(ours.speed[1])])  # type: ignore[attr-defined]
    for t in range(149):
        torque = torch.tensor([0.0, 2.5 * np.sin(t)])
        observation, reward, terminated, truncated, _ = ours.step(torque.unsqueeze(1))
        expected, expected_reward, *_ = theirs.step(torque[1:].numpy())
        np.testing.assert_allclose(observation[1] * torch.tensor([1, 1, 8]), expected, atol=2e-3)
        assert float(reward[1]) == pytest.approx(float(expected_reward), abs=5e-3)
        assert not terminated.any() and not truncated.any()
    last = ours.step(torch.zeros(2, 1))
    assert last[3].tolist() == [False, True]
    assert torch.equal(last[4]["final_obs"][0], last[0][0]) and not torch.equal(last[4]["final_obs"][1], last[0][1])


def test_thousands_of_instances_are_trained_on(tmp_path: Path) -> None:
    short = {"total_env_steps": 5 * 4096 * 16, "policy_epochs": 1, "value_epochs": 1}
    train(config(**short), tmp_path, seed=1, quiet=True)
    progress = read_progress(tmp_path / "progress.csv")
    assert progress["episodes"][-1] == pytest.approx(5 * 16 * 4096 / 200, rel=0.1)
    # begun at a random time of 200, the last episodes to end within 80 steps have almost 80, of a reward of -6 each
    assert -640 < progress["mean_episode_return_400"][-1] < -300
    assert progress["explained_variance"][-1] > progress["explained_variance"][0] + 0.02
    policy = load_policy(tmp_path, device="cpu")
    assert len(evaluate(policy, episodes=32, greedy=True).returns) == 32
    assert policy.act(np.zeros(3, np.float32)).shape == (1,)


def test_a_resumed_run_is_bitwise_that_of_one_that_never_stopped(tmp_path: Path) -> None:
    small = {"num_envs": 16, "reward.normalize": True}
    whole = config(**small, total_env_steps=6 * 256)
    train(whole, tmp_path / "whole", seed=1, quiet=True)
    train(override(whole, {"total_env_steps": 3 * 256}), tmp_path / "half", seed=1, quiet=True)
    resume(tmp_path / "half", total_env_steps=6 * 256, quiet=True)
    one, other = (load_policy(tmp_path / x, device="cpu").agent.state_dict() for x in ("whole", "half"))
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_an_object_is_trained_on_and_evaluated(tmp_path: Path) -> None:
    """As a simulator of which a process has only one."""
    env = Pendulums(32, final_observations=False)
    with pytest.warns(UserWarning, match="the value after a time limit is that before it"):
        train(config(env, num_envs=32, rollout_steps=256, total_env_steps=2 * 32 * 256), tmp_path, seed=1, quiet=True)
    policy = load_policy(tmp_path, device="cpu", env=env)  # type: ignore[arg-type]
    assert len(evaluate(policy, episodes=10).returns) == 10
