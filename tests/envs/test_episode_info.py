"""Numbers from info, by key: hand-worked means, in every family of environments, and keys that do not exist."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from anybatch.callbacks import StopAt
from anybatch.cli.main import main
from anybatch.config.io import from_dict, override, to_dict
from anybatch.config.schema import EnvConfig, TrainConfig
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.errors import ConfigError, EnvError
from anybatch.presets import ppo
from anybatch.runs.checkpoint import load_newest
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train


class Counted(gymnasium.Env[np.ndarray, int]):
    """Episodes of 4 steps; the info at the end of episode k (from 1) has square k^2, and half k/2 if k is even."""

    def __init__(self, kind: str = "number") -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.kind, self.episode = kind, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), {"square": -1.0, "at_reset": 1}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        info: dict[str, Any] = {"square": -1.0, "array": np.zeros(2), "text": "x"}
        if self.steps == 4:
            info["square"] = self.episode**2
            if self.episode % 2 == 0:
                info["half"] = np.float32(self.episode / 2)
        return np.zeros(1, np.float32), 1.0, self.steps == 4, False, info


def vector(num_envs: int, mode: str = "SAME_STEP") -> SyncVectorEnv:
    return SyncVectorEnv([Counted] * num_envs, autoreset_mode=AutoresetMode[mode])


class SameStep(SyncVectorEnv):
    """A subclass keeps resetting in the same step, and so reports the last infos as final_info."""


def same_step(num_envs: int) -> SameStep:
    return SameStep([Counted] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def small(env: Any, *keys: str, **changes: Any) -> TrainConfig:
    config = ppo(
        env,
        num_envs=2,
        steps=8,
        minibatches=2,
        total_env_steps=3 * 16,
        precision="fp32",
        device="cpu",
        tensorboard=False,
        model={"encoder": "mlp", "options": {"width": 4, "depth": 1}},
        **{"env.info_keys": keys},
    )
    return override(config, changes)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loop": (Counted, {}),
    "processes": (Counted, {"env.options": {"vectorization": "async"}}),
    "vector": (vector, {}),
    "vector, disabled": (vector, {"env.options": {"mode": "DISABLED"}}),
    "vector, same step": (same_step, {}),
    "asynchronous": (Counted, {"rollout.source.kind": "asynchronous", "policy.proximal": "ewma"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_hand_worked_means(kind: str, tmp_path: Path) -> None:
    env, changes = KINDS[kind]
    train(small(env, "square", "half", **changes), tmp_path / "run", quiet=True)
    columns = read_progress(tmp_path / "run" / "progress.csv")
    # an iteration of 8 steps ends 2 episodes in each of the 2 environments: squares 1 4 | 9 16 | 25 36
    assert columns["info_square"] == [5 / 2, 30 / 4, 91 / 6]
    assert columns["info_half"] == [1, 3 / 2, 2]  # 1 | 2 | 3, of the episodes that have one
    assert columns["episodes"] == [4, 8, 12]


def test_the_training_environment_by_its_id_keeps_the_keys(tmp_path: Path) -> None:
    name = f"{__name__}:Counted"
    train(small(name, "square"), tmp_path / "run", quiet=True)
    policy = load_policy(tmp_path / "run")
    squares = [[1.0, 1.0, 4.0, 4.0]] * 2  # of 2 episodes in each of 2 environments
    assert [sorted(evaluate(policy, env, 4).info["square"]) for env in (None, name)] == squares
    assert evaluate(policy, f"{__name__}:same_step", 4).info == {}  # another environment has its own


def test_the_mean_is_of_the_last_100_episodes_and_is_resumed(tmp_path: Path) -> None:
    config = small(Counted, "square", total_env_steps=16 * 40)
    train(config, tmp_path / "whole", quiet=True)
    squares = read_progress(tmp_path / "whole" / "progress.csv")["info_square"]
    assert squares[-1] == sum(k * k for k in range(31, 81)) / 50  # both environments have ended 80 episodes
    train(config, tmp_path / "run", 0, [StopAt(17, "iteration")], quiet=True)
    resume(tmp_path / "run", total_env_steps=config.total_env_steps, quiet=True)
    assert read_progress(tmp_path / "run" / "progress.csv")["info_square"] == squares
    run = load_newest(tmp_path / "run" / "checkpoints")[0]["run"]
    assert run["info"]["square"] == [float(k * k) for k in range(31, 81) for _ in range(2)]


def test_evaluations_have_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(Counted, "square", **{"eval.every": 32, "eval.episodes": 3, "eval.num_envs": 1})
    train(config, tmp_path / "run", quiet=True)
    found = read_progress(tmp_path / "run" / "progress.csv")["eval_info_square"]
    assert math.isnan(found[0]) and found[1] == (1 + 4 + 9) / 3
    assert evaluate(load_policy(tmp_path / "run"), episodes=2, num_envs=1).info == {"square": [1, 4]}
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--episodes", "2", "--num-envs", "1"]) == 0
    assert capsys.readouterr().out == "mean return: 4.00 +- 0.00 (2 episodes)\nmean square: 2.5\n"


@pytest.mark.parametrize("kind", ["loop", "vector", "vector, same step"])
def test_a_key_that_never_appears_is_one_warning(kind: str, tmp_path: Path) -> None:
    env, changes = KINDS[kind]
    config = small(env, "square", "squares", **changes, total_env_steps=1000)
    with pytest.warns(UserWarning, match="info_keys") as caught:
        train(config, tmp_path / "run", quiet=True)
    assert [str(warning.message) for warning in caught] == [
        f"env.info_keys has 'squares', which the info of {config.env.id} lacked at the end of 20 episodes; "
        "it had array, half, square, text"
    ]
    assert read_progress(tmp_path / "run" / "progress.csv")["info_square"][-1] > 0
    with pytest.warns(UserWarning, match="'at_reset', which the info"):
        train(small(env, "at_reset", **changes, total_env_steps=1000), tmp_path / "reset", quiet=True)


@pytest.mark.parametrize("key", ["array", "text"])
def test_what_is_no_number_is_one_sentence(key: str, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=rf"^info\['{key}'\] of environment 0 of .* but env\.info_keys needs numbers$"):
        train(small(Counted, key), tmp_path / "run", quiet=True)


@pytest.mark.procgen
def test_envpool() -> None:
    games = make(EnvConfig("envpool:CartPole-v1", info_keys=("elapsed_step",)), 2, 0)
    lengths, length = [], np.zeros(2)
    games.reset()
    while len(lengths) < 5:
        step = games.step(np.ones(2, np.int64))
        length += 1
        assert (step.episode_info is not None) == step.done.any()
        for index in np.flatnonzero(step.done):
            assert step.episode_info is not None and step.episode_info["elapsed_step"][index] == length[index]
            lengths.append(length[index])
            length[index] = 0
    games.close()


def test_the_field_is_kept_in_files() -> None:
    config = small(Counted, "a", "b")
    assert config.env.info_keys == ("a", "b")
    assert to_dict(config)["env"]["info_keys"] == ["a", "b"]
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ConfigError, match="info_keys"):
        override(config, {"env.info_keys": "a"})
    assert environment_id(Counted) == config.env.id
