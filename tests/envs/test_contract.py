"""Environments that break Gymnasium's contract, and those that use it in unusual ways."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from gymnasium.wrappers.vector import NormalizeReward as NormalizeRewards

from anybatch.config.schema import EnvConfig
from anybatch.envs import contract
from anybatch.envs.base import derive_seeds
from anybatch.envs.factory import make
from anybatch.envs.gymnasium import GymnasiumLoop
from anybatch.envs.registry import environment_id
from anybatch.errors import ConfigError, EnvError, UserCodeError
from anybatch.presets import ppo


class Reusing(gymnasium.Env):
    """Every observation is the same array: [steps of the episode, number of the episode]. Truncated after 3 steps."""

    observation_space: spaces.Space[Any] = spaces.Box(-1, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.array = np.array([0, -1], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.array[:] = 0, self.array[1] + 1
        return self.observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.array[0] += 1
        return self.observation(), 1.0, False, bool(self.array[0] == 3), {}

    def observation(self) -> Any:
        return self.array


class ReusingDict(Reusing):
    observation_space = spaces.Dict(state=Reusing.observation_space, even=spaces.Discrete(2))

    def observation(self) -> Any:
        return {"state": self.array, "even": int(self.array[0] % 2 == 0)}


class Copying(Reusing):
    def observation(self) -> Any:
        return self.array.copy()


class Constant(Reusing):
    """The last observation of an episode may well be the first one of the next."""

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        return np.zeros(2, np.float32), 1.0, False, True, {}


def made(function: Any, num_envs: int = 2, **options: Any) -> Any:
    return make(EnvConfig(id=environment_id(function), options=options), num_envs, 0)


def three_steps(env: Any, close: bool = True) -> Any:
    env.reset()
    steps = [env.step(np.zeros(env.num_envs, np.int64)) for _ in range(3)]
    if close:
        env.close()
    return steps[-1]


class TestFinalObservations:
    """Of a truncated episode; its value is bootstrapped."""

    @pytest.mark.parametrize("vectorization", ["sync", "async"])
    @pytest.mark.parametrize("kind", [Reusing, ReusingDict])
    def test_of_single_environments(self, kind: Any, vectorization: str) -> None:
        last = three_steps(made(lambda: kind(), vectorization=vectorization))
        final, begin = last.final_observation, last.observation
        if kind is ReusingDict:
            assert final["even"].tolist() == [0, 0] and begin["even"].tolist() == [1, 1]
            final, begin = final["state"], begin["state"]
        assert final.tolist() == [[3.0, 0.0]] * 2
        assert begin.tolist() == [[0.0, 1.0]] * 2

    @pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
    @pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
    @pytest.mark.parametrize("kind", [Reusing, ReusingDict])
    def test_of_vector_environments(self, kind: Any, vector: Any, mode: str) -> None:
        env = made(lambda num_envs: vector([kind] * num_envs, autoreset_mode=AutoresetMode[mode]))
        if vector is AsyncVectorEnv and mode == "SAME_STEP":  # its processes have overwritten it
            with pytest.raises(
                EnvError, match=r"Environment 0 of .* reports the first observation of the next episode"
            ):
                [three_steps(env, close=False) for _ in range(2)]
            env.close()
            return
        final = three_steps(env).final_observation
        assert (final["state"] if kind is ReusingDict else final).tolist() == [[3.0, 0.0]] * 2

    @pytest.mark.parametrize("vectorization", ["sync", "async"])
    def test_that_equal_the_next_first_one(self, vectorization: str) -> None:
        env = made(Constant, vectorization=vectorization)
        assert three_steps(env).final_observation.tolist() == [[0.0, 0.0]] * 2

    def test_wrappers_around_the_vector_environment(self) -> None:
        """They may depend on the way of resetting, so that it stays as it is."""

        def wrapped(num_envs: int, kind: Any) -> Any:
            env = SyncVectorEnv([kind] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
            return gymnasium.wrappers.vector.RecordEpisodeStatistics(env)

        env = made(lambda num_envs: wrapped(num_envs, Reusing))
        with pytest.raises(EnvError, match="reports the first observation of the next episode"):
            [three_steps(env, close=False) for _ in range(2)]
        final = three_steps(made(lambda num_envs: wrapped(num_envs, Copying))).final_observation
        assert final.tolist() == [[3.0, 0.0]] * 2


class Showing(gymnasium.Env):
    """Shows whatever a test wants."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any, observations: list[Any]) -> None:
        self.observation_space, self.observations = space, list(observations)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observations[0], {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.observations = self.observations[1:] + self.observations[:1]
        return self.observations[0], 0.0, False, False, {}


class TestIntegersOutsideTheirSpace:
    @pytest.mark.parametrize(
        ("space", "good", "bad", "message"),
        [
            (spaces.Box(0, 255, (2,), np.uint8), [0, 255], [7, 300], r"is 300 at \[1\], but .* allows 0 to 255"),
            (spaces.Box(0, 255, (2,), np.uint8), [0, 255], [-1, 7], r"is -1 at \[0\], but .* allows 0 to 255"),
            (spaces.Box(0, 9, (2,), np.uint8), [0, 9], np.array([0, 10], np.uint8), r"is 10 at \[1\], .* 0 to 9"),
            (spaces.Box(-5, 5, (), np.int64), -5, np.int64(6), r"is 6, but its space allows -5 to 5"),
            (spaces.Discrete(3), 2, 5, r"is 5, but its space allows 0 to 2"),
            (spaces.Discrete(3, start=-1), -1, 2, r"is 2, but its space allows -1 to 1"),
            (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 3], r"is 3 at \[1\], but its space allows 0 to 2"),
            (spaces.MultiDiscrete([2, 3], start=[5, 0]), [6, 0], [0, 0], r"is 0 at \[0\], .* allows 5 to 6"),
            (spaces.MultiBinary(2), [0, 1], [0, 2], r"is 2 at \[1\], but its space allows 0 to 1"),
        ],
    )
    @pytest.mark.parametrize("key", [None, "gear"])
    def test_names_environment_key_and_value(self, space: Any, good: Any, bad: Any, message: str, key: Any) -> None:
        counter = iter(range(100))

        def second_breaks() -> Any:
            shown = [good, bad if next(counter) == 1 else good]
            if key is None:
                return Showing(space, shown)
            return Showing(spaces.Dict({key: space}), [{key: one} for one in shown])

        env = made(second_breaks, 3)
        env.reset()
        entry = "" if key is None else ", entry 'gear',"
        with pytest.raises(EnvError, match=rf"observation of environment 1 of .*second_breaks[^ ,]*{entry} {message}"):
            env.step(np.zeros(3, np.int64))

    def test_in_a_batch(self) -> None:
        class Bytes(gymnasium.vector.VectorEnv):
            metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

            def __init__(self, num_envs: int) -> None:
                self.num_envs = num_envs
                self.single_observation_space = spaces.Dict(x=spaces.Discrete(4))
                self.single_action_space = spaces.Discrete(2)

            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                return {"x": np.arange(self.num_envs)}, {}

        with pytest.raises(EnvError, match=r"observation of environment 4 of .*, entry 'x', is 4, .* allows 0 to 3"):
            made(Bytes, 5).reset()
        assert made(Bytes, 4).reset()["x"].tolist() == [0, 1, 2, 3]

    def test_not_finite_names_the_entry_too(self) -> None:
        env = made(lambda: Showing(spaces.Dict(v=spaces.Box(-1, 1, (2,))), [{"v": np.array([0, np.inf], np.float32)}]))
        with pytest.raises(EnvError, match=r"environment 0 of .*, entry 'v', is not finite: it is inf at \[1\]"):
            env.reset()


def test_dict_spaces_with_keys_that_are_not_text() -> None:
    space = spaces.Dict({0: spaces.Box(-1, 1, (2,)), 1: spaces.Discrete(3)})
    for vectorization in ("sync", "async"):
        env = made(lambda: Showing(space, [{0: np.ones(2, np.float32), 1: 2}]), vectorization=vectorization)
        observation = env.reset()
        assert list(env.observation_space) == ["0", "1"]
        assert observation["0"].tolist() == [[1, 1]] * 2 and observation["1"].tolist() == [2, 2]
        env.close()
    with pytest.raises(EnvError, match="two keys that read '1'"):
        made(lambda: Showing(spaces.Dict({1: spaces.Discrete(3), "1": spaces.Discrete(3)}), []))


class TestSeeds:
    def test_of_vector_environments(self) -> None:
        """Gymnasium's own take a list, and its pattern for others is ``seed: int | None``."""
        seeds: list[Any] = []

        class Own(gymnasium.vector.VectorEnv):
            metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
            single_observation_space = spaces.Box(0, 1, (1,))
            single_action_space = spaces.Discrete(2)

            def __init__(self, num_envs: int) -> None:
                self.num_envs = num_envs

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                seeds.append(seed)
                return self.np_random.random((self.num_envs, 1)), {}

        env = made(Own, 3)
        first = env.reset()
        env.reset()
        assert seeds == [derive_seeds(0, 3)[0], None] and type(seeds[0]) is int
        assert np.array_equal(first, made(Own, 3).reset())
        assert not np.array_equal(first, make(EnvConfig(id=environment_id(Own)), 3, 1).reset())
        with pytest.raises(EnvError, match="takes a single seed"):  # three runs in a stack
            make(EnvConfig(id=environment_id(Own)), 3, [0, 1, 2])

        class Noting(Reusing):
            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                seeds.append(seed)
                return super().reset(seed=seed)

        seeds.clear()
        made(lambda num_envs: SyncVectorEnv([Noting] * num_envs, autoreset_mode="SameStep"), 3).reset()
        assert seeds == derive_seeds(0, 3)


def test_numpy_integers_are_seeds() -> None:
    env, same = (make(EnvConfig(id="gym:CartPole-v1"), np.int64(2), seed) for seed in (3, np.int64(3)))  # type: ignore[arg-type]
    assert np.array_equal(env.reset(), same.reset())


class OldStep(Reusing):
    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class OldReset(Reusing):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32)  # which Python unpacks into two numbers


class OldResetDict(ReusingDict):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation()


class Unseeded(Reusing):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


gymnasium.register("AnybatchOldStep-v0", OldStep, max_episode_steps=9)


class TestContract:
    @pytest.mark.parametrize("vectorization", ["sync", "async", "vector sync", "vector async"])
    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            (OldStep, r"step of .* must return .*terminated, truncated, info.* gym before 0\.26"),
            (OldReset, r"reset of .* must return \(observation, info\)"),
            (Unseeded, r"must have reset\(\*, seed=None, options=None\)"),
        ],
    )
    def test_broken(self, kind: Any, message: str, vectorization: str) -> None:
        if vectorization.startswith("vector"):
            vector = SyncVectorEnv if vectorization.endswith(" sync") else AsyncVectorEnv
            env = made(lambda num_envs: vector([kind] * num_envs))
        else:
            env = made(kind, vectorization=vectorization)

        def reset_and_step() -> None:
            env.reset()
            env.step(np.zeros(2, np.int64))

        with pytest.raises(EnvError, match=message):
            reset_and_step()
        env.close()

    @pytest.mark.parametrize("vector", [False, True])
    def test_dictionary_alone(self, vector: bool) -> None:
        """Its two keys are unpacked like a pair."""
        env = made((lambda num_envs: SyncVectorEnv([OldResetDict] * num_envs)) if vector else OldResetDict)
        with pytest.raises(EnvError, match=r"reset of .* must return \(observation, info\)"):
            env.reset()

    def test_broken_below_a_wrapper(self) -> None:
        """TimeLimit unpacks five values before anybatch sees them."""
        env = make(EnvConfig(id="gym:AnybatchOldStep-v0"), 1, 0)
        env.reset()
        with pytest.raises(EnvError, match=r"step of gym:AnybatchOldStep-v0 must return .*got 4"):
            env.step(np.zeros(1, np.int64))

    def test_own_errors_are_named_with_environment_and_step(self) -> None:
        class Own(Reusing):
            def step(self, action: int) -> Any:
                raise ValueError("my own")

        env = made(Own)
        env.reset()
        expected = r"environment 0, step 1: step of .* raised ValueError: my own"
        with pytest.raises(UserCodeError, match=expected) as caught:
            env.step(np.zeros(2, np.int64))
        assert isinstance(caught.value.__cause__, ValueError)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (Reusing(), "env is a Reusing, but must be an id as text, or a function or class"),
            ([Reusing], "env is a list, but must be"),
            (SyncVectorEnv([Reusing]), "env is a SyncVectorEnv, but must be"),
            (gymnasium.spec("CartPole-v1"), "env is a specification; give its id, 'gym:CartPole-v1'"),
            (None, "env is a NoneType, but must be"),
        ],
    )
    def test_instead_of_a_function(self, wrong: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ppo(wrong)

    def test_functions_that_need_arguments(self) -> None:
        def sized(size: int) -> Any:
            return Reusing()

        with pytest.raises(ConfigError, match=r"needs the argument 'size': give it in env\.options"):
            made(sized)
        assert made(sized, size=3).num_envs == 2

    @pytest.mark.parametrize("own", [False, True])
    def test_killed_process(self, own: bool) -> None:
        class Dying(Reusing):
            def step(self, action: int) -> Any:
                if action:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().step(action)

        function = (lambda num_envs: AsyncVectorEnv([Dying] * num_envs)) if own else Dying
        env = made(function, 3, **({} if own else {"vectorization": "async"}))
        env.reset()
        env.step(np.zeros(3, np.int64))
        with pytest.raises(EnvError, match=r"^The process of environment 1 of .* was killed by SIGKILL"):
            env.step(np.array([0, 1, 0]))
        env.close()

    def test_process_that_exits(self) -> None:
        class Leaving(Reusing):
            def reset(self, **arguments: Any) -> Any:
                os._exit(3)

        env = made(Leaving, 2, vectorization="async")
        with pytest.raises(EnvError, match=r"^The process of environment 0 of .* ended with exit code 3"):
            env.reset()


class TestGymIds:
    def test_module_that_registers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        code = """
            import gymnasium
            from gymnasium.envs.classic_control import CartPoleEnv

            gymnasium.register("Registered/Cart-v3", CartPoleEnv, max_episode_steps=20)
        """
        (tmp_path / "registering_module.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match=r"has no environment 'Registered/Cart-v3'"):
            make(EnvConfig(id="gym:Registered/Cart-v3"), 1, 0)
        env = make(EnvConfig(id="gym:registering_module:Registered/Cart-v3"), 2, 0)
        assert "registering_module" in sys.modules and env.reset().shape == (2, 4)
        with pytest.raises(ConfigError, match=r"'gym:registering_module:Registered/Cart-v4'.*'gym:Registered/Cart-v3'"):
            make(EnvConfig(id="gym:registering_module:Registered/Cart-v4"), 1, 0)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("gym:no_such_module:Cart-v0", "read as gym:MODULE:ID, but No module named 'no_such_module'"),
            ("gym:CartPole", r"did you mean 'gym:CartPole-v1'\?"),
            ("CartPole", r"did you mean 'gym:CartPole-v1'\?"),
            ("gym:cartpole-v1", "did you mean 'gym:CartPole-v1'"),
            ("ALE/Pong-v5", "did you mean 'gym:ale_py:ALE/Pong-v5'"),
            ("gym:ALE/Pong-v5", "did you mean 'gym:ale_py:ALE/Pong-v5'"),
            ("ale_py:ALE/Pong-v5", "did you mean 'gym:ale_py:ALE/Pong-v5'"),
            ("gym:zzzzzzzzzzzzz-v0", "if a package registers it when it is imported, write gym:PACKAGE:ID"),
        ],
    )
    def test_suggestions(self, name: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make(EnvConfig(id=name), 1, 0)

    def test_versions_are_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of three environments, the first is no version of the second."""
        for name in ("Cart-vector", "Cart-v9", "Cart-v10"):
            monkeypatch.setitem(gymnasium.registry, name, gymnasium.spec("CartPole-v1"))
        with pytest.raises(ConfigError, match=r"did you mean 'gym:Cart-v10'\?$"):
            make(EnvConfig(id="gym:Cart"), 1, 0)

    @pytest.mark.procgen
    def test_suggests_envpool(self) -> None:
        for name in ("ALE/Pong-v5", "Pong-v5"):
            with pytest.raises(ConfigError, match="'envpool:Pong-v5'"):
                make(EnvConfig(id=name), 1, 0)


def normalized() -> gymnasium.Env[Any, Any]:
    return NormalizeReward(gymnasium.wrappers.TimeLimit(NormalizeObservation(Copying()), 9))


def normalized_vector(num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    makers = [lambda: NormalizeObservation(Copying())] * num_envs
    return NormalizeRewards(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP))


@pytest.mark.parametrize(
    ("env", "options"),
    [(normalized, {}), (normalized, {"vectorization": "async"}), (normalized_vector, {})],
    ids=["loop", "processes", "vector"],
)
def test_normalizing_wrappers_are_warned_about(env: Any, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="is wrapped in") as warned:
        made = make(EnvConfig(id=environment_id(env), options=options), 2, 0)
    made.close()
    text = " ".join(str(one.message) for one in warned)
    assert "NormalizeObservation" in text and "set observation.normalize true" in text
    assert "NormalizeReward" in text and "set reward.normalize true" in text
    assert len([one for one in warned if "is wrapped in" in str(one.message)]) == 2


def test_a_training_process_that_has_a_parent_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would die with the thread that started it."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    here: list[int] = []  # the list of this process, not of the forked ones
    monkeypatch.setattr(contract, "end_with_parent", lambda: here.append(1))
    with pytest.warns(UserWarning, match="is wrapped in"):
        make(EnvConfig(id=environment_id(normalized), options={"vectorization": "async"}), 1, 0).close()
    assert here == []


@pytest.mark.parametrize("envs", [{"a": 1}, [], 3])
@pytest.mark.parametrize("options", [{}, {"vectorization": "async"}], ids=["loop", "processes"])
def test_attributes_that_wrappers_have_too(envs: Any, options: dict[str, Any]) -> None:
    """An environment of several tasks has `envs`, and one with a simulator may be its own `env.env`."""

    def make_one() -> gymnasium.Env[Any, Any]:
        one: Any = Copying()
        one.envs = envs
        one.env = one
        return one

    make(EnvConfig(id=environment_id(make_one), options=options), 1, 0).close()


class Unfinished(gymnasium.Env[Any, Any]):
    observation_space = Copying.observation_space


class Failing(Copying):
    @property
    def observation_space(self) -> Any:  # type: ignore[override]
        return 1 / 0


class UnfinishedVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = Copying.observation_space

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


class UnfinishedTensors:
    device, reset, step = "cpu", None, None
    observation_space = Copying.observation_space

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (lambda: Unfinished(), {}, "has no action_space: set it in the constructor"),
        (lambda: Unfinished(), {"vectorization": "async"}, "has no action_space: set it in the constructor"),
        (lambda: Failing(), {}, "^observation_space of .* raised ZeroDivisionError"),
        (lambda: Failing(), {"vectorization": "async"}, "^observation_space of .* raised ZeroDivisionError"),
        (lambda num_envs: UnfinishedVector(num_envs), {}, "has no single_action_space: set it"),
        (lambda num_envs: UnfinishedTensors(num_envs), {}, "has no single_action_space: set it"),
    ],
)
def test_spaces_that_are_missing(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(EnvConfig(id=environment_id(kind), options=options), 2, 0)


class Flags(gymnasium.Env[np.ndarray, int]):
    """Ends with given flags."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, terminated: Any) -> None:
        self.terminated = terminated

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, Any, Any, dict[str, Any]]:
        return np.zeros(1, np.float32), 0.0, self.terminated, False, {}


@pytest.mark.parametrize("flag", ["False", None, 2, 0.5, [], [True, False]])
def test_flags_that_are_not_true_or_false(flag: Any) -> None:
    loop = GymnasiumLoop(lambda: Flags(flag), [0], env_id="flags")
    loop.reset()
    with pytest.raises(EnvError, match=r"step of flags must return true or false as terminated, but returned"):
        loop.step(np.zeros(1, np.int64))


@pytest.mark.parametrize("flag", [True, 1, np.True_, np.array(True), np.array([1])])
def test_flags_in_other_forms(flag: Any) -> None:
    loop = GymnasiumLoop(lambda: Flags(flag), [0], env_id="flags")
    loop.reset()
    assert loop.step(np.zeros(1, np.int64)).terminated.tolist() == [True]
