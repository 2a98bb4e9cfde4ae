"""The state of recurrent networks in rollouts: what is stored, carried on, reset, and used for values."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from anybatch.config.schema import TrainConfig
from anybatch.envs.registry import environment_id
from anybatch.errors import ConfigError
from anybatch.minibatches import Batch, shuffled
from anybatch.observations import Sequences
from anybatch.presets import ppo
from anybatch.runs.build import Components, build
from anybatch.sampling.memory import PolicyMemory
from anybatch.sampling.rollout import Rollout

N, T = 4, 12


class Noise(gymnasium.Env[Any, Any]):
    """Random observations; episodes of 5 or 8 steps are terminated or cut in turns."""

    observation_space = spaces.Box(-5, 5, (3,), np.float32)
    action_space = spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self.draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        even = self.episode % 2 == 0
        return self.draw(), 1.0, not even and self.t == 5, even and self.t == 8, {}

    def draw(self) -> np.ndarray:
        return self.np_random.normal(size=3).astype(np.float32)


class NoiseTensors:
    """The same lengths, with the time of the episode as observation."""

    device = "cpu"
    observation_space = spaces.Box(-1, 10, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self) -> Tensor:
        self.time = torch.zeros(self.num_envs, dtype=torch.int64)
        return self.observe()

    def step(self, action: Tensor) -> tuple[Any, ...]:
        self.time = self.time + 1
        done = self.time == 3 + torch.arange(self.num_envs)
        final, self.time = self.observe(), torch.where(done, 0, self.time)
        cut = done & (torch.arange(self.num_envs) % 2 == 0)
        return self.observe(), self.time.float(), done & ~cut, cut, {"final_obs": final}

    def observe(self) -> Tensor:
        return torch.stack([self.time.float(), self.time.float().sin(), torch.arange(self.num_envs).float()], 1)


def config(env: Any = Noise, **changes: Any) -> TrainConfig:
    small = {"num_envs": N, "rollout_steps": T, "minibatches": 1, "device": "cpu", "log.noise_scale": False}
    return ppo(environment_id(env), **{**small, "model.recurrent": "gru", "model.recurrent_width": 6, **changes})


def unrolled(parts: Components, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Parameters and values of the whole trajectories by the present weights."""
    assert rollout.state is not None
    flat = [x.flatten(0, 1) for x in (rollout.observation, rollout.first, rollout.state)]  # type: ignore[union-attr]
    with torch.no_grad():
        params, value = parts.learner.agent(Sequences(*flat, steps=T))  # type: ignore[arg-type]
    return params.view(N, T, -1), value.view(N, T)


@pytest.mark.parametrize("env", [Noise, NoiseTensors])
@pytest.mark.parametrize("changes", [{"model.recurrent": "lstm"}, {"architecture": "dual"}])
def test_the_networks_unroll_what_acted(env: Any, changes: dict[str, Any]) -> None:
    """The ratio of the first gradient step is 1, in the first rollout and in those that continue its episodes."""
    parts = build(config(env, **changes), 1)
    before: Rollout | None = None
    for _ in range(3):
        rollout = parts.source.next(0)
        params, value = unrolled(parts, rollout)
        torch.testing.assert_close(params, rollout.behavior_params, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(value, rollout.value, rtol=1e-4, atol=1e-5)
        ongoing = ~rollout.done[:, :-1]
        torch.testing.assert_close(rollout.next_value[:, :-1][ongoing], rollout.value[:, 1:][ongoing])
        if before is not None:  # the value that the last rollout ended with is that of this one's first step
            goes_on = ~before.done[:, -1]
            assert bool(goes_on.any())
            torch.testing.assert_close(before.next_value[goes_on, -1], rollout.value[goes_on, 0], rtol=1e-4, atol=1e-5)
        before = rollout
    parts.env.close()


def test_a_time_limit_is_bootstrapped_with_the_state_before_the_reset() -> None:
    parts = build(config(NoiseTensors, **{"advantage.discount": 0.9}), 1)
    rollout = parts.source.next(0)
    env, t = (int(x) for x in (rollout.done & ~rollout.terminated).nonzero()[0])
    time = float(t + 1)
    last = torch.tensor([[time, np.sin(time), float(env)]], dtype=torch.float32)
    with torch.no_grad():
        seen = torch.cat([rollout.observation[env, : t + 1], last])  # type: ignore[index, call-overload]
        assert rollout.state is not None
        start = rollout.state[env, :1].expand(t + 2, -1)
        first = torch.zeros(t + 2, dtype=torch.bool)
        first[0] = True
        value = parts.learner.agent.value(Sequences(seen, first, start, t + 2))
    assert float(rollout.next_value[env, t]) == pytest.approx(float(value[-1]), abs=1e-5)
    parts.env.close()


@pytest.mark.parametrize("minibatches", [2, 8])
def test_minibatches_hold_pieces_with_their_states(minibatches: int) -> None:
    parts = build(config(minibatches=minibatches), 1)
    rollout = parts.source.next(0)
    batch = Batch.of(
        rollout, advantage=rollout.reward, value_target=rollout.value, first=rollout.first, state=rollout.state
    )
    length = {2: T, 8: T // 2}[minibatches]
    for minibatch in shuffled(batch, minibatches, torch.Generator()):
        assert minibatch.steps == length and isinstance(minibatch.inputs, Sequences)
        for part in minibatch.micro_batches(1):  # never less than a piece
            assert len(part) == length and isinstance(part.inputs, Sequences)
            with torch.no_grad():
                params = parts.learner.agent.policy(part.inputs)
            torch.testing.assert_close(params, part.behavior_params, rtol=1e-4, atol=1e-5)
    parts.env.close()


def test_a_memory_is_of_as_many_environments_as_it_began_with() -> None:
    parts = build(config(), 1)
    memory, policy = PolicyMemory(), parts.learner.agent.policy
    x = torch.randn(2, 3)
    with torch.no_grad():
        first, second = memory.params(policy, x), memory.params(policy, x)
        memory.reset(np.array([True, False]))
        third = memory.params(policy, x)
        memory.reset()
        fourth = memory.params(policy, x)
        for done in (np.array([1, 0]), torch.tensor([1, 0], dtype=torch.uint8), [1.0, 0.0]):
            memory.reset()
            for _ in range(2):
                memory.params(policy, x)
            memory.reset(done)
            torch.testing.assert_close(memory.params(policy, x), third)
        with pytest.raises(ConfigError, match=r"done has shape \(3,\), but must be \(2,\)"):
            memory.reset([True, False, True])
    assert not torch.allclose(first, second)
    torch.testing.assert_close(third[0], first[0])
    assert not torch.allclose(third[1], first[1]) and torch.equal(fourth, first)
    with pytest.raises(ConfigError, match="the memory is of 2 environments, but 3 observations were given"):
        memory.params(policy, torch.randn(3, 3))
    parts.env.close()
