"""The adapter of environments of tensors: both manners of step, conversions, and what it refuses."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from anybatch.config.masks import ActionMask
from anybatch.config.schema import EnvConfig
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.envs.tensor import TensorVectorEnv
from anybatch.errors import ConfigError, EnvError
from anybatch.models.actions import ActionSpec
from anybatch.presets import ppo
from anybatch.runs.evaluation import evaluate, initial_policy


class Counting:
    """Observations count the steps of an episode; instance i ends after i + 2 steps, the odd ones by a time limit.

    ``manner`` is ``flags`` (terminated, truncated) or ``dones`` (done, and info["time_outs"]).
    """

    def __init__(self, num_envs: int, manner: str = "flags", **attributes: Any) -> None:
        self.num_envs, self.manner, self.device = num_envs, manner, "cpu"
        self.observation_space: Any = spaces.Box(0, 100, (1,), np.float64)
        self.action_space: Any = spaces.Discrete(3, start=4)
        self.actions: list[Tensor] = []
        self.seeds: list[int | None] = []
        self.odd = torch.arange(num_envs) % 2 == 1
        vars(self).update(attributes)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.time = torch.zeros(self.num_envs, dtype=torch.int64)
        return self.observe(), {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        self.actions.append(action)
        self.time = self.time + 1
        done = self.time == torch.arange(self.num_envs) + 2
        final, reward = self.observe(), self.time.float()
        self.time = torch.where(done, 0, self.time)
        info = {"final_obs": final}
        if self.manner == "dones":
            return self.observe(), reward, done.float(), {"time_outs": done & self.odd}
        return self.observe(), reward, done & ~self.odd, done & self.odd, info

    def observe(self) -> Any:
        return self.time.double().unsqueeze(1)


def made(num_envs: int = 3, **options: Any) -> tuple[TensorVectorEnv, Counting]:
    env = Counting(num_envs, **options)
    games = make(EnvConfig(id=environment_id(env)), num_envs, seed=7)
    assert isinstance(games, TensorVectorEnv)
    return games, env


@pytest.mark.parametrize("manner", ["flags", "dones"])
def test_both_manners_by_hand(manner: str) -> None:
    games, env = made(manner=manner)
    assert games.reset_tensors().tolist() == [[0.0]] * 3  # type: ignore[union-attr]
    steps = [games.step_tensors(torch.tensor([0, 1, 2])) for _ in range(4)]
    # instances of 2, 3 and 4 steps
    assert [s.observation.flatten().tolist() for s in steps] == [[1, 1, 1], [0, 2, 2], [1, 0, 3], [0, 1, 0]]  # type: ignore[union-attr]
    assert [s.terminated.tolist() for s in steps] == [
        [False, False, False],
        [True, False, False],
        [False, False, False],
        [True, False, True],
    ]
    assert [s.truncated.tolist() for s in steps] == [[False] * 3, [False] * 3, [False, True, False], [False] * 3]
    assert steps[0].observation.dtype == torch.float32  # type: ignore[union-attr]
    assert steps[0].terminated.dtype == torch.bool
    assert env.actions[0].tolist() == [4, 5, 6]  # Discrete from 4
    if manner == "flags":
        assert steps[2].final_observation.flatten().tolist() == [1.0, 3.0, 3.0]  # type: ignore[union-attr]
    else:
        assert steps[2].final_observation is None
    games.reset_tensors()
    assert env.seeds[0] is not None and env.seeds[1] is None


def test_arrays_for_evaluation() -> None:
    games, _ = made()
    assert np.array_equal(games.reset(), np.zeros((3, 1), np.float32))  # type: ignore[arg-type]
    steps = [games.step(np.array([0, 1, 2])) for _ in range(3)]
    assert steps[2].final_index.tolist() == [1] and steps[2].final_observation.tolist() == [[3.0]]  # type: ignore[union-attr]
    assert steps[2].reward.tolist() == [1, 3, 3] and steps[2].reward.dtype == np.float32
    assert steps[0].final_observation is None and steps[1].done.tolist() == [True, False, False]


@pytest.mark.parametrize("space", [spaces.Box(100, 200, (1,), np.uint8), spaces.MultiBinary(2), spaces.Discrete(3)])
def test_integer_actions_have_one_dtype_in_training_and_evaluation(space: spaces.Space[Any]) -> None:
    games, env = made(action_space=space)
    games.reset()
    spec = ActionSpec(games.action_space)
    action = torch.zeros(3, *spec.shape, dtype=torch.int64)
    games.step_tensors(spec.tensor_to_env(action))
    games.step(spec.to_env(action))
    first, second = env.actions
    assert first.dtype == second.dtype == torch.int64
    assert torch.equal(first, second)


def test_actions_stay_within_float64_bounds() -> None:
    games, env = made(action_space=spaces.Box(-0.1, 0.1, (1,), np.float64))
    games.reset()
    games.step_tensors(torch.full((3, 1), np.float32(0.1)))  # 0.10000000149 as float64
    assert env.actions[0].dtype == torch.float64 and float(env.actions[0].max()) == 0.1


def test_a_tuple_of_two_observations_may_come_without_info() -> None:
    pair = spaces.Tuple((spaces.Box(0, 100, (1,)), spaces.Box(0, 1, (2,))))
    games, env = made(observation_space=pair, observe=lambda: (torch.ones(3, 1), torch.zeros(3, 2)))
    env.reset = lambda: (torch.ones(3, 1), torch.zeros(3, 2))  # type: ignore[method-assign, assignment]
    observation = games.reset()
    assert isinstance(observation, dict) and [x.shape for x in observation.values()] == [(3, 1), (3, 2)]


@pytest.mark.parametrize("info", [False, True])
def test_a_tuple_that_ends_in_a_dict_is_not_taken_for_an_info(info: bool) -> None:
    space = spaces.Tuple((spaces.Box(0, 100, (1,)), spaces.Dict(a=spaces.Box(0, 1, (2,)))))
    games, env = made(observation_space=space)
    pair = (torch.ones(3, 1), {"a": torch.zeros(3, 2)})
    env.reset = lambda: (pair, {}) if info else pair  # type: ignore[method-assign, assignment]
    observation = games.reset()
    assert isinstance(observation, dict) and [x.shape for x in observation.values()] == [(3, 1), (3, 2)]


class Simulator(gymnasium.Env[Any, Any]):
    """A tensor environment as simulators register it: a gymnasium.Env."""

    def __init__(self, num_envs: int) -> None:
        inner = Counting(num_envs)
        vars(self).update(vars(inner))
        self.reset, self.step = inner.reset, inner.step  # type: ignore[method-assign, assignment]


def test_a_wrapper_that_hides_a_tensor_environment_is_named() -> None:
    wrapped = gymnasium.wrappers.OrderEnforcing(Simulator(3))
    with pytest.raises(ConfigError, match=r"env is a OrderEnforcing around a tensor environment, .*use env\.unwrapped"):
        environment_id(wrapped)
    assert environment_id(wrapped.unwrapped)

    def make_wrapped(num_envs: int) -> Any:
        return gymnasium.wrappers.OrderEnforcing(Simulator(num_envs))

    with pytest.raises(EnvError, match=r"returned a OrderEnforcing around a tensor environment.*use env\.unwrapped"):
        make(EnvConfig(id=environment_id(make_wrapped)), 3, 0)
    for make_one in (lambda: Simulator(3), lambda: wrapped):
        with pytest.raises(EnvError, match=r"is a tensor environment, .* function with the argument num_envs"):
            make(EnvConfig(id=environment_id(make_one)), 3, 0)


def test_rows_of_episodes_that_were_not_truncated_have_no_last_observation() -> None:
    games, env = made()
    games.reset()
    results = [torch.zeros(3, 1), torch.zeros(3), torch.zeros(3), torch.tensor([0, 1, 0])]
    last = torch.tensor([[torch.nan], [3.0], [torch.inf]])
    env.step = lambda action: (*results, {"final_obs": last})  # type: ignore[method-assign]
    assert games.step(np.zeros(3, np.int64)).final_observation.tolist() == [[3.0]]  # type: ignore[union-attr]
    last[1] = torch.nan
    with pytest.raises(EnvError, match=r"environment 1 of .* is not finite"):
        games.step(np.zeros(3, np.int64))


class Entries(Counting):
    def observe(self) -> Any:
        mask = torch.nn.functional.one_hot(self.time % 3, 3)
        return {"action_mask": mask.bool(), "kind": self.time % 2 + 1, "x": self.time.unsqueeze(1).half()}


ENTRIES = spaces.Dict(
    {"action_mask": spaces.Box(0, 1, (3,), np.int8), "kind": spaces.Discrete(2, start=1), "x": spaces.Box(0, 9, (1,))}
)


def test_entries_and_masks_are_converted() -> None:
    games = make(EnvConfig(id=environment_id(lambda num_envs: Entries(num_envs, observation_space=ENTRIES))), 2, 0)
    assert isinstance(games, TensorVectorEnv)
    assert isinstance(games.observation_space["action_mask"], ActionMask)  # type: ignore[index]
    games.reset_tensors()
    observation = games.step_tensors(torch.zeros(2, dtype=torch.int64)).observation
    assert isinstance(observation, dict)
    assert {key: (x.dtype, x.tolist()) for key, x in observation.items()} == {
        "action_mask": (torch.int8, [[0, 1, 0]] * 2),
        "kind": (torch.int64, [1, 1]),
        "x": (torch.float32, [[1.0]] * 2),
    }


def test_actions_of_a_box_are_copies_in_its_dtype() -> None:
    games, env = made(action_space=spaces.Box(-1, 1, (2,), np.float64))
    games.reset_tensors()
    action = torch.rand(3, 2)
    games.step_tensors(action)
    assert env.actions[0].dtype == torch.float64 and torch.equal(env.actions[0].float(), action)


@pytest.mark.parametrize(
    ("space", "received"),
    [
        # values 3 and 0 of each row: low -2 and 0 are added
        (spaces.Box(np.array([[-2, 0]]), np.array([[1, 3]]), dtype=np.int64), [[1, 0]]),
        (spaces.MultiDiscrete([[4, 4]], start=[[5, 6]]), [[8, 6]]),
        (spaces.MultiDiscrete([4, 4], start=[5, 6]), [8, 6]),
        (spaces.MultiDiscrete([4, 4], np.uint16, start=[5, 6]), [8, 6]),
    ],
)
def test_integers_have_the_shape_and_the_numbers_of_the_environment(space: Any, received: list[Any]) -> None:
    games, env = made(action_space=space)
    games.reset_tensors()
    games.step_tensors(ActionSpec(games.action_space).tensor_to_env(torch.tensor([[3, 0]] * 3)))
    assert env.actions[0].tolist() == [received] * 3


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"observe": lambda: np.zeros((2, 1))}, "is a ndarray, but must be a tensor"),
        ({"observe": lambda: torch.zeros(2)}, r"has shape \(2,\), but its space has \(2, 1\)"),
        ({"step": lambda action: (1, 2, 3)}, "must return .*, but returned 3 values"),
        ({"step": lambda action: (torch.zeros(2, 1), torch.zeros(2, 1), *[torch.zeros(2)] * 2, {})}, "as reward"),
    ],
)
def test_breaches_are_named(attributes: dict[str, Any], sentence: str) -> None:
    games, _ = made(2, **attributes)
    with pytest.raises(EnvError, match=sentence):
        (games.reset_tensors(), games.step_tensors(torch.zeros(2, dtype=torch.int64)))


def test_numbers_are_checked_once_a_rollout() -> None:
    games, _ = made(2)
    observation, params, reward = torch.zeros(2, 5, 1), torch.zeros(2, 5, 3), torch.zeros(2, 5)
    games.check(observation, params, reward)
    reward[1, 3] = torch.nan
    with pytest.raises(EnvError, match=r"The reward of environment 1 of .* is nan"):
        games.check(observation, params, reward)
    observation[1, 3] = torch.inf
    with pytest.raises(EnvError, match=r"The observation of environment 1 of .* is not finite: it is inf at \[0\]"):
        games.check(observation, params, reward)
    params[0, 2] = torch.nan  # the first one: the environment is not to blame
    games.check(observation, params, reward)
    masked = make(EnvConfig(id=environment_id(lambda num_envs: Entries(num_envs, observation_space=ENTRIES))), 2, 0)
    rows = {"action_mask": torch.ones(2, 5, 3), "kind": torch.zeros(2, 5).long(), "x": torch.zeros(2, 5, 1)}
    rows["action_mask"][0, 4] = 0
    with pytest.raises(EnvError, match=r"action mask of environment 0 of .* allows nothing"):
        masked.check(rows, torch.zeros(2, 5, 3), torch.zeros(2, 5))  # type: ignore[attr-defined]


IMAGE = spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "good", "bad", "message"),
    [
        (spaces.Discrete(3, start=2), [2, 4], [2, 5], r"environment 1 of .* is 5, but its space allows 2 to 4"),
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [0, 0]], [[1, 2], [2, 0]], r"is 2 at \[0\], .* 0 to 1"),
        (spaces.MultiBinary(2), [[0, 1], [1, 0]], [[0, 1], [1, 256]], r"environment 1 of .* at \[1\], .* 0 to 1"),
        (spaces.Box(0, 9, (2,), np.int16), [[0, 9], [5, 5]], [[0, 9], [-1, 5]], r"is -1 at \[0\], .* 0 to 9"),
        (spaces.Box(1, 9, (1,), np.uint16), [[1], [9]], [[1], [0]], r"is 0 at \[0\], .* 1 to 9"),
    ],
)
def test_integers_outside_of_their_space(space: Any, good: list[Any], bad: list[Any], message: str) -> None:
    games, env = made(2, observation_space=space)
    params, reward = torch.zeros(2, 3, 3), torch.zeros(2, 3)
    env.observe = lambda: torch.tensor(good)  # type: ignore[method-assign]
    fine = games.reset_tensors()
    games.check(torch.stack([fine] * 3, dim=1), params, reward)  # type: ignore[list-item]
    games.reset()
    env.observe = lambda: torch.tensor(bad)  # type: ignore[method-assign]
    wrong = games.reset_tensors()
    with pytest.raises(EnvError, match=message):
        games.check(torch.stack([fine, wrong, fine], dim=1), params, reward)  # type: ignore[list-item]
    with pytest.raises(EnvError, match=message):
        games.reset()


def test_a_space_of_all_numbers_takes_no_wider_dtype() -> None:
    games, env = made(2, observation_space=IMAGE)
    env.observe = lambda: torch.tensor([[0, 255], [1, 2]])  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=r"has dtype torch.int64, but its space has uint8"):
        games.reset_tensors()
    env.observe = lambda: torch.tensor([[False, True]] * 2)  # type: ignore[method-assign]
    assert games.reset_tensors().tolist() == [[0, 1]] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [0.5, 2, 256, float("nan")])
def test_masks_are_1_or_0(number: float) -> None:
    class Odd(Entries):
        def observe(self) -> Any:
            mask = torch.tensor([[1, 0, 1], [1, number, 0]])
            return {**super().observe(), "action_mask": mask}

    games = make(EnvConfig(id=environment_id(lambda num_envs: Odd(num_envs, observation_space=ENTRIES))), 2, 0)
    rows = {key: x.unsqueeze(1) for key, x in games.reset_tensors().items()}  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match=r"environment 1 of .*, entry 'action_mask', has a number other than 1 and 0"):
        games.check(rows, torch.zeros(2, 1, 3), torch.zeros(2, 1))  # type: ignore[attr-defined]


def test_an_object_has_its_number_and_is_not_closed() -> None:
    env = Counting(3, close=lambda: pytest.fail("closed"))
    assert environment_id(env) == environment_id(env) != environment_id(Counting(3))
    make(EnvConfig(id=environment_id(env)), 3, 0).close()
    with pytest.raises(ConfigError, match=r"has 3 environments: set env.num_envs 3"):
        make(EnvConfig(id=environment_id(env)), 2, 0)
    with pytest.raises(ConfigError, match="is a tensor environment, whose info is not read"):
        make(EnvConfig(id=environment_id(env), info_keys=("x",)), 3, 0)
    with pytest.raises(ConfigError, match="is a tensor environment, whose steps return before they are done"):
        make(EnvConfig(id=environment_id(env), step_timeout=1.0), 3, 0)
    with pytest.raises(EnvError, match="takes a single seed"):
        make(EnvConfig(id=environment_id(lambda num_envs: Counting(num_envs))), 4, [1, 2])


def test_an_object_of_fewer_instances_plays_every_episode() -> None:
    policy = initial_policy(ppo(Counting(3), num_envs=3, device="cpu"))
    # two rounds: instance i plays episodes of i + 2 steps, and the first two play one more
    assert sorted(evaluate(policy, None, 5, num_envs=5).lengths) == [2, 2, 3, 3, 4]


def test_a_gymnasium_vector_with_a_device_gives_tensors() -> None:
    """As ManiSkill's and Isaac Lab's do: spaces of one instance are called single."""
    box = spaces.Box(0, 100, (1,))
    single = {"single_observation_space": box, "single_action_space": spaces.Discrete(2)}
    games, _ = made(2, observation_space=gymnasium.vector.utils.batch_space(box, 2), **single)
    assert games.observation_space == box and games.action_space == spaces.Discrete(2)
