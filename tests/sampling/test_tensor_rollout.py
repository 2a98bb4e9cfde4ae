"""Rollouts in environments of tensors: those of the same environments behind NumPy, without waiting for the device."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.config.masks import ActionMask
from anybatch.config.schema import EnvConfig, ModelConfig, ObservationConfig
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.envs.tensor import TensorVectorEnv
from anybatch.errors import DivergenceError, EnvError
from anybatch.models.agent import Agent, build_agent
from anybatch.sampling.rollout import EpisodeTracker, Rollout, Sampler, collect
from anybatch.sampling.tensor_rollout import TensorEpisodes, TensorSampler, collect_tensors
from anybatch.system.signals import Interrupts

CPU = torch.device("cpu")
N, T = 5, 12


class Walk:
    """A walk on the line: instance i ends after 3 + i steps, every second one by a time limit."""

    device = "cpu"

    def __init__(self, num_envs: int, kind: str = "box", final: bool = True) -> None:
        self.num_envs, self.kind, self.final = num_envs, kind, final
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space: Any = box
        self.action_space: Any = spaces.Box(np.array([-2.0], np.float32), np.array([1.0], np.float32))
        if kind == "masks":
            self.observation_space = spaces.Dict({"action_mask": ActionMask((3,)), "x": box})
            self.action_space = spaces.Discrete(3)
        self.seen = torch.zeros(num_envs, 2)  # the same tensor at every step

    def reset(self) -> Any:
        self.time = torch.zeros(self.num_envs, dtype=torch.int64)
        self.place = torch.arange(self.num_envs).float()
        return self.observe()

    def step(self, action: Tensor) -> tuple[Any, ...]:
        moved = action.float() - 1 if self.kind == "masks" else action[:, 0]
        if self.kind == "masks":
            assert not bool((action == self.time % 3).any()), "an illegal action"
        self.place, self.time = self.place + moved, self.time + 1
        final = {"x": self.observe()["x"].clone()} if self.kind == "masks" else self.observe().clone()
        if self.kind == "masks":
            final["action_mask"] = torch.zeros(self.num_envs, 3)
        done = self.time == 3 + torch.arange(self.num_envs)
        cut = done & (torch.arange(self.num_envs) % 2 == 0)
        self.place, self.time = torch.where(done, 0, self.place), torch.where(done, 0, self.time)
        return self.observe(), moved.abs(), done & ~cut, cut, {"final_obs": final} if self.final else {}

    def observe(self) -> Any:
        self.seen.copy_(torch.stack([self.place, self.time.float()], 1))
        if self.kind == "box":
            return self.seen
        return {"action_mask": self.time.unsqueeze(1) % 3 != torch.arange(3), "x": self.seen}


def games(kind: str = "box", final: bool = True) -> TensorVectorEnv:
    env = make(EnvConfig(id=environment_id(Walk), options={"kind": kind, "final": final}), N, 0)
    assert isinstance(env, TensorVectorEnv)
    return env


def agent_of(env: TensorVectorEnv, normalize: bool = False) -> Agent:
    observation = ObservationConfig(normalize=normalize)
    return build_agent(ModelConfig(policy_gain=1.0), env.observation_space, env.action_space, observation=observation)


def rollouts(kind: type[Sampler], env: TensorVectorEnv, agent: Agent, count: int = 3, **changes: Any) -> list[Rollout]:
    sampler: Any = kind(
        env,
        agent.action_spec,
        generator=torch.Generator().manual_seed(3),
        **{"bootstrap_truncated": True, **changes},
    )
    taken = []
    collected: Any = collect_tensors if kind is TensorSampler else collect
    for _ in range(count):
        taken.append(collected(sampler, agent, T, device=CPU, interrupts=Interrupts()))
        if taken[-1].observation_moments is not None:
            agent.observation_normalizer.update(taken[-1].observation_moments, T)  # type: ignore[union-attr]
    return [*taken, sampler.episodes.drain()]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("kind", ["box", "masks"])
def test_the_same_rollouts_as_through_numpy(kind: str, bootstrap: bool, normalize: bool) -> None:
    both = []
    for sampler in (Sampler, TensorSampler):
        env = games(kind)
        agent = agent_of(env, normalize)
        both.append(rollouts(sampler, env, agent, bootstrap_truncated=bootstrap))
    *arrays, counted = both[0]
    *tensors, counted_too = both[1]
    for one, other in zip(arrays, tensors, strict=True):
        for field in fields(Rollout):
            expected, got = getattr(one, field.name), getattr(other, field.name)
            if field.name == "next_value":  # unused where terminated
                expected, got = (x.masked_fill(one.terminated, 0) for x in (expected, got))
            if isinstance(expected, Tensor | dict):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5, msg=lambda m, f=field.name: f"{f}: {m}")
    assert counted.episode_lengths == counted_too.episode_lengths != []  # type: ignore[attr-defined]
    np.testing.assert_allclose(counted.episode_returns, counted_too.episode_returns, rtol=1e-5)  # type: ignore[attr-defined]
    assert counted.env_steps == counted_too.env_steps == 3 * N * T  # type: ignore[attr-defined]


def test_without_last_observations_the_value_is_that_before_the_time_limit() -> None:
    env = games(final=False)
    agent = agent_of(env)
    with pytest.warns(UserWarning, match=r"lacks info\['final_obs'\]: .* V\(s_t\)") as told:
        first, second, _ = rollouts(TensorSampler, env, agent, count=2)
    assert len(told) == 1
    for rollout in (first, second):
        cut = rollout.done & ~rollout.terminated
        assert bool(cut.any())
        assert torch.equal(rollout.next_value[cut], rollout.value[cut])
        ongoing = ~rollout.done[:, :-1]
        assert torch.equal(rollout.next_value[:, :-1][ongoing], rollout.value[:, 1:][ongoing])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollouts(TensorSampler, games(final=False), agent, bootstrap_truncated=False)
        rollouts(TensorSampler, games(), agent)


class Waits(TorchDispatchMode):
    """Counts operations that wait for the device: a number or a size is read on the host."""

    names = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.count += name in self.names or by_mask
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_waits_for_the_device_in_a_step(normalize: bool) -> None:
    counts = []
    for steps in (4, 16):
        env = games()
        agent = agent_of(env, normalize)
        sampler = TensorSampler(env, agent.action_spec, bootstrap_truncated=True, generator=torch.Generator())
        with Waits() as waits:
            collect_tensors(sampler, agent, steps, device=CPU, interrupts=Interrupts())
        counts.append((waits.count, waits.operations))
    (few, operations), (many, more_operations) = counts
    assert 0 < few == many  # those of a rollout alone
    assert more_operations > 2 * operations


def test_episodes_are_counted_as_in_numpy() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = TensorEpisodes(4, CPU), EpisodeTracker(4)
    for _ in range(3):
        reward, done = rng.normal(size=(4, 9)).astype(np.float32), rng.random((4, 9)) < 0.3
        first = ours.add(torch.from_numpy(reward), torch.from_numpy(done))
        assert np.array_equal(first.numpy(), theirs.add(reward, done))
    other = TensorEpisodes(4, CPU)
    other.load_state_dict(ours.state_dict())
    a, b = ours.drain(), theirs.drain()
    assert a.episode_lengths == b.episode_lengths and a.env_steps == b.env_steps
    np.testing.assert_allclose(a.episode_returns, b.episode_returns, rtol=1e-6)
    reward, done = torch.ones(4, 2), torch.ones(4, 2, dtype=torch.bool)
    ours.add(reward, done)
    other.add(reward, done)
    assert ours.drain() == other.drain()


class Infinite(Walk):
    def observe(self) -> Any:
        return super().observe() / (self.time < 4).unsqueeze(1)


@pytest.mark.parametrize("normalize", [False, True])
def test_an_infinite_observation_is_named(normalize: bool) -> None:
    env = make(EnvConfig(id=environment_id(lambda num_envs: Infinite(num_envs))), N, 0)
    assert isinstance(env, TensorVectorEnv)
    agent = agent_of(env, normalize)
    sentence = "Observations of 5 environments of .* are not" if normalize else "of environment 2 of .* is not finite"
    with pytest.raises(EnvError, match=sentence):
        rollouts(TensorSampler, env, agent)


class Strict(Walk):
    """Refuses infinite actions, as simulators do."""

    def step(self, action: Tensor) -> tuple[Any, ...]:
        if not bool(torch.isfinite(action).all()):
            raise ValueError("action must be finite")
        return super().step(action)


@pytest.mark.parametrize(("spoiled", "kind"), [("policy", DivergenceError), ("observation", EnvError)])
def test_infinite_actions_are_blamed_on_the_policy_unless_the_observation_was(spoiled: str, kind: Any) -> None:
    env = make(EnvConfig(id=environment_id(Strict)), N, 3)
    assert isinstance(env, TensorVectorEnv)
    agent = agent_of(env)
    if spoiled == "policy":
        with torch.no_grad():
            for x in agent.policy_parameters():
                x.fill_(torch.nan)
    else:
        env._env.observe = lambda: torch.full((N, 2), torch.nan)
    with pytest.raises(kind, match=None if spoiled == "observation" else "the policy's actions are not finite"):
        rollouts(TensorSampler, env, agent, 1)


class Propagating(Walk):
    """Takes any action and computes with infinite ones, as most simulators do: reward and place become infinite."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)


@pytest.mark.parametrize("steps", [1, T])
def test_infinite_actions_are_blamed_on_the_policy_though_the_environment_returns_nan(steps: int) -> None:
    env = make(EnvConfig(id=environment_id(Propagating)), N, 3)
    assert isinstance(env, TensorVectorEnv)
    agent = agent_of(env)
    with torch.no_grad():
        for name, x in agent.named_parameters():
            if name.endswith("log_std"):
                x.fill_(100.0)  # e^100 overflows float32, though the parameters are finite
    sampler: Any = TensorSampler(
        env, agent.action_spec, generator=torch.Generator().manual_seed(3), bootstrap_truncated=True
    )
    with pytest.raises(DivergenceError):
        collect_tensors(sampler, agent, steps, device=CPU, interrupts=Interrupts())


def test_an_observation_after_the_last_step_is_named() -> None:
    env = make(EnvConfig(id=environment_id(lambda num_envs: Infinite(num_envs))), N, 0)
    agent: Any = agent_of(env)
    sampler: Any = TensorSampler(
        env, agent.action_spec, generator=torch.Generator().manual_seed(3), bootstrap_truncated=True
    )
    with pytest.raises(EnvError, match=r"of environment 2 of .* is not finite"):  # at time 4
        collect_tensors(sampler, agent, 4, device=CPU, interrupts=Interrupts())


class Lost(Walk):
    def step(self, action: Tensor) -> tuple[Any, ...]:
        *results, truncated, info = super().step(action)
        info["final_obs"][:, 1] = torch.where(truncated & (torch.arange(N) != 0), torch.inf, 0)
        return *results, truncated, info


@pytest.mark.parametrize("normalize", [False, True])
def test_an_infinite_last_observation_is_named(normalize: bool) -> None:
    env = make(EnvConfig(id=environment_id(lambda num_envs: Lost(num_envs))), N, 0)
    assert isinstance(env, TensorVectorEnv)
    with pytest.raises(EnvError, match=r"last observation of an episode of environment 2 of .* is not finite"):
        rollouts(TensorSampler, env, agent_of(env, normalize))
