"""Environments as people bring them: states, copies, errors and sizes that once went wrong."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from anybatch.config.schema import EnvConfig
from anybatch.envs import snapshot
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.errors import ConfigError, EnvError, UserCodeError
from anybatch.presets import ppg, ppo
from anybatch.runs.checkpoint import checkpoints
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.training import resume, train

SMALL: dict[str, Any] = {
    "num_envs": 2,
    "rollout_steps": 8,
    "minibatches": 1,
    "total_env_steps": 32,
    "tensorboard": False,
}
BOX = spaces.Box(-1, 1, (2,), np.float32)


class Own(gymnasium.Env[Any, Any]):
    """Ends every fifth step by a time limit."""

    observation_space: Any = BOX
    action_space: Any = spaces.Discrete(2)

    def __init__(self) -> None:
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.observe(), 1.0, False, self.time == 5, {}

    def observe(self) -> Any:
        return np.full(2, self.time / 10, np.float32)


def config(env: Any, **changes: Any) -> Any:
    return ppo(env, **{**SMALL, **changes})


# ---------------------------------------------------------------- observations


class Unsorted(Own):
    """Keys that are not in alphabetical order, with values that tell them."""

    observation_space = spaces.Dict(OrderedDict(z=BOX, a=BOX, m=spaces.Discrete(3)))

    def observe(self) -> Any:
        return {"z": np.full(2, 0.9, np.float32), "a": np.full(2, -0.1, np.float32), "m": 2}


def test_the_auxiliary_phase_sees_the_entries_that_the_policy_phase_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anybatch.phase_storage.store import SegmentStore

    seen, read = [], SegmentStore.minibatch

    def minibatch(self: SegmentStore, *arguments: Any) -> Any:
        seen.append(read(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(SegmentStore, "minibatch", minibatch)
    phase = {"policy_iterations": 2, "aux_epochs": 1, "aux_minibatches": 1}
    train(ppg(Unsorted, **SMALL, **phase), tmp_path / "run", quiet=True)
    assert seen
    for batch in seen:
        assert batch.observation["z"].unique().tolist() == pytest.approx([0.9])
        assert batch.observation["a"].unique().tolist() == pytest.approx([-0.1])
        assert batch.observation["m"].unique().tolist() == [2]


@pytest.mark.parametrize(
    ("attribute", "space", "sentence"),
    [
        ("observation_space", spaces.Box(-1, 1, (0,)), r"shape \(0,\): leave out empty entries"),
        ("observation_space", spaces.Dict(a=BOX, b=spaces.Box(-1, 1, (0, 3))), r"entry 'b' of the shape \(0, 3\)"),
        ("action_space", spaces.Box(-1, 1, (0,)), "no action to choose"),
    ],
)
def test_sizes_of_0_are_refused(attribute: str, space: Any, sentence: str) -> None:
    def env() -> Own:
        made = Own()
        setattr(made, attribute, space)
        return made

    with pytest.raises(EnvError, match=sentence):
        make(EnvConfig(environment_id(env)), 1, 0)


# ---------------------------------------------------------------- copies


def test_one_object_is_no_two_copies() -> None:
    one = Own()
    assert make(EnvConfig(environment_id(lambda: one)), 1, 0).num_envs == 1
    with pytest.raises(EnvError, match="are the same object, or wrappers around the same"):
        make(EnvConfig(environment_id(lambda: one)), 2, 0)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_copies_have_the_same_spaces(vectorization: str) -> None:
    sizes = iter([2, 3] * 3)

    class Different(Own):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Discrete(next(sizes))

    with pytest.raises(EnvError, match="same spaces"):
        make(EnvConfig(environment_id(Different), options={"vectorization": vectorization}), 2, 0)


def test_bounds_of_floats_may_differ_between_copies() -> None:
    bounds = iter((1.0, 2.0))

    def env() -> Own:
        made = Own()
        made.observation_space = spaces.Dict(x=spaces.Box(0, next(bounds), (2,)))
        return made

    assert make(EnvConfig(environment_id(env)), 2, 0).num_envs == 2


def test_an_error_in_a_process_that_is_being_made_is_that_error() -> None:
    def env() -> Own:
        raise RuntimeError("no workspace licence")

    with pytest.raises(EnvError, match="no workspace licence"):
        make(EnvConfig(environment_id(env), options={"vectorization": "async"}), 2, 0)


# ---------------------------------------------------------------- states


class Views(Own):
    """Moves a part of its state in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state = np.zeros(4)
        self.position, self.velocity = self.state[:2], self.state[2:]


def test_arrays_that_are_views_of_each_other_cannot_be_saved() -> None:
    assert snapshot.save(Views()) is None
    separate = Own()
    memory = np.zeros(4)
    separate.left, separate.right = memory[:2], memory[2:]  # type: ignore[attr-defined]
    assert snapshot.save(separate) is not None
    columns, constant, sparse = np.zeros((5, 2)), np.arange(6).reshape(2, 3), torch.eye(3).to_sparse()
    constant.flags.writeable = False
    for values in (
        (torch.zeros(4), np.zeros(3)[::-1]),
        (np.zeros((2, 0)), np.zeros(0)),
        (columns[:, 0], columns[:, 1]),  # their memory is interleaved, without a byte in common
        (constant, constant.T),
        (sparse,),
    ):
        separate.values = values  # type: ignore[attr-defined]
        assert snapshot.save(separate) is not None
    whole = torch.zeros(4)
    separate.values = whole, whole[1:]  # type: ignore[attr-defined]
    assert snapshot.save(separate) is None


def test_containers_come_back_as_they_were() -> None:
    values = (
        OrderedDict(b=1, a=2),
        Counter("aab"),
        {3, (1, 2)},
        frozenset({4}),
        bytearray(b"ab"),
        b"",
        2 + 1j,
        torch.Size([2]),
    )
    first, second = Own(), Own()
    first.values = [*values, values[0]]  # type: ignore[attr-defined]
    state = snapshot.save(first)
    assert state is not None
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    snapshot.load(second, torch.load(buffer, weights_only=True))
    restored = second.values  # type: ignore[attr-defined]
    assert restored == [*values, values[0]]
    assert [type(x) for x in restored] == [type(x) for x in (*values, values[0])]
    assert restored[-1] is restored[0]
    restored[0].move_to_end("b")


def test_a_space_that_is_made_in_reset_needs_no_generator() -> None:
    first = Own()
    first.goals = spaces.Discrete(5, seed=3)  # type: ignore[attr-defined]
    state = snapshot.save(first)
    assert state is not None
    snapshot.load(Own(), state)


def test_generators_of_spaces_continue() -> None:
    class Sampling(Own):
        def __init__(self) -> None:
            super().__init__()
            self.goals = spaces.Dict(place=spaces.Discrete(1000), speed=spaces.Box(0, 1))

    first, second = Sampling(), Sampling()
    first.goals.seed(3)
    first.goals.sample()
    state = snapshot.save(first)
    assert state is not None
    snapshot.load(second, state)
    assert second.goals.sample() == first.goals.sample()


def test_positions_of_pygame_are_state() -> None:
    surface, rect = (type(name, (), {"__module__": f"pygame.{name.lower()}"}) for name in ("Surface", "Rect"))
    env = Own()
    env.surface = surface()  # type: ignore[attr-defined]
    assert snapshot.save(env) is not None
    env.player = rect()  # type: ignore[attr-defined]
    assert snapshot.save(env) is None


class Vector(SyncVectorEnv):
    """A vector environment that saves arrays and texts."""

    extra: Any = None

    def get_state(self) -> dict[str, Any]:
        return {"time": np.array([env.unwrapped.time for env in self.envs]), "extra": self.extra, "note": ("a", 1)}

    restored = 0

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["note"] == ("a", 1)
        Vector.restored += 1
        for env, time in zip(self.envs, state["time"], strict=True):
            env.unwrapped.time = int(time)


def vector(num_envs: int, extra: bool = False) -> Vector:
    env = Vector([Own] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    env.extra = Own if extra else None
    return env


def test_states_of_vector_environments_may_hold_arrays(tmp_path: Path) -> None:
    train(config(vector), tmp_path / "run", quiet=True)
    assert np.isfinite(evaluate(load_policy(tmp_path / "run"), episodes=2).returns).all()
    Vector.restored = 0
    resume(tmp_path / "run", total_env_steps=64, quiet=True)
    assert Vector.restored == 1
    with pytest.warns(UserWarning, match="get_state of .* is not saved, because it contains"):
        train(config(vector, env_options={"extra": True}), tmp_path / "other", quiet=True)
    load_policy(tmp_path / "other")


def test_an_episode_may_end_right_after_a_restored_state() -> None:
    class SameStep(Vector):
        metadata = {**SyncVectorEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def same_step(num_envs: int) -> Vector:
        return SameStep([Own] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    env, other = (make(EnvConfig(environment_id(same_step)), 2, 0) for _ in range(2))
    env.reset()
    for _ in range(4):
        env.step(np.zeros(2, np.int64))
    state = env.save_state()
    assert state is not None
    other.load_state(state)
    assert other.step(np.zeros(2, np.int64)).truncated.all()


def test_another_vectorization_starts_new_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(Own), tmp_path / "run", quiet=True)
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("options: {}", "options: {vectorization: async}", 1))
    resume(tmp_path / "run", total_env_steps=64, quiet=True, trust_code=True)
    assert "new episodes" in capsys.readouterr().err


def test_other_numbers_of_environments_that_start_anew(tmp_path: Path) -> None:
    """Reward normalisation keeps a running return for each."""
    train(config(Views, **{"reward.normalize": True}), tmp_path / "run", quiet=True)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("num_envs: 2", "num_envs: 4", 1))
    resume(tmp_path / "run", total_env_steps=96, quiet=True, trust_code=True)


def test_the_policy_of_an_older_checkpoint_is_announced(tmp_path: Path) -> None:
    train(config(Own, checkpoint_seconds=0.0), tmp_path / "run", quiet=True)
    newest = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 255
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged.*using the previous checkpoint"):
        load_policy(tmp_path / "run")


def test_an_error_in_set_state_is_that_of_the_environment(tmp_path: Path) -> None:
    class Failing(Own):
        def get_state(self) -> int:
            return self.time

        def set_state(self, state: int) -> None:
            raise ValueError("no way back")

    train(config(Failing), tmp_path / "run", quiet=True)
    with pytest.raises(UserCodeError, match="set_state of Failing raised ValueError: no way back"):
        resume(tmp_path / "run", total_env_steps=64, quiet=True)


# ---------------------------------------------------------------- errors


def failing(where: str, fail: Any) -> Any:
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return fail()

    return type("Failing", (Own,), {where: method})


def unpack() -> None:
    _, _ = [1]


def items() -> None:
    None.items()  # type: ignore[attr-defined]


def keyword() -> None:
    (lambda x: x)(y=1)  # type: ignore[call-arg, misc]


@pytest.mark.parametrize(("where", "fail"), [("step", unpack), ("reset", items), ("reset", keyword), ("reset", unpack)])
def test_errors_of_the_environment_s_own_code_are_not_those_of_its_interface(where: str, fail: Any) -> None:
    env = make(EnvConfig(environment_id(failing(where, fail))), 1, 0)
    with pytest.raises(UserCodeError, match=f"{where} of .* raised"):
        (env.reset(), env.step(np.zeros(1, np.int64)))


def test_info_is_a_dictionary() -> None:
    env = make(
        EnvConfig(environment_id(failing("step", lambda: (np.zeros(2, np.float32), 0.0, False, False, None)))), 1, 0
    )
    env.reset()
    with pytest.raises(EnvError, match="None as info instead of a dictionary"):
        env.step(np.zeros(1, np.int64))


def test_an_error_of_close_hides_neither_the_result_nor_another_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unclosable(Own):
        broken = False

        def step(self, action: Any) -> Any:
            if self.broken:
                raise RuntimeError("out of licences")
            return super().step(action)

        def close(self) -> None:
            raise ConnectionError("gone")

    result = train(config(Unclosable), tmp_path / "run", quiet=True)
    assert result.env_steps == 32
    assert len(evaluate(load_policy(tmp_path / "run"), episodes=2).returns) == 2
    assert "raised ConnectionError: gone" in capsys.readouterr().err
    Unclosable.broken = True
    with pytest.raises(UserCodeError, match="out of licences"):
        train(config(Unclosable), tmp_path / "broken", quiet=True)


def test_a_constant_entry_is_no_reused_array() -> None:
    class Goal(Own):
        observation_space = spaces.Dict(goal=BOX, place=BOX)

        def observe(self) -> Any:
            return {"goal": np.ones(2, np.float32), "place": super().observe()}

    def same_step(num_envs: int) -> Any:
        env = SyncVectorEnv([Goal] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        return gymnasium.wrappers.vector.RecordEpisodeStatistics(env)

    env = make(EnvConfig(environment_id(same_step)), 2, 0)
    env.reset()
    for _ in range(21):
        env.step(np.zeros(2, np.int64))


def test_masks_given_as_tuples_to_act(tmp_path: Path) -> None:
    class Masked(Own):
        action_space = spaces.MultiDiscrete([2, 3])

        def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
            return super().reset(**keywords)[0], {"action_mask": self.masks}

        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"action_mask": self.masks})

        masks = np.array([1, 0], np.int8), np.array([0, 0, 1], np.int8)

    train(config(Masked, action_mask="info"), tmp_path / "run", quiet=True)
    policy = load_policy(tmp_path / "run")
    observation, info = Masked().reset()
    assert policy.act({"observation": observation, "action_mask": info["action_mask"]}).tolist() == [0, 2]
    for wrong in ([[1, 2], [3]], None):
        with pytest.raises(EnvError, match=r"is not an array|but must be an array"):
            policy.act({"observation": wrong, "action_mask": info["action_mask"]})


# ---------------------------------------------------------------- tensors


class Tensors:
    """An environment of tensors that ends every fifth step, and leaves the flags of that in info."""

    num_envs, device, observation_space, action_space = 2, "cpu", BOX, spaces.Discrete(2)
    time_outs: Any = None

    def __init__(self, num_envs: int = 2) -> None:
        self.time = 0

    def reset(self) -> Any:
        return torch.zeros(2, 2)

    def step(self, action: Any) -> Any:
        self.time += 1
        done = torch.full((2,), self.time % 5 == 0)
        if self.time == 5:
            self.time_outs = done
        info = {} if self.time_outs is None else {"time_outs": self.time_outs}
        return torch.zeros(2, 2), torch.ones(2), done, info

    def get_state(self) -> Any:
        return {"time": self.time, "noise": np.zeros(3)}

    def set_state(self, state: Any) -> None:
        self.time = state["time"]


def test_flags_of_earlier_steps_end_no_episode(tmp_path: Path) -> None:
    train(config(Tensors, total_env_steps=160), tmp_path / "run", quiet=True)
    from anybatch.runs.progress import read_progress

    assert set(read_progress(tmp_path / "run" / "progress.csv")["mean_episode_length"][1:]) == {5.0}


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ((torch.zeros(2, 2), torch.ones(2), np.zeros(2, bool), {}), "as done, but returned a ndarray"),
        ((torch.zeros(2, 2), torch.ones(2), torch.zeros(2), {"time_outs": [0, 1]}), "as info.'time_outs'."),
    ],
)
def test_flags_are_tensors(results: Any, sentence: str) -> None:
    env = make(EnvConfig(environment_id(type("Wrong", (Tensors,), {"step": lambda self, action: results}))), 2, 0)
    env.reset()
    with pytest.raises(EnvError, match=sentence):
        env.step(np.zeros(2, np.int64))


def test_masks_in_info_are_not_read() -> None:
    with pytest.raises(ConfigError, match=r"env.action_mask is info, but .* is a tensor environment"):
        make(EnvConfig(environment_id(Tensors), action_mask="info"), 2, 0)
