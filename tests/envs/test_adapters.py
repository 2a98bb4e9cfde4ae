"""Gymnasium environments of every kind, through the one interface."""

from __future__ import annotations

import io
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from anybatch.config.schema import EnvConfig
from anybatch.envs.base import Steps, derive_seeds
from anybatch.envs.factory import make
from anybatch.envs.factory import spaces as spaces_of
from anybatch.envs.registry import environment_id
from anybatch.errors import ConfigError, EnvError


class Counting(gymnasium.Env):
    """Observation: steps taken in this episode; reward: 10 * episode + step; ends after `length` steps."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3, truncate: bool = True) -> None:
        self.length, self.truncate = length, truncate
        self.step_index, self.episode = 0, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.step_index, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.step_index < self.length, "stepped after the end"
        self.step_index += 1
        end = self.step_index == self.length
        observation = np.array([self.step_index], np.float32)
        return observation, 10.0 * self.episode + self.step_index, end and not self.truncate, end and self.truncate, {}


def counting(length: int = 3, truncate: bool = True) -> gymnasium.Env:
    return Counting(length, truncate)


def counting_vector(num_envs: int, mode: str, kind: str = "sync") -> gymnasium.vector.VectorEnv:
    """Environments with episodes of 2, 3, 4, ... steps, the odd ones truncated."""
    makers = [lambda i=i: Counting(2 + i, i % 2 == 1) for i in range(num_envs)]
    cls = SyncVectorEnv if kind == "sync" else AsyncVectorEnv
    return cls(makers, autoreset_mode=AutoresetMode[mode])


class Foreign(SyncVectorEnv):
    """Not Gymnasium's own class once wrapped in `unwrapped`."""

    @property
    def unwrapped(self) -> Any:
        return object()


def foreign(num_envs: int) -> gymnasium.vector.VectorEnv:
    return Foreign([Counting] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def unshared(num_envs: int) -> gymnasium.vector.VectorEnv:
    return AsyncVectorEnv([Counting] * num_envs, shared_memory=False, autoreset_mode=AutoresetMode.NEXT_STEP)


class Odd(gymnasium.Env):
    """Whatever spaces and values a test wants."""

    def __init__(self, observation_space: Any, observation: Any, action_space: Any = None, reward: Any = 0.0) -> None:
        self.observation_space, self.observation, self.reward = observation_space, observation, reward
        self.action_space = action_space or spaces.Discrete(2)
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        self.actions.append(action)
        return self.observation, self.reward, False, False, {}


def odd(*args: Any, **kwargs: Any) -> Any:
    return make(EnvConfig(id=environment_id(lambda: Odd(*args, **kwargs))), 2, 0)


def run(env: Any, steps: int) -> list[Steps]:
    env.reset()
    return [env.step(np.zeros(env.num_envs, np.int64)) for _ in range(steps)]


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or np.array_equal(a, b)


class TestNoPhantomRows:
    def test_by_hand(self) -> None:
        env = make(EnvConfig(id=environment_id(counting), options={"length": 3}), 1, 0)
        assert env.reset().tolist() == [[0.0]]
        steps = [env.step(np.array([0])) for _ in range(7)]
        assert [s.observation.item() for s in steps] == [1, 2, 0, 1, 2, 0, 1]
        assert [s.reward.item() for s in steps] == [1, 2, 3, 11, 12, 13, 21]
        assert [bool(s.truncated[0]) for s in steps] == [False, False, True] * 2 + [False]
        assert not any(s.terminated[0] for s in steps)
        assert [s.final_observation is None for s in steps] == [True, True, False] * 2 + [True]
        assert steps[2].final_observation.tolist() == [[3.0]] and steps[2].final_index.tolist() == [0]
        assert steps[0].reward.dtype == np.float32 and steps[2].final_index.dtype == np.int64

    def test_terminated_has_no_final_observation(self) -> None:
        env = make(EnvConfig(id=environment_id(counting), options={"length": 2, "truncate": False}), 2, 0)
        steps = run(env, 4)
        assert all(s.final_observation is None and len(s.final_index) == 0 for s in steps)
        assert [s.terminated.tolist() for s in steps] == [[False] * 2, [True] * 2] * 2

    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
    def test_all_autoreset_modes_give_the_same_stream(self, mode: str, kind: str) -> None:
        env = make(EnvConfig(id=environment_id(counting_vector), options={"mode": mode, "kind": kind}), 4, 0)
        steps = run(env, 25)
        env.close()
        step = np.zeros(4, int)
        episode = np.zeros(4, int)
        lengths, truncates = np.arange(2, 6), np.arange(4) % 2 == 1
        for s in steps:  # worked out from the environments' definition
            step += 1
            assert s.reward.tolist() == (10.0 * episode + step).tolist()
            end = step == lengths
            assert s.done.tolist() == end.tolist()
            assert s.truncated.tolist() == (end & truncates).tolist()
            assert s.final_index.tolist() == np.flatnonzero(end & truncates).tolist()
            if len(s.final_index):
                assert s.final_observation[:, 0].tolist() == lengths[end & truncates].tolist()
            step[end], episode[end] = 0, episode[end] + 1
            assert s.observation[:, 0].tolist() == step.tolist()

    def test_async_option_equals_the_loop(self) -> None:
        streams = []
        for how in ("sync", "async"):
            env = make(EnvConfig(id="gym:CartPole-v1", options={"vectorization": how, "max_episode_steps": 9}), 2, 3)
            streams.append([env.reset(), *run(env, 40)])
            env.close()
        for a, b in zip(streams[0][1:], streams[1][1:], strict=True):
            assert same(a.observation, b.observation) and same(a.truncated, b.truncated)
            assert same(a.final_observation, b.final_observation)

    def test_earlier_steps_are_not_overwritten(self) -> None:
        def reusing(num_envs: int) -> gymnasium.vector.VectorEnv:
            return SyncVectorEnv([Counting] * num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)

        env = make(EnvConfig(id=environment_id(reusing)), 3, 0)
        first = env.reset()
        kept = first.copy()
        env.step(np.zeros(3, np.int64))
        assert np.array_equal(first, kept)

    @pytest.mark.parametrize("maker", [foreign, unshared])
    def test_refuses_what_cannot_be_reset_one_by_one(self, maker: Any) -> None:
        with pytest.raises(EnvError, match=r"step after an episode's end.*SAME_STEP.*DISABLED"):
            make(EnvConfig(id=environment_id(maker)), 2, 0)

    def test_refuses_what_does_not_say_how_it_resets(self) -> None:
        def silent(num_envs: int) -> Any:
            env = SyncVectorEnv([Counting] * num_envs)
            env.metadata = {}
            return env

        with pytest.raises(EnvError, match="does not declare its autoreset mode"):
            make(EnvConfig(id=environment_id(silent)), 2, 0)


class TestSpaces:
    def test_discrete_starts_at_zero_inside(self) -> None:
        env = odd(spaces.Discrete(4, start=3), 5, spaces.Discrete(3, start=-1))
        assert env.observation_space == spaces.Discrete(4) and env.action_space == spaces.Discrete(3)
        observation = env.reset()
        assert observation.tolist() == [2, 2] and observation.dtype == np.int64
        env.step(np.array([0, 2]))
        assert [e.unwrapped.actions for e in env._envs] == [[-1], [1]]

    def test_dict_of_image_vector_and_discrete(self) -> None:
        space = spaces.Dict(
            image=spaces.Box(0, 255, (8, 8, 3), np.uint8),
            speed=spaces.Box(-1, 1, (2,), np.float64),
            gear=spaces.Discrete(5),
        )
        env = odd(space, {"image": np.full((8, 8, 3), 7, np.uint8), "speed": np.array([0.5, -0.5]), "gear": 4})
        observation = env.reset()
        assert {k: (v.shape, v.dtype.name) for k, v in observation.items()} == {
            "image": ((2, 8, 8, 3), "uint8"),
            "speed": ((2, 2), "float32"),
            "gear": ((2,), "int64"),
        }
        assert env.observation_space["speed"].dtype == np.float32
        assert env.render().shape == (8, 8, 3) and (env.render() == 7).all()

    @pytest.mark.parametrize("kind", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
    def test_dict_final_observation(self, kind: str) -> None:
        class Pair(Counting):
            observation_space = spaces.Dict(a=spaces.Box(0, 9, (1,)), b=spaces.Discrete(10))

            def reset(self, **kwargs: Any) -> Any:
                return {"a": super().reset(**kwargs)[0], "b": 0}, {}

            def step(self, action: int) -> Any:
                observation, *rest = super().step(action)
                return ({"a": observation, "b": int(observation[0])}, *rest)

        def vector(num_envs: int) -> Any:
            return SyncVectorEnv([Pair] * num_envs, autoreset_mode=AutoresetMode[kind])

        for env in (make(EnvConfig(id=environment_id(vector)), 2, 0), make(EnvConfig(id=environment_id(Pair)), 2, 0)):
            last = run(env, 3)[-1]
            assert last.observation["b"].tolist() == [0, 0]
            assert last.final_observation["a"].tolist() == [[3.0], [3.0]] and last.final_observation["b"].tolist() == [
                3,
                3,
            ]

    @pytest.mark.parametrize(
        ("action_space", "action", "received"),
        [
            (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [0, 1]]), [1, 2]),
            (spaces.MultiBinary(3), np.array([[1, 0, 1], [0, 0, 0]]), [1, 0, 1]),
            (spaces.Box(-0.1, 0.1, (1,), np.float64), np.full((2, 1), 0.1, np.float32), [0.1]),
        ],
    )
    def test_actions(self, action_space: Any, action: np.ndarray, received: list) -> None:
        env = odd(spaces.Discrete(2), 0, action_space)
        env.reset()
        env.step(action)
        taken = env._envs[0].actions[0]
        assert taken.tolist() == received and action_space.contains(taken)

    @pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
    def test_unsupported(self, space: Any) -> None:
        with pytest.raises(EnvError, match=f"observation space.*{type(space).__name__}.*supports Box"):
            odd(space, None)
        with pytest.raises(EnvError, match=r"action space.*supports Discrete"):
            odd(spaces.Discrete(2), 0, space)
        with pytest.raises(EnvError, match=f"entry 'mission' that is a {type(space).__name__}"):
            odd(spaces.Dict(x=spaces.Discrete(2), mission=space), None)

    @pytest.mark.parametrize(
        ("observation", "message"),
        [
            (np.zeros(3, np.float32), r"environment 0 of .* has shape \(3,\), but its space has \(2,\)"),
            (np.array([0, np.nan], np.float32), "environment 0 of .* is not finite"),
            (np.array([0, 1e300]), "environment 0 of .* is not finite"),
        ],
    )
    def test_broken_observation(self, observation: np.ndarray, message: str) -> None:
        with pytest.raises(EnvError, match=message):
            odd(spaces.Box(-1, 1, (2,)), observation).reset()

    def test_float_image_is_not_cast_to_black(self) -> None:
        with pytest.raises(EnvError, match="dtype float64, but its space has uint8"):
            odd(spaces.Box(0, 255, (2,), np.uint8), np.array([0.2, 0.9])).reset()

    @pytest.mark.parametrize("reward", [np.nan, np.inf, "many", np.zeros(2)])
    def test_broken_reward_names_the_environment(self, reward: Any) -> None:
        made: list[Odd] = []

        def third_breaks() -> Odd:
            made.append(Odd(spaces.Discrete(2), 0, reward=reward if len(made) == 2 else 1.0))
            return made[-1]

        env = make(EnvConfig(id=environment_id(third_breaks)), 3, 0)
        env.reset()
        with pytest.raises(EnvError, match=r"reward of environment 2 of .*third_breaks"):
            env.step(np.zeros(3, np.int64))

    def test_wrong_action_shape(self) -> None:
        env = odd(spaces.Discrete(2), 0)
        env.reset()
        with pytest.raises(EnvError, match=r"shape \(2,\), not \(3,\)"):
            env.step(np.zeros(3, np.int64))


class TestIds:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("CartPole-v1", r"env.id is 'CartPole-v1'.*procgen:GAME-MODE.*did you mean 'gym:CartPole-v1'"),
            ("starpilot", r"did you mean 'procgen:starpilot-hard'"),
            ("gym:CartPol-v1", r"did you mean .*gym:CartPole-v1"),
            ("gym:", r"env.id is 'gym:', but must be"),
            ("no_such_module:make", r"No module named 'no_such_module'"),
            ("math:no_such_function", r"no_such_function"),
            ("math:pi", r"standard library"),
            ("what ever:else", r"must be procgen:GAME-MODE"),
        ],
    )
    def test_bad(self, name: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make(EnvConfig(id=environment_id(name)), 1, 0)

    def test_import_path(self) -> None:
        env = make(EnvConfig(id=f"{__name__}:counting", options={"length": 2}), 2, 0)
        assert __name__ in sys.modules and [s.truncated[0] for s in run(env, 2)] == [False, True]

    @pytest.mark.parametrize(("env_id", "option"), [("gym:CartPole-v1", "lenght"), (counting, "lenght")])
    def test_bad_option(self, env_id: Any, option: str) -> None:
        with pytest.raises(ConfigError, match=r"env.options has 'lenght'.*takes only .*vectorization"):
            make(EnvConfig(id=environment_id(env_id), options={option: 1}), 1, 0)

    def test_bad_vectorization(self) -> None:
        with pytest.raises(ConfigError, match="vectorization is 'threads'"):
            make(EnvConfig(id="gym:CartPole-v1", options={"vectorization": "threads"}), 1, 0)

    def test_not_an_environment(self) -> None:
        with pytest.raises(EnvError, match=r"returned a int instead of a gymnasium.Env"):
            make(EnvConfig(id=environment_id(lambda: 3)), 1, 0)
        with pytest.raises(EnvError, match="asked for 2 environments, but returned 3"):
            make(EnvConfig(id=environment_id(lambda num_envs: counting_vector(num_envs + 1, "SAME_STEP"))), 2, 0)

    def test_spaces(self) -> None:
        observation, action = spaces_of(EnvConfig(id="gym:CartPole-v1"))
        assert observation.shape == (4,) and action == spaces.Discrete(2)

    def test_render(self) -> None:
        def drawn(render_mode: str | None = None) -> gymnasium.Env:
            env = Counting()
            env.render_mode = render_mode
            env.render = lambda: np.full((4, 5, 3), 9, np.uint8)  # type: ignore[method-assign]
            return env

        env = make(EnvConfig(id=environment_id(drawn)), 1, 0, rendering=True)
        env.reset()
        assert env.render().shape == (4, 5, 3)
        plain = make(EnvConfig(id=environment_id(counting)), 1, 0, rendering=True)
        plain.reset()
        with pytest.raises(EnvError, match="cannot be rendered"):
            plain.render()


class TestSeeds:
    def test_far_apart_and_distinct(self) -> None:
        lists = [derive_seeds(seed, 256) for seed in range(20)]
        assert all(len(set(seeds)) == 256 and min(seeds) >= 0 and max(seeds) < 2**31 for seeds in lists)
        assert len(set().union(*lists)) >= 20 * 256 - 1  # a chance collision has probability 0.006
        assert derive_seeds(7, 1000)[:10] == derive_seeds(7, 10)
        assert len(set(derive_seeds(0, 200_000))) == 200_000  # plain 31-bit draws would repeat about 9

    def test_runs_differ_and_repeat(self) -> None:
        first = [make(EnvConfig(id="gym:CartPole-v1"), 4, seed).reset() for seed in (1, 2, 1)]
        assert np.array_equal(first[0], first[2])
        assert len({tuple(row) for batch in first[:2] for row in batch.tolist()}) == 8


SAVABLE = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4", "CliffWalking-v1"]


class TestSnapshot:
    @pytest.mark.parametrize("name", SAVABLE)
    def test_resumes_bitwise(self, name: str) -> None:
        config = EnvConfig(id=f"gym:{name}", options={"max_episode_steps": 40})
        env = make(config, 3, 5)
        env.action_space.seed(0)
        actions = [np.stack([env.action_space.sample() for _ in range(3)]) for _ in range(230)]
        env.reset()
        for action in actions[:30]:
            env.step(action)
        buffer = io.BytesIO()
        torch.save(env.save_state(), buffer)
        buffer.seek(0)
        fresh = make(config, 3, 99)
        fresh.load_state(torch.load(buffer, weights_only=True))
        ends = 0
        for action in actions[30:]:
            a, b = env.step(action), fresh.step(action)
            assert a.observation.tobytes() == b.observation.tobytes() and a.reward.tobytes() == b.reward.tobytes()
            assert same(a.terminated, b.terminated) and same(a.truncated, b.truncated)
            assert same(a.final_observation, b.final_observation)
            ends += int(a.done.sum())
        assert ends >= 3

    def test_own_methods_are_used(self) -> None:
        class Own(Counting):
            def __init__(self) -> None:
                super().__init__(length=50)
                self.hidden = object()

            def get_state(self) -> dict:
                return {"at": self.step_index}

            def set_state(self, state: dict) -> None:
                self.step_index = state["at"]

        env, fresh = (make(EnvConfig(id=environment_id(Own)), 2, seed) for seed in (0, 1))
        run(env, 4)
        fresh.load_state(env.save_state())
        assert fresh.step(np.zeros(2, np.int64)).observation.tolist() == [[5.0], [5.0]]
        assert env._envs[0].np_random.random() == fresh._envs[0].np_random.random()

    def test_unknown_state_is_not_savable(self) -> None:
        class Hidden(Counting):
            def __init__(self) -> None:
                super().__init__()
                self.engine = object()

        env = make(EnvConfig(id=environment_id(Hidden)), 1, 0)
        env.reset()
        assert env.save_state() is None

    def test_shared_generator_stays_shared(self) -> None:
        class Twice(Counting):
            def reset(self, **kwargs: Any) -> Any:
                result = super().reset(**kwargs)
                self.alias = self.np_random
                self.table = {"row": [np.float64(1.5), (1, b"x")], 3: np.array(["S", "F"])}
                return result

        env, fresh = (make(EnvConfig(id=environment_id(Twice)), 1, seed) for seed in (0, 1))
        env.reset()
        fresh.load_state(env.save_state())
        a, b = env._envs[0], fresh._envs[0]
        assert b.alias is b.np_random
        assert [a.alias.random(), a.np_random.random()] == [b.alias.random(), b.np_random.random()]
        assert b.table["row"] == a.table["row"] and b.table[3].tolist() == ["S", "F"]

    def test_refuses_foreign_state(self) -> None:
        env = make(EnvConfig(id="gym:CartPole-v1"), 2, 0)
        env.reset()
        state = env.save_state()
        with pytest.raises(EnvError, match="of 2 environments, but this run has 3"):
            make(EnvConfig(id="gym:CartPole-v1"), 3, 0).load_state(state)
        with pytest.raises(EnvError, match="CartPoleEnv"):
            make(EnvConfig(id="gym:Acrobot-v1"), 2, 0).load_state(state)
