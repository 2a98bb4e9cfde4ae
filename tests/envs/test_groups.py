"""Environments in groups do what they do together."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from anybatch import resume, train
from anybatch.config.schema import EnvConfig, TrainConfig
from anybatch.config.validation import validate
from anybatch.envs.base import Steps
from anybatch.envs.factory import make
from anybatch.envs.groups import GroupedEnv, groups_of
from anybatch.errors import ConfigError, EnvError
from anybatch.models.actions import ActionSpec
from anybatch.presets import override, ppo_ewma
from anybatch.runs.build import build
from anybatch.runs.progress import read_progress
from anybatch.sampling.rollout import Rollout, Sampler, collect
from anybatch.system.signals import Interrupts

CPU = torch.device("cpu")


def skip_without_envpool() -> None:
    """Without importing it, since anybatch has to put Qt in place first."""
    if importlib.util.find_spec("envpool") is None:
        pytest.skip("needs EnvPool")


def config(env: str = "gym:Pendulum-v1", **changes: Any) -> TrainConfig:
    made = ppo_ewma(env, num_envs=4, rollout_steps=32, total_env_steps=4 * 32 * 4, device="cpu")
    return override(made, changes)


@pytest.mark.parametrize("env", ["gym:Pendulum-v1", "envpool:CartPole-v1"])
@pytest.mark.parametrize("groups", [2, 4])
def test_same_rollouts(env: str, groups: int, tmp_path: Path) -> None:
    """And so the same seeds for the same environments; Pendulum's episodes are cut after 200 steps."""
    if env.startswith("envpool"):
        skip_without_envpool()

    def rollouts(count: int) -> list[Rollout]:
        parts = build(config(env, **{"env.groups": count, "rollout.steps": 256}), 1, segments=tmp_path)
        assert len(groups_of(parts.env)) == count
        sampled = [parts.source.next(0) for _ in range(2)]
        parts.env.close()
        return sampled

    for mine, theirs in zip(rollouts(groups), rollouts(1), strict=True):
        assert theirs.done.any()
        for name, tensor in mine.state_dict().items():
            if isinstance(tensor, Tensor):  # batches of another size round differently
                torch.testing.assert_close(tensor, getattr(theirs, name), rtol=1e-3, atol=1e-3, msg=name)


class Logged:
    """Two environments that write down when they are stepped; observations say which they are."""

    num_envs = 2
    bootstrap_truncated = True
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def observation(self) -> np.ndarray:
        return np.full((2, 4), ord(self.name), dtype=np.float32)

    def reset(self) -> np.ndarray:
        return self.observation()

    def step(self, action: np.ndarray) -> Steps:
        self.log.append(f"step {self.name}")
        none = np.zeros(2, dtype=bool)
        # the second one is cut in every step, and bootstrapped with its own value
        cut = np.array([False, True])
        return Steps(self.observation(), np.zeros(2, np.float32), none, cut, np.array([1]), self.observation()[1:])


class Policy:
    """Writes down when it is asked; the value is the observation's first number."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        self.log.append(f"ask {chr(int(observation[0, 0]))}")
        return torch.zeros(len(observation), 2), self.value(observation)

    def value(self, observation: Tensor) -> Tensor:
        return observation[:, 0]


def test_a_group_is_asked_about_before_the_next_one_steps() -> None:
    log: list[str] = []
    env = GroupedEnv([Logged(name, log) for name in "AB"])  # type: ignore[list-item]
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(env, ActionSpec(env.action_space), bootstrap_truncated=True, generator=generator)
    rollout = collect(sampler, Policy(log), 3, device=CPU, interrupts=Interrupts())
    begin, turn = ["ask A", "ask B"], ["step A", "ask A", "step B", "ask B"]
    assert log == [*begin, *turn, *turn, "step A", "step B"]
    assert isinstance(rollout.observation, Tensor)
    assert rollout.observation[:, :, 0].tolist() == [[65] * 3] * 2 + [[66] * 3] * 2
    assert rollout.done.tolist() == [[False] * 3, [True] * 3] * 2
    assert rollout.next_value.tolist() == [[65] * 3] * 2 + [[66] * 3] * 2


def test_stepping_all_at_once() -> None:
    grouped, whole = (make(EnvConfig("gym:Pendulum-v1"), 4, 3, groups=groups) for groups in (2, 1))
    np.testing.assert_array_equal(grouped.reset(), whole.reset())
    action = np.random.default_rng(0).uniform(-2, 2, (4, 1)).astype(np.float32)
    for _ in range(200):
        mine, theirs = grouped.step(action), whole.step(action)
        for name in ("observation", "reward", "terminated", "truncated", "final_index"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    assert mine.final_index.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(mine.final_observation, theirs.final_observation)
    grouped.close()
    whole.close()


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 2), (4, 1)])
def test_state_goes_from_groups_to_groups(before: int, after: int) -> None:
    one, other = (make(EnvConfig("gym:CartPole-v1"), 4, seed, groups=g) for seed, g in ((1, before), (2, after)))
    action = np.array([0, 1, 0, 1])
    one.reset()
    one.step(action)
    state = one.save_state()
    assert state is not None
    other.load_state(state)
    np.testing.assert_array_equal(other.step(action).observation, one.step(action).observation)
    with pytest.raises(EnvError, match=r"is of 4 environments, and these are 2: env\.num_envs"):
        make(EnvConfig("gym:CartPole-v1"), 2, 0, groups=2).load_state(state)


def test_environments_that_keep_their_state_to_themselves() -> None:
    skip_without_envpool()
    assert make(EnvConfig("envpool:CartPole-v1"), 4, 1, groups=2).save_state() is None


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    short = config("gym:CartPole-v1", **{"env.groups": 2})
    train(short, tmp_path / "whole", seed=1, quiet=True)
    train(override(short, {"total_env_steps": 4 * 32 * 2}), tmp_path / "half", seed=1, quiet=True)
    resume(tmp_path / "half", total_env_steps=4 * 32 * 4, quiet=True)
    whole, half = (read_progress(tmp_path / name / "progress.csv") for name in ("whole", "half"))
    for name in ("policy_loss", "value_loss", "mean_episode_return"):
        np.testing.assert_array_equal(whole[name], half[name])


@pytest.mark.parametrize("groups", [0, 3, 5, 8])
def test_groups_must_be_equal(groups: int, tmp_path: Path) -> None:
    allowed = "divide .* 4" if groups else "be an integer of at least 1"
    with pytest.raises(ConfigError, match=rf"env\.groups is {groups}, but must {allowed}"):
        build(validate(config(**{"env.groups": groups})), 1, segments=tmp_path)
    with pytest.raises(ConfigError, match=rf"env\.groups is {groups}, but must divide the 4 environments"):
        make(EnvConfig("gym:CartPole-v1"), 4, 0, groups=groups)


class Closing(Logged):
    """One of two that cannot be closed."""

    def close(self) -> None:
        self.log.append(f"close {self.name}")
        if self.name == "B":
            raise EnvError("stuck")


def test_all_groups_are_closed() -> None:
    log: list[str] = []
    with pytest.raises(EnvError, match="stuck"):
        GroupedEnv([Closing(name, log) for name in "ABC"]).close()  # type: ignore[list-item]
    assert sorted(log) == ["close A", "close B", "close C"]


class Counting(gymnasium.vector.VectorEnv):  # type: ignore[type-arg]
    """A vector environment with a state of its own: the observation counts the steps."""

    metadata: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.count = num_envs, 0.0
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
        self.single_action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.full((self.num_envs, 1), self.count, np.float32), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self.count += 1
        none = np.zeros(self.num_envs, bool)
        return self.reset()[0], np.zeros(self.num_envs), none, none, {}

    def get_state(self) -> float:
        return self.count

    def set_state(self, state: float) -> None:
        self.count = state


def counting(num_envs: int) -> Counting:
    return Counting(num_envs)


def test_vector_environments_keep_a_state_for_each_group() -> None:
    one, other = (make(EnvConfig(f"{__name__}:counting"), 4, 0, groups=2) for _ in range(2))
    one.reset()
    for _ in range(3):
        one.step(np.zeros(4, np.int64))
    state = one.save_state()
    assert state == {"groups": [{"env": 3.0}, {"env": 3.0}]}
    other.load_state(state)
    assert other.step(np.zeros(4, np.int64)).observation.tolist() == [[4.0]] * 4  # type: ignore[union-attr]
    with pytest.raises(EnvError, match=r"not of 4 groups .*env\.groups"):
        make(EnvConfig(f"{__name__}:counting"), 4, 0, groups=4).load_state(state)


@pytest.mark.parametrize("more", [{"env.step_timeout": 60.0}, {"rollout.source.kind": "asynchronous"}])
def test_groups_with_other_settings(more: dict[str, Any], tmp_path: Path) -> None:
    """Asynchronous sampling one rollout ahead, with a schedule that does not depend on time."""
    if "rollout.source.kind" in more:
        more = {**more, "rollout.source.deterministic": True}
    logs = []
    for groups in (1, 2):
        train(config("gym:CartPole-v1", **{"env.groups": groups, **more}), tmp_path / str(groups), seed=1, quiet=True)
        logs.append(read_progress(tmp_path / str(groups) / "progress.csv"))
    for name in ("policy_loss", "value_loss", "mean_episode_return"):
        np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=1e-3, atol=1e-5)
