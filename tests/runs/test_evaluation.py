"""Policies out of run folders: acting in any space, evaluation with limits, and what must not go unnoticed."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from anybatch.cli.main import main
from anybatch.config.schema import EnvConfig
from anybatch.envs.base import derive_seeds
from anybatch.envs.factory import make
from anybatch.envs.gymnasium import GymnasiumLoop
from anybatch.envs.registry import environment_id
from anybatch.errors import CheckpointError, ConfigError, DivergenceError, EnvError
from anybatch.presets import ppo
from anybatch.runs import checkpoint
from anybatch.runs.evaluation import Evaluation, LoadedPolicy, choose_actions, evaluate, initial_policy, load_policy
from anybatch.runs.folder import read_config
from anybatch.runs.saved_spaces import difference, from_plain, to_plain
from anybatch.runs.video import record
from anybatch.sampling.rollout import step_of
from anybatch.training import TrainResult, resume, train

SMALL = {"num_envs": 2, "rollout_steps": 4, "minibatches": 2, "total_env_steps": 16, "tensorboard": False}


class Recording(gymnasium.Env[Any, Any]):
    """Random observations; remembers the actions that it gets, which have to be elements of its space."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return self.observation_space.sample(), 0.0, False, False, {}


BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Drawing(Recording):
    """Renders a frame, or raises it."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, frame: Any, render_mode: str | None = None) -> None:
        super().__init__(BOX, spaces.Discrete(2))
        self.frame, self.render_mode = frame, render_mode

    def render(self) -> Any:
        if isinstance(self.frame, BaseException):
            raise self.frame
        return self.frame


def policy_of(observation_space: spaces.Space[Any], action_space: spaces.Space[Any], **changes: Any) -> LoadedPolicy:
    config = ppo(lambda: Recording(observation_space, action_space), **SMALL, **changes)
    return initial_policy(config, seed=1, device="cpu")


# ---------------------------------------------------------------- spaces

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])


@st.composite
def discrete(draw: Any) -> spaces.Space[Any]:
    dtype = np.dtype(draw(st.sampled_from(INTEGERS)))
    start = draw(st.integers(0 if dtype.kind == "u" else -5, 5))
    return spaces.Discrete(draw(st.integers(1, 5)), start=start, dtype=dtype.type)


@st.composite
def multi_discrete(draw: Any) -> spaces.Space[Any]:
    dtype = np.dtype(draw(st.sampled_from(INTEGERS)))
    shape = draw(st.sampled_from([(1,), (2,), (3,), (2, 2)]))
    size = math.prod(shape)
    nvec = draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    least = 0 if dtype.kind == "u" else -5
    start = draw(st.lists(st.integers(least, 5), min_size=size, max_size=size))
    return spaces.MultiDiscrete(
        np.reshape(nvec, shape).astype(dtype), dtype=dtype.type, start=np.reshape(start, shape).astype(dtype)
    )


@st.composite
def box(draw: Any, dtypes: tuple[str, ...]) -> spaces.Space[Any]:
    dtype, shape = np.dtype(draw(st.sampled_from(dtypes))), draw(SHAPES)
    if dtype.kind in "iu":
        low = draw(st.integers(0, 20))
        return spaces.Box(low, low + draw(st.integers(1, 100)), shape, dtype.type)
    bounds = [draw(st.sampled_from([(-1.0, 1.0), (0.1, 0.3), (-7.0, -3.0), (0.0, np.inf), (-np.inf, np.inf)]))]
    bounds *= math.prod(shape)
    low, high = (np.reshape([pair[i] for pair in bounds], shape).astype(dtype) for i in (0, 1))
    return spaces.Box(low, high, shape, dtype.type)


FLOATS = ("float16", "float32", "float64")
MULTI_BINARY = st.sampled_from([spaces.MultiBinary(3), spaces.MultiBinary([2, 2])])
LEAVES = st.one_of(
    discrete(),
    multi_discrete(),
    MULTI_BINARY,
    box((*FLOATS, *INTEGERS)),
)
OBSERVATIONS = st.one_of(LEAVES, st.dictionaries(st.sampled_from("abc"), LEAVES, min_size=1).map(spaces.Dict))
ACTIONS = st.one_of(discrete(), multi_discrete(), MULTI_BINARY, box((*FLOATS, *INTEGERS)))


@settings(max_examples=150)
@given(OBSERVATIONS, ACTIONS)
def test_the_loop_over_a_raw_environment_is_what_was_trained(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> None:
    made: list[Recording] = []

    def make_env() -> Recording:
        made.append(Recording(observation_space, action_space))
        return made[-1]

    policy = initial_policy(ppo(make_env, **SMALL), seed=1, device="cpu")
    trained_in = make(policy.config.env, 1, seed=7)
    observation = trained_in.reset()
    for _ in range(4):
        observation = trained_in.step(choose_actions(policy, observation, None, greedy=True)).observation

    env = Recording(observation_space, action_space)
    single, _ = env.reset(seed=derive_seeds(7, 1)[0])
    kept = []
    for _ in range(4):
        kept.append(single)
        single, *_ = env.step(policy.act(single, greedy=True))  # asserts that the action is in the space
    assert_same_actions(env.actions, made[-1].actions)

    batch = (
        {key: np.stack([observation[key] for observation in kept]) for key in observation_space}
        if isinstance(observation_space, spaces.Dict)
        else np.stack(kept)
    )
    actions = policy.act(batch, greedy=True)
    assert actions.dtype == action_space.dtype and actions.shape == (4, *action_space.shape)
    assert_same_actions(list(actions), env.actions)
    for _ in range(5):
        assert action_space.contains(policy.act(single))


def assert_same_actions(a: list[Any], b: list[Any]) -> None:
    # a batch's sums round differently
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=1e-3, atol=1e-3)


@settings(max_examples=150)
@given(st.one_of(OBSERVATIONS, ACTIONS))
def test_spaces_survive_as_plain_data(space: spaces.Space[Any]) -> None:
    again = from_plain(to_plain(space))
    assert again == space and again.dtype == space.dtype
    assert again.contains(space.sample())


def test_numbering_by_hand() -> None:
    # The networks count from 0; with the head's weights at 0 its bias alone decides: entry 1 is the largest.
    policy = policy_of(spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=-1))
    with torch.no_grad():
        policy.agent.policy.head.weight.zero_()
        policy.agent.policy.head.bias.copy_(torch.tensor([0.0, 5.0, 1.0]))
    assert policy.act(np.zeros(2, np.float32), greedy=True) == 0  # -1, 0, 1
    assert policy.act(np.zeros((2, 2)), greedy=True).tolist() == [0, 0]
    bounded = policy_of(spaces.Box(-1, 1, (2,)), spaces.Box(np.float64(10), np.float64(20), (1,), np.float64))
    with torch.no_grad():
        bounded.agent.policy.head.mean.weight.zero_()
        for mean, expected in ((0.0, 15.0), (0.5, 17.5), (3.0, 20.0)):  # [-1, 1] is mapped onto [10, 20], then clipped
            bounded.agent.policy.head.mean.bias.fill_(mean)
            assert bounded.act(np.zeros(2), greedy=True).tolist() == [expected]


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (np.zeros(3), r"shape \(1, 3\)|shape \(3,\)"),
        (np.zeros((4, 2, 2)), "shape"),
        (np.array([0, np.nan]), "is not finite"),
        ({"x": 1}, "is a dict, but must be an array"),
    ],
)
def test_an_observation_that_does_not_fit(observation: Any, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        policy_of(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)).act(observation)


def test_tensors_give_tensors() -> None:
    policy = policy_of(spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(-1, 1, (1,))), spaces.Discrete(2, start=3))
    arrays = {"a": np.zeros((4, 2), np.float32), "b": np.ones((4, 1), np.float32)}
    tensors = {name: torch.from_numpy(x).requires_grad_() for name, x in arrays.items()}
    action = policy.act(tensors, greedy=True)
    assert isinstance(action, torch.Tensor) and action.dtype == torch.int64
    assert action.tolist() == policy.act(arrays, greedy=True).tolist()
    one = policy.act({name: x[0] for name, x in tensors.items()}, greedy=True)
    assert one.shape == () and int(one) == int(action[0])
    half = policy.act({name: x.bfloat16() for name, x in tensors.items()}, greedy=True)
    assert half.tolist() == action.tolist()  # these numbers are exact in bfloat16
    for space in (spaces.Box(0, 200, (1,), np.uint8), spaces.MultiBinary(2)):  # as tensor environments get them
        assert policy_of(spaces.Box(-1, 1, (2,)), space).act(torch.zeros(2)).dtype == torch.int64


def test_only_images_are_said_to_be_stacked() -> None:
    with pytest.raises(EnvError, match=r"has shape \(\), but its space has \(2,\)\.$"):
        policy_of(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)).act(0.5)


def test_a_run_in_place_of_a_policy_is_one_sentence(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy is '.*', but must be a LoadedPolicy, as load_policy\(run_dir\) ret"):
        evaluate(str(run))  # type: ignore[arg-type]
    result = TrainResult(run, 1, 0.0, interrupted=False)
    for call in (load_policy, resume):
        with pytest.raises(ConfigError, match=r"run_dir is TrainResult\(.*, but must be a folder; its run_dir is one"):
            call(result)  # type: ignore[arg-type]


def test_a_step_that_fails_on_an_infinite_action_is_a_divergence(scripted: LoadedPolicy) -> None:
    class Fragile:
        def step(self, action: np.ndarray) -> Any:
            raise EnvError("The observation of environment 0 of x is not finite: it is inf at [0].")

    for action, kind in ((np.array([[np.inf]]), DivergenceError), (np.zeros((1, 1)), EnvError)):
        with pytest.raises(kind):
            step_of(Fragile(), action)  # type: ignore[arg-type]


def test_equal_bounds_of_two_dtypes_are_the_same_space() -> None:
    """EnvPool's Humanoid has bounds of 0.4 in float64, Gymnasium's in float32."""
    wide, narrow = (spaces.Box(-0.4, 0.4, (3,), dtype) for dtype in (np.float64, np.float32))
    observation = spaces.Box(-1, 1, (2,))
    assert difference((observation, wide), (observation, narrow), "x") is None
    assert difference((observation, wide), (observation, spaces.Box(-0.5, 0.4, (3,))), "x")


def test_an_array_that_torch_cannot_share() -> None:
    policy = policy_of(spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(5))
    picture = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)[:, ::-1]  # mirrored: negative strides
    assert policy.act(picture, greedy=True) == policy.act(picture.copy(), greedy=True)


# ---------------------------------------------------------------- evaluate


class Scripted(gymnasium.Env[Any, Any]):
    """Reward 1 a step. Episode e of all that this class has begun lasts ``lengths[e]`` steps; None: for ever."""

    lengths: tuple[int | None, ...] = (3,)
    begun = 0
    open: ClassVar[set[int]] = set()
    made = 0
    fails_at: int | None = None

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(2)

    @classmethod
    def restart(cls, lengths: tuple[int | None, ...], fails_at: int | None = None) -> None:
        cls.lengths, cls.begun, cls.open, cls.made, cls.fails_at = lengths, 0, set(), 0, fails_at

    def __init__(self) -> None:
        if type(self).made == self.fails_at:
            raise RuntimeError("no licence")
        type(self).made += 1
        self.number = type(self).made
        self.open.add(self.number)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.length = self.lengths[type(self).begun % len(self.lengths)]
        type(self).begun += 1
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == self.length, False, {}

    def close(self) -> None:
        self.open.discard(self.number)


@pytest.fixture
def scripted() -> Iterator[LoadedPolicy]:
    Scripted.restart((3,))
    policy = initial_policy(ppo(Scripted, **SMALL), device="cpu")
    Scripted.restart((3,))
    yield policy
    assert not Scripted.open


def test_one_copy_plays_all_episodes(scripted: LoadedPolicy) -> None:
    Scripted.restart((3, 1, 4))
    result = evaluate(scripted, None, 6, 0, 1)
    assert (Scripted.made, result.returns, result.lengths) == (1, [3, 1, 4, 3, 1, 4], [3, 1, 4, 3, 1, 4])
    assert str(result) == "2.67 +- 0.56 (6 episodes)" and result.unfinished == 0


@pytest.mark.parametrize(("num_envs", "episodes", "made"), [(None, 9, 2), (5, 9, 5), (5, 3, 3), (100, 80, 80)])
def test_copies(num_envs: int | None, episodes: int, made: int, scripted: LoadedPolicy) -> None:
    # None: the two of the training
    assert len(evaluate(scripted, None, episodes, 0, num_envs).returns) == episodes
    assert Scripted.made == made


def test_copies_of_a_configuration(scripted: LoadedPolicy) -> None:
    evaluate(scripted, EnvConfig(id=scripted.config.env.id, num_envs=3), 70)
    assert Scripted.made == 3
    Scripted.restart((3,))
    evaluate(scripted, EnvConfig(id=scripted.config.env.id), 70)  # 256 by default
    assert Scripted.made == 64


def test_an_episode_without_end(scripted: LoadedPolicy) -> None:
    Scripted.restart((2, None, 4))
    result = evaluate(scripted, None, 5, 0, 1, 10)
    # episodes of 2, for ever, 4, 2, for ever
    assert result.returns == [2, 4, 2] and result.unfinished_returns == [10, 10] and result.unfinished == 2
    assert str(result) == "2.67 +- 0.67 (3 episodes, and 2 unfinished episodes not counted)"
    Scripted.restart((10, 11))
    last_step = evaluate(scripted, None, 2, 0, 1, 10)  # an end at the last allowed step is an end
    assert (last_step.returns, last_step.unfinished) == ([10], 1)


def test_unfinished_episodes_in_several_copies(scripted: LoadedPolicy) -> None:
    # Three copies with two episodes each, begun in the order of `lengths`. Copies 0, 1, 2 begin with: for ever, 2, 3.
    # After step 2 copy 1 begins one for ever, after step 3 copy 2 one of 2, with which it is done after step 5. Copy 2
    # is reset all the same, to 3 and after step 8 to 1. Copy 0 is cut after step 6, copy 1 after step 2 + 6 = 8. Then
    # all are reset, and copy 0 plays an episode of 1.
    Scripted.restart((None, 2, 3, None, 2, 3, 1, 1, 7, 7))
    result = evaluate(scripted, None, 6, 0, 3, 6)
    assert result.returns == [2, 3, 2, 1] and result.unfinished_returns == [6, 6]


def test_no_episode_ends(scripted: LoadedPolicy) -> None:
    Scripted.restart((None,))
    result = evaluate(scripted, None, 4, 0, 2, 5)
    assert (result.returns, result.unfinished) == ([], 4)
    assert math.isnan(result.mean) and math.isnan(result.standard_error)
    assert Evaluation([1.0], [1]).unfinished == 0


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_copies_are_closed_if_a_later_one_cannot_be_made(fails_at: int, scripted: LoadedPolicy) -> None:
    Scripted.restart((3,), fails_at=fails_at)
    with pytest.raises(RuntimeError, match="no licence"):
        evaluate(scripted, None, 8, 0, 4)
    assert Scripted.made == fails_at and not Scripted.open


@pytest.mark.parametrize("where", ["step", "reset", "close", "act"])
def test_copies_are_closed_whatever_fails(where: str, scripted: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if where == "close":
            Scripted.open.discard(self.number)
        raise RuntimeError("broken")

    if where == "act":
        monkeypatch.setattr(scripted.agent.policy, "forward", functools.partial(broken, None))
    else:
        monkeypatch.setattr(Scripted, where, broken)
    if where == "close":  # the result counts
        assert len(evaluate(scripted, None, 8, 0, 4).returns) == 8
    else:
        with pytest.raises(RuntimeError, match="broken"):
            evaluate(scripted, None, 8, 0, 4)
    assert Scripted.made == 4 and not Scripted.open


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"episodes": 0}, "episodes is 0, but must be an integer of at least 1"),
        ({"episodes": 2.5}, "episodes is 2.5"),
        ({"seed": -1}, "seed is -1, but must be an integer of at least 0"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
    ],
)
def test_numbers_out_of_range(changes: dict[str, Any], words: str, scripted: LoadedPolicy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluate(scripted, **changes)
    if "num_envs" not in changes:
        with pytest.raises(ConfigError, match=words):
            record(scripted, tmp_path / "x.gif", **changes)
    if "seed" in changes:
        with pytest.raises(ConfigError, match=words):
            initial_policy(scripted.config, **changes)


def test_numpy_integers_and_long_seeds(scripted: LoadedPolicy) -> None:
    result = evaluate(scripted, None, np.int64(2), 2**70, np.int32(1), np.int64(9))
    assert result.returns == [3, 3]


# ---------------------------------------------------------------- run folders


class Adjustable(Recording):
    """Spaces by the options of a run."""

    def __init__(self, size: int = 2, actions: int = 3, start: int = 0, bound: float = 1.0, value: float = 1.0) -> None:
        super().__init__(spaces.Box(-bound, bound, (size,)), spaces.Discrete(actions, start=start))
        self.value, self.steps = value, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation, *_ = super().step(action)
        return observation, self.value, self.steps % 4 == 0, False, {}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(ppo(Adjustable, **SMALL, env_options={"start": 5}), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def edit(run: Path, old: str, new: str) -> None:
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))


def rewrite(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the newest checkpoint, with a valid digest."""
    content, _ = checkpoint.load_newest(run / "checkpoints")
    change(content)
    checkpoint.save(run / "checkpoints", content["run"]["iteration"], content, 1)


def test_a_policy_loads_where_the_environment_is_missing(run: Path) -> None:
    observation = np.array([0.2, -0.3], np.float32)
    expected = load_policy(run, device="cpu").act(observation, greedy=True)
    edit(run, environment_id(Adjustable), "not_installed:Env")
    policy = load_policy(run, device="cpu", trust_code=True)
    assert policy.act(observation, greedy=True) == expected and expected in (5, 6, 7)
    assert policy.observation_space == spaces.Box(-1, 1, (2,)) and policy.action_space == spaces.Discrete(3, start=5)
    with pytest.raises(ConfigError, match="not_installed"):
        evaluate(policy)
    assert len(evaluate(load_policy(run, env=Adjustable), None, 2).returns) == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "size: 3",
            r"observation space Box\(-1.0, 1.0, \(2,\), float32\), and .*Adjustable has Box\(-1.0, 1.0, \(3,\)",
        ),
        ("actions: 4", r"action space Discrete\(3, start=5\), and .*Adjustable has Discrete\(4, start=5\)"),
        ("start: 6", r"action space Discrete\(3, start=5\), and .*Adjustable has Discrete\(3, start=6\)"),
    ],
)
def test_other_spaces_than_those_of_the_training(option: str, words: str, run: Path, tmp_path: Path) -> None:
    edit(run, "start: 5", option if "start" in option else f"start: 5\n    {option}")
    before = (run / "config.yaml").read_bytes()
    policy = load_policy(run, device="cpu")
    with pytest.raises(ConfigError, match=f"trained with the {words}"):
        evaluate(policy)
    with pytest.raises(ConfigError, match=f"trained with the {words}"):
        record(policy, tmp_path / "x.gif")
    with pytest.raises(CheckpointError, match=f"trained with the {words}"):
        resume(run, total_env_steps=32, quiet=True)
    assert (run / "config.yaml").read_bytes() == before  # a resume that fails changes nothing


def test_bounds_of_float_observations_may_differ(run: Path) -> None:
    edit(run, "start: 5", "start: 5\n    bound: 3.0")
    assert len(evaluate(load_policy(run), None, 2).returns) == 2
    assert resume(run, total_env_steps=32, quiet=True).env_steps == 32


def test_weights_that_are_not_finite(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(content: dict[str, Any]) -> None:
        content["state"]["agent"]["policy.head.bias"][0] = math.nan

    rewrite(run, spoil)
    with pytest.raises(CheckpointError, match=r"weights that are not finite \(policy\.head\.bias\)"):
        load_policy(run)
    assert main(["eval", str(run), "--episodes", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_outputs_that_are_not_finite(scripted: LoadedPolicy) -> None:
    with torch.no_grad():
        scripted.agent.policy.head.bias.fill_(math.inf)
    with pytest.raises(DivergenceError, match="outputs are not finite"):
        scripted.act(np.zeros(1))
    with pytest.raises(DivergenceError, match="outputs are not finite"):
        evaluate(scripted)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("state"),
        lambda content: content["state"].pop("agent"),
        lambda content: content["state"]["agent"].pop("policy.head.bias"),
        lambda content: content["state"].update(agent=3),
        lambda content: content["state"].update(spaces=3),
        lambda content: content["state"]["spaces"].update(action={"kind": "Tuple"}),
        lambda content: content["state"]["spaces"]["observation"].update(shape=[-1]),
        lambda content: content["state"]["spaces"]["observation"].update(dtype="object"),
        lambda content: content["state"]["spaces"]["observation"].update(low=[1, 2, 3]),
    ],
)
def test_a_checkpoint_of_something_else(change: Callable[[Any], Any], run: Path) -> None:
    rewrite(run, change)
    with pytest.raises(CheckpointError, match=r"do not match its config\.yaml|does not describe the spaces"):
        load_policy(run)


def test_a_configuration_that_was_edited(run: Path) -> None:
    edit(run, "encoder: auto", "encoder: mlp")
    load_policy(run)
    edit(run, "architecture: shared", "architecture: dual")
    with pytest.raises(CheckpointError, match=r"do not match its config\.yaml; it may have been edited"):
        load_policy(run)


@pytest.mark.parametrize("seed", ["-3", "true", "x", "1.5"])
def test_a_seed_that_was_edited(seed: str, run: Path) -> None:
    edit(run, "seed: 0", f"seed: {seed}")
    with pytest.raises(CheckpointError, match=r"config\.yaml' is damaged: seed is .*an integer of at least 0"):
        read_config(run)


def test_checkpoints_of_before_have_no_spaces(run: Path) -> None:
    expected = load_policy(run).act(np.zeros(2), greedy=True)
    rewrite(run, lambda content: content["state"].pop("spaces"))
    assert load_policy(run).act(np.zeros(2), greedy=True) == expected
    assert resume(run, total_env_steps=32, quiet=True).env_steps == 32


def test_precision(tmp_path: Path) -> None:
    picture = spaces.Box(0, 255, (16, 16, 3), np.uint8)
    config = ppo(lambda: Recording(picture, spaces.Discrete(3)), **SMALL, precision="bf16")
    train(config, tmp_path / "run", quiet=True)
    assert load_policy(tmp_path / "run", device="cpu").agent.policy.precision == "bf16"
    policy = load_policy(tmp_path / "run", device="cpu", precision="fp32")
    assert policy.agent.policy.precision == "fp32" and policy.config.precision == "bf16"
    with pytest.raises(ConfigError, match="precision is 'fp16'"):
        load_policy(tmp_path / "run", precision="fp16")


# ---------------------------------------------------------------- environments that have to be passed in


def five(**options: Any) -> Adjustable:
    """Every step is worth 5."""
    return Adjustable(**{"value": 5.0, **options})


def test_a_wrapped_factory_is_not_taken_for_the_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @functools.wraps(Adjustable)
    def hundred(**options: Any) -> Any:
        return Adjustable(**{"value": 100.0, **options})

    run = tmp_path / "run"
    train(ppo(hundred, **SMALL, env_options={"size": 3}), run, quiet=True)
    said = capsys.readouterr().err
    assert "which resume, eval and watch cannot find in another process" in said and "load_policy(run, env=...)" in said
    assert evaluate(load_policy(run), None, 2).mean == 400  # four steps
    code = f"from anybatch import evaluate, load_policy; print(evaluate(load_policy({str(run)!r}), None, 2))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pass it again in Python" in other.stderr and not other.stdout
    command = subprocess.run([sys.executable, "-m", "anybatch", "eval", run], capture_output=True, text=True)
    assert command.returncode == 2 and command.stderr.count("\n") == 1 and "pass it again" in command.stderr

    # another process, which does not know the recorded id
    edit(run, read_config(run)[0].env.id, "somewhere:made#00000000-1")
    policy = load_policy(run, device="cpu")
    assert evaluate(policy, five, 2).mean == 20  # with the option size 3, or the spaces would differ
    assert evaluate(load_policy(run, env=five), None, 2).mean == 20
    with pytest.raises(ConfigError, match="pass it again"):
        evaluate(policy)
    with pytest.raises(ConfigError, match="pass it again"):
        resume(run, total_env_steps=32, quiet=True)
    capsys.readouterr()
    assert resume(run, env=five, total_env_steps=32, quiet=True).env_steps == 32
    assert f"and is {environment_id(five)!r} from now on" in capsys.readouterr().err
    assert read_config(run)[0].env.id == environment_id(five) and read_config(run)[0].env.options == {"size": 3}
    assert resume(run, total_env_steps=48, quiet=True).env_steps == 48


def test_nothing_is_said_about_what_can_be_imported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run)
    capsys.readouterr()
    train(ppo(Adjustable, **SMALL), run, quiet=True)
    assert capsys.readouterr().err == ""
    assert evaluate(load_policy(run), Adjustable, 2).mean == 4


def test_options_go_to_the_training_environment_only(run: Path) -> None:
    policy = load_policy(run)  # trained with start 5, and spaces tell whether the option is passed on
    assert len(evaluate(policy, Adjustable, 2).returns) == 2
    assert len(evaluate(policy, lambda: Adjustable(start=5), 2).returns) == 2
    for other in (environment_id(Adjustable), lambda: Adjustable(start=0)):
        with pytest.raises(ConfigError, match="trained with the action space"):
            evaluate(policy, other, 2)


def test_an_encoder_of_the_program_itself(tmp_path: Path) -> None:
    program = """
import sys
import torch
from anybatch import evaluate, load_policy, ppo, resume, train


class Net(torch.nn.Module):
    def __init__(self, space):
        super().__init__()
        self.out_features = 4
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return SIGN * self.layer(x)


if SIGN > 0:
    small = dict(num_envs=2, rollout_steps=4, minibatches=2, total_env_steps=16, tensorboard=False)
    train(ppo("gym:CartPole-v1", encoder="__main__:Net", **small), "run", quiet=True)
else:
    load_policy("run")
    resume("run", total_env_steps=32, quiet=True)
"""
    said = [
        subprocess.run(
            [sys.executable, "-c", program.replace("SIGN", sign)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for sign in ("1", "-1")
    ]
    assert said[0].count("model.encoder is '__main__:Net': resume, eval and watch need a program that defines it") == 1
    assert said[1].count("model.encoder is '__main__:Net': the class of that name in this program is used") == 2
    command = [sys.executable, "-m", "anybatch", "eval", "run"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and "model.encoder is '__main__:Net', which cannot be imported" in result.stderr


def test_a_video_of_an_environment_that_is_passed_in(tmp_path: Path) -> None:
    pytest.importorskip("imageio")
    picture = spaces.Box(0, 255, (16, 16, 3), np.uint8)
    env = functools.partial(Recording, picture, spaces.Discrete(3, start=1))
    policy = policy_of(picture, spaces.Discrete(3, start=1))
    assert record(policy, tmp_path / "x.gif", env=env, max_steps=3) == 4


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (gymnasium.error.DependencyNotInstalled("no pygame"), "Drawing cannot be rendered: no pygame"),
        (SystemExit(0), "render of .*Drawing raised SystemExit: 0"),
        (ValueError("wrong"), "render of .*Drawing raised ValueError: wrong"),
        (np.zeros((0, 4, 3), np.uint8), r"render of .*Drawing returned an array of shape \(0, 4, 3\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Received the following error")
def test_a_renderer_that_fails_is_one_sentence(frame: Any, message: str, vectorization: str, tmp_path: Path) -> None:
    pytest.importorskip("imageio")
    options = {"frame": frame} if vectorization == "sync" else {"frame": frame, "vectorization": vectorization}
    config = EnvConfig(environment_id(Drawing), 1, options=options)
    with pytest.raises(EnvError, match=message):
        record(policy_of(BOX, spaces.Discrete(2)), tmp_path / "x.gif", env=config)


@pytest.mark.parametrize("number", [1, 3])
def test_the_command(number: int, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--episodes", "3", "--num-envs", "1", "--max-steps", str(number)]
    assert main(["eval", str(run), *flags]) == 0
    # the environment ends an episode at every fourth step of its life, so with 3 at most the second one is complete
    expected = {1: "mean return: no episode was completed (3 unfinished)", 3: "mean return: 1.00 (1 episode, and 2"}
    assert expected[number] in capsys.readouterr().out
    assert main(["eval", str(run), "--seed", "-1"]) == 2
    assert "seed is -1" in capsys.readouterr().err


def test_progress_counts_ended_episodes() -> None:
    seen: list[int] = []
    evaluate(
        initial_policy(ppo("gym:CartPole-v1", **SMALL), device="cpu"), episodes=5, num_envs=1, progress=seen.append
    )
    assert seen == [1, 2, 3, 4, 5]


def test_eval_and_watch_show_progress(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anybatch.system.display._FIRST_SECONDS", 0.0)
    monkeypatch.setattr(GymnasiumLoop, "render", lambda self: np.zeros((16, 16, 3), np.uint8))
    for command, words in (
        (["eval", str(run), "--episodes", "3"], "% of 3 episodes"),
        (["watch", str(run), "--video", str(tmp_path / "x.gif")], "2 frames"),
    ):
        assert main([*command, "--quiet"]) == 0
        assert capsys.readouterr().err == ""
        assert main(command) == 0
        err = capsys.readouterr().err
        assert words in err and "elapsed 0:00:0" in err


class Noisy(torch.nn.Module):
    """Shifts and drops numbers in training alone."""

    out_features = 2

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False), torch.nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layers(x)
        return features


def test_policies_do_not_act_as_in_training() -> None:
    policy = policy_of(spaces.Box(-9, 9, (2,)), spaces.Discrete(2), encoder=Noisy)
    norm = policy.agent.policy.encoder.layers[0]
    assert policy.agent.policy.encoder(torch.tensor([[3.0, 3.0]])).tolist() == [
        [pytest.approx(3 / (1 + 1e-5) ** 0.5)] * 2
    ]
    actions = {policy.act(np.ones(2, np.float32), greedy=True).item() for _ in range(20)}
    assert len(actions) == 1 and norm.num_batches_tracked == 0
