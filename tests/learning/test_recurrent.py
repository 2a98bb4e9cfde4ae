"""Recurrent policies: a task that needs memory, resuming bit for bit, acting with a state, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError
from anybatch.presets import ppg, ppo, ppo_ewma
from anybatch.reproduce.stacked import run_stacked
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train


class Recall(gymnasium.Env[Any, Any]):
    """One of two cues is shown at first; the last of 8 actions has to tell which."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    length = 8

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(2))
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        end = self.t == self.length
        return self._observation(), float(end and action == self.cue), end, False, {}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(3, np.float32)
        observation[self.cue] = self.t == 0
        observation[2] = self.t == self.length - 1
        return observation


def config(preset: Any = ppo_ewma, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "num_envs": 32,
        "rollout_steps": 32,
        "minibatches": 4,
        "policy_epochs": 4,
        "value_epochs": 4,
        "discount": 0.95,
        "step_size": 3e-3,
        "device": "cpu",
        "precision": "fp32",
        "total_env_steps": 25 * 1024,
        "log.tensorboard": False,
        "log.noise_scale": False,
        "model.recurrent": "gru",
        "model.recurrent_width": 32,
        "model.options": {"width": 32, "depth": 1},
    }
    built: TrainConfig = preset(Recall, **{**settings, **changes})
    return built


def test_a_task_that_needs_memory_is_learned_with_it_alone(tmp_path: Path) -> None:
    train(config(), tmp_path / "gru", seed=1, quiet=True)
    train(config(**{"model.recurrent": "none"}), tmp_path / "none", seed=1, quiet=True)
    gru, none = (read_progress(tmp_path / name / "progress.csv") for name in ("gru", "none"))
    assert gru["mean_episode_return_400"][-1] > 0.95 and none["mean_episode_return_400"][-1] < 0.6
    # on fresh data the ratio of the first step is 1: the sequence was unrolled as it was acted
    assert max(gru["max_log_ratio"]) < 1e-4

    policy = load_policy(tmp_path / "gru", device="cpu")
    assert evaluate(policy, episodes=100, num_envs=10, greedy=True).mean > 0.97
    env, memory, returns = Recall(), policy.memory(), []
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        memory.reset()
        done = False
        while not done:
            observation, reward, done, _, _ = env.step(policy.act(observation, greedy=True, memory=memory))
        returns.append(reward)
    assert np.mean(returns) > 0.9
    with pytest.raises(ConfigError, match=r"the policy is recurrent: create memory = policy.memory"):
        policy.act(observation)


@pytest.mark.parametrize("changes", [{"model.recurrent": "lstm", "architecture": "dual"}, {"num_envs": 2}])
def test_a_resumed_run_is_bitwise_that_of_one_that_never_stopped(changes: dict[str, Any], tmp_path: Path) -> None:
    """Rollouts of 26 steps end inside episodes, whose state the checkpoint has; with 2 environments in 2 pieces."""
    small = {"num_envs": 4, "rollout_steps": 26, "total_env_steps": 6 * 104, "reward.normalize": False, **changes}
    train(config(**small), tmp_path / "whole", seed=3, quiet=True)
    train(config(**{**small, "total_env_steps": 3 * 104}), tmp_path / "half", seed=3, quiet=True)
    resume(tmp_path / "half", total_env_steps=6 * 104, quiet=True)
    one, other = (load_policy(tmp_path / x, device="cpu").agent.state_dict() for x in ("whole", "half"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


STALE = {"rollout.source.kind": "delayed", "rollout.source.delay": 1}


@pytest.mark.parametrize(
    "changes", [{"proximal": "recent", **STALE}, {"objective": "kl"}, {"architecture": "detach", "value_epochs": 2}]
)
def test_every_proximal_policy_unrolls_from_the_stored_state(changes: dict[str, Any], tmp_path: Path) -> None:
    train(config(**{"total_env_steps": 4 * 1024, **changes}), tmp_path, seed=1, quiet=True)
    progress = read_progress(tmp_path / "progress.csv")
    assert all(0 <= x < 0.1 for x in progress["kl_proximal"]) and np.isfinite(progress["value_loss"]).all()


def test_what_is_refused() -> None:
    cases: list[tuple[TrainConfig, str]] = [
        (config(ppg, value_epochs=1, policy_epochs=1), "PPG trains on observations without their history"),
        (config(ppo, **{"optimizer.shuffle": "samples"}), "splits trajectories"),
        (config(compile=True), "would unroll every step"),
        (config(**{"model.recurrent_width": 0}), "model.recurrent_width is 0, but must be an integer of at least 1"),
    ]
    for wrong, sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            validate(wrong)
    with pytest.raises(ConfigError, match=r"model.recurrent is gru, but stacked runs need none; use launcher single"):
        run_stacked([config()], [1])
