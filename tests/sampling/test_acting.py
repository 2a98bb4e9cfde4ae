"""Acting with NumPy does what acting with PyTorch does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from anybatch.config.schema import GaussianConfig, ModelConfig
from anybatch.envs.gymnasium_vector import GymnasiumVector
from anybatch.errors import ConfigError, DivergenceError, EnvError
from anybatch.models.agent import Agent, build_agent
from anybatch.models.encoder import in_numpy, is_recordable
from anybatch.models.layers import ArrayFunction
from anybatch.models.mlp import MlpEncoder
from anybatch.observations import leaves, map_observation
from anybatch.presets import ppo_ewma
from anybatch.runs.build import build
from anybatch.sampling import numpy_policy
from anybatch.sampling.acting import rollout_actor
from anybatch.sampling.numpy_policy import NumpyPolicy
from anybatch.sampling.observation_buffer import ObservationBuffer
from anybatch.sampling.rollout import Rollout, Sampler, collect
from anybatch.system.signals import Interrupts

CPU = torch.device("cpu")
VECTOR = spaces.Box(-1, 1, (5,))
OBSERVATIONS = [
    VECTOR,
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(0, 200, (7,), np.uint8),
    spaces.Discrete(4),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Dict({"b": VECTOR, "a": spaces.Discrete(3)}),
]
ACTIONS = [
    spaces.Discrete(4),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 2]]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2, 2)),
    spaces.Box(-np.inf, np.inf, ()),
]


def agent(observations: gym.Space[Any], actions: gym.Space[Any], **model: Any) -> Agent:
    """With heads large enough for actions of very different probability."""
    built = build_agent(ModelConfig(**model), observations, actions, seed=3)
    with torch.no_grad():
        for parameter in built.policy.head.parameters():
            parameter.mul_(10).add_(0.1)
    return built


def draw(space: gym.Space[Any], count: int) -> Any:
    space.seed(0)
    drawn = [space.sample() for _ in range(count)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([one[key] for one in drawn]) for key in space}
    return np.stack(drawn)


@pytest.mark.parametrize(
    ("observations", "actions"),
    [*((space, ACTIONS[0]) for space in OBSERVATIONS), *((VECTOR, space) for space in ACTIONS[1:])],
    ids=str,
)
def test_same_parameters_and_actions(observations: gym.Space[Any], actions: gym.Space[Any]) -> None:
    live = agent(observations, actions)
    policy = NumpyPolicy.of(live.policy, 50)
    assert policy is not None
    spec, observation = live.action_spec, draw(observations, 50)
    noise = spec.noise((50,), torch.Generator().manual_seed(1))
    for _ in range(2):
        params, action = policy(observation, noise.numpy())
        with torch.no_grad():
            expected = live.policy(map_observation(torch.from_numpy, observation))
        assert params.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(params), expected)
        assert torch.from_numpy(action).dtype == spec.dtype
        # of the same parameters, since rounding decides a draw on the edge
        chosen = spec.distribution(torch.from_numpy(params)).transform(noise)
        torch.testing.assert_close(torch.from_numpy(action), chosen)
        assert len(chosen.unique()) > 1
        with torch.no_grad():  # an optimiser's step is seen
            for parameter in live.policy.parameters():
                parameter.mul_(1.5)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("std", ["parameter", "network"])
def test_gaussian_policies_act_alike(std: str, squash: bool) -> None:
    gaussian = GaussianConfig(std=std, log_std=-0.3, log_std_bounds=(-1.0, 0.5), squash=squash)  # type: ignore[arg-type]
    live = agent(VECTOR, spaces.Box(-2, 3, (2,)), gaussian=gaussian)
    policy = NumpyPolicy.of(live.policy, 50)
    assert policy is not None
    observation, noise = draw(VECTOR, 50), live.action_spec.noise((50,), torch.Generator().manual_seed(1))
    params, action = policy(observation, noise.numpy())
    with torch.no_grad():
        expected = live.policy(torch.from_numpy(observation))
    torch.testing.assert_close(torch.from_numpy(params), expected)
    log_std = expected[:, 2:]
    assert bool((log_std > -1).all() and (log_std < 0.5).all()) and (len(log_std.unique()) > 2) == (std == "network")
    sent = live.action_spec.array_to_env(action)
    np.testing.assert_allclose(sent, live.action_spec.to_env(torch.from_numpy(action)), rtol=1e-6)
    inside = 0.5 + 2.5 * np.tanh(action) if squash else np.clip(0.5 + 2.5 * action, -2, 3)
    np.testing.assert_allclose(sent, inside, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("actions", ACTIONS, ids=str)
def test_frequencies(actions: gym.Space[Any]) -> None:
    """Actions come as often as their log-probabilities say: the mean of -log p is then the entropy."""
    live = agent(VECTOR, actions)
    policy = NumpyPolicy.of(live.policy, 1)
    assert policy is not None
    spec, count = live.action_spec, 20_000
    observation = np.repeat(draw(VECTOR, 1), count, axis=0)
    params, action = policy(observation, spec.noise((count,), torch.Generator().manual_seed(2)).numpy())
    distribution = spec.distribution(torch.from_numpy(params))
    information = -distribution.log_prob(torch.from_numpy(action)).double()
    # within 4 standard errors
    assert abs(information.mean() - distribution.entropy()[0]) < 4 * information.std() / count**0.5
    assert information.std() > 0.01


@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_whole_rollouts(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rollouts() -> list[Rollout]:
        changes: dict[str, Any] = {"model.architecture": architecture, "device": "cpu"}
        config = ppo_ewma("gym:Pendulum-v1", num_envs=3, rollout_steps=256, total_env_steps=10_000, **changes)
        parts = build(config, 1, segments=tmp_path)
        return [parts.source.next(0) for _ in range(2)]  # the second begins in the middle of an episode and truncates

    with_numpy = rollouts()
    monkeypatch.setattr(numpy_policy, "_MAX_MULTIPLICATIONS", 0)
    for mine, theirs in zip(with_numpy, rollouts(), strict=True):
        for name, tensor in mine.state_dict().items():
            if isinstance(tensor, Tensor):
                # a chaotic environment: rounding grows over an episode
                torch.testing.assert_close(tensor, getattr(theirs, name), rtol=1e-3, atol=1e-3, msg=name)
    assert all(rollout.done.any() for rollout in with_numpy)  # after 200 steps, and after 400


def test_numpy_acts_by_itself_where_it_can() -> None:
    def kind(live: Any, like: Any = None) -> str:
        like = draw(VECTOR, 2) if like is None else like
        spec = live.action_spec
        buffer = ObservationBuffer.allocate(like, 4, CPU)
        return type(rollout_actor(live, spec, spec.noise((4, len(leaves(like)[0]))), buffer)).__name__

    assert kind(agent(VECTOR, spaces.Discrete(2))) == "_NumpyActor"
    assert kind(agent(VECTOR, spaces.Discrete(2), options={"width": 1024})) == "_TorchActor"
    images = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    assert kind(agent(images, spaces.Discrete(2)), draw(images, 2)) == "_TorchActor"
    mixed = spaces.Dict({"image": images, "speed": VECTOR})
    assert kind(agent(mixed, spaces.Discrete(2)), draw(mixed, 2)) == "_TorchActor"
    assert kind(agent(VECTOR, spaces.Discrete(2)), draw(VECTOR, 1000)) == "_TorchActor"


class Doubled(MlpEncoder):
    """A user's encoder that does something else than its base."""

    def forward(self, observation: Tensor) -> Tensor:
        return 2 * super().forward(observation)


class Same(MlpEncoder):
    """One that does not."""


class Told(Doubled):
    """And one that says how its own forward pass goes in NumPy."""

    recordable = True

    def in_numpy(self) -> ArrayFunction:
        function = super().in_numpy()
        assert function is not None
        return lambda observation: 2 * function(observation)


def test_a_subclass_speaks_for_itself() -> None:
    """Else it would act with one policy, and be trained as another."""
    assert in_numpy(Doubled(VECTOR)) is None
    assert not is_recordable(Doubled(VECTOR))
    for kind in (Same, Told):
        encoder = kind(VECTOR)
        function = in_numpy(encoder)
        assert function is not None
        assert is_recordable(encoder)
        observation = draw(VECTOR, 3)
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(function(observation)), encoder(torch.from_numpy(observation)))


def test_a_network_that_is_not_finite_is_reported_once(tmp_path: Path) -> None:
    config = ppo_ewma("gym:CartPole-v1", num_envs=2, rollout_steps=8, total_env_steps=1000, device="cpu")
    parts = build(config, 1, segments=tmp_path)
    with torch.no_grad():
        next(parts.learner.agent.parameters()).fill_(torch.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DivergenceError, match="not finite while sampling"):
            parts.source.next(0)


class Scaled(MlpEncoder):
    """Does something else by way of a method that forward calls."""

    def vectors(self, observation: Tensor) -> Tensor:
        return super().vectors(observation) * 0.1


class Wrong(MlpEncoder):
    """Says something about itself that is not so."""

    def in_numpy(self) -> ArrayFunction | None:
        function = super().in_numpy()
        assert function is not None
        return lambda observation: function(observation[:1]).repeat(len(observation), 0)  # the first one's for all


def test_whatever_changes_the_forward_pass_is_acted_with() -> None:
    assert in_numpy(Scaled(VECTOR)) is None
    hooked = MlpEncoder(VECTOR)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    replaced = MlpEncoder(VECTOR)
    replaced.forward = lambda observation: torch.zeros(len(observation), 64)  # type: ignore[method-assign]
    for encoder in (hooked, replaced):
        assert in_numpy(encoder) is None
        assert not is_recordable(encoder)


def test_an_encoder_that_is_wrong_about_itself_ends_the_run(tmp_path: Path) -> None:
    changes = {"encoder": f"{__name__}:Wrong", "device": "cpu"}
    config = ppo_ewma("gym:CartPole-v1", num_envs=4, rollout_steps=8, total_env_steps=1000, **changes)
    parts = build(config, 1, segments=tmp_path)
    with torch.no_grad():
        parts.learner.agent.policy.head.weight.mul_(100)  # type: ignore[operator, union-attr]
    with pytest.raises(ConfigError, match=r"in_numpy of the encoder Wrong differs from .* differ by [0-9.e+]+ of"):
        parts.source.next(0)


def features(shape: tuple[int, ...], dtype: Any) -> Any:
    return lambda self: lambda observation: np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("in_numpy_of_it", "message"),
    [
        (features((4, 5), np.float32), r"gave float32 \(4, 5\), but must give a float32 array \(4, 64\)"),
        (features((64,), np.float32), r"gave float32 \(64,\), but must"),
        (features((4, 64), np.float64), r"gave float64 \(4, 64\), but must"),
        (lambda self: lambda observation: torch.zeros(4, 64), r"gave Tensor, but must"),
        (lambda self: lambda observation: np.full((4, 64), np.nan, np.float32), "differs from its forward"),
        (lambda self: 5, "must be a method without arguments that returns a function"),
        (lambda self, observation: observation, "must be a method without arguments that returns a function"),
        (True, "must be a method without arguments that returns a function"),
    ],
)
def test_an_encoder_s_mistakes_are_named(in_numpy_of_it: Any, message: str) -> None:
    live = agent(VECTOR, spaces.Discrete(2))
    encoder = live.policy.encoder
    encoder.__class__ = type("Mistaken", (MlpEncoder,), {"in_numpy": in_numpy_of_it})
    env = GymnasiumVector(Rewriting(4, ACTIONS[0]), [1, 2, 3, 4], env_id="rewriting")
    sampler = Sampler(env, live.action_spec, bootstrap_truncated=True, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match=message):
        collect(sampler, live, 5, device=CPU, interrupts=Interrupts())


def test_low_precision_acts_as_it_is_trained() -> None:
    live = build_agent(ModelConfig(), VECTOR, spaces.Discrete(2), precision="bf16")
    assert NumpyPolicy.of(live.policy, 1) is not None
    live.policy.encoder.low_precision = True  # type: ignore[assignment]
    assert NumpyPolicy.of(live.policy, 1) is None


class Rewriting(gym.vector.VectorEnv):  # type: ignore[type-arg]
    """Overwrites the actions that it is handed, and is done with every third step."""

    metadata: dict[str, Any] = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs: int, space: gym.Space[Any]) -> None:
        self.num_envs, self.single_observation_space, self.single_action_space = num_envs, VECTOR, space

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros((self.num_envs, 5), np.float32), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        actions[:] = 0
        none = np.zeros(self.num_envs, bool)
        return self.reset()[0], np.zeros(self.num_envs), none, none, {}


@pytest.mark.parametrize("size", [1, 1024])  # acting with NumPy, and with PyTorch
@pytest.mark.parametrize("actions", [ACTIONS[0], ACTIONS[1], ACTIONS[3], spaces.Box(-1, 1, (2,))], ids=str)
def test_actions_are_kept_as_they_were(actions: gym.Space[Any], size: int) -> None:
    env = GymnasiumVector(Rewriting(3, actions), [1, 2, 3], env_id="rewriting")
    live = agent(VECTOR, actions, options={"width": size})
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(env, live.action_spec, bootstrap_truncated=True, generator=generator)
    rollout = collect(sampler, live, 50, device=CPU, interrupts=Interrupts())
    assert rollout.action.float().std() > 0.1


def test_a_rollout_that_breaks_off_leaves_no_half_episode() -> None:
    class Breaking(Rewriting):
        steps = 0

        def step(self, actions: np.ndarray) -> tuple[Any, ...]:
            self.steps += 1
            if self.steps == 3:
                raise EnvError("broken")
            return super().step(actions)

    live = agent(VECTOR, ACTIONS[0])
    env = GymnasiumVector(Breaking(3, ACTIONS[0]), [1, 2, 3], env_id="breaking")
    sampler = Sampler(env, live.action_spec, bootstrap_truncated=True, generator=torch.Generator().manual_seed(0))
    with pytest.raises(EnvError, match="broken"):
        collect(sampler, live, 5, device=CPU, interrupts=Interrupts())
    assert sampler.observation is None
    assert collect(sampler, live, 5, device=CPU, interrupts=Interrupts()).first[:, 0].all()
