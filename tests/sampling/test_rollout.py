"""Sampling, and one iteration of optimisation on what was sampled."""

from __future__ import annotations

import copy
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from anybatch.config.schema import TrainConfig
from anybatch.envs.base import Steps
from anybatch.errors import DivergenceError
from anybatch.minibatches import Batch, shuffled
from anybatch.models.actions import ActionSpec
from anybatch.policy_phase import policy_phase, value_loss
from anybatch.presets import ppo
from anybatch.proximal import EwmaProximal
from anybatch.runs.build import Components, build
from anybatch.sampling.rollout import EpisodeTracker, Rollout, Sampler, collect
from anybatch.system.signals import Interrupted, Interrupts
from anybatch.training import estimate_advantages

CPU = torch.device("cpu")


class Counter:
    """Environment n shows (n, step of the episode, episode); 0 terminates after 3 steps, 1 is truncated after 2.

    The reward of the step k of an episode (from 1) is k + 10 n.
    """

    num_envs = 2
    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(-100, 100, (3,))
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)
    bootstrap_truncated = True

    def __init__(self) -> None:
        self.k = [0, 0]
        self.episode = [0, 0]
        self.resets = 0
        self.actions: list[list[int]] = []

    def observation(self) -> np.ndarray:
        return np.array([[n, self.k[n], self.episode[n]] for n in range(2)], dtype=np.float32)

    def reset(self) -> np.ndarray:
        self.resets += 1
        return self.observation()

    def step(self, action: np.ndarray) -> Steps:
        self.actions.append(action.tolist())
        self.k = [k + 1 for k in self.k]
        reward = np.array([self.k[0], self.k[1] + 10], dtype=np.float32)
        terminated = np.array([self.k[0] == 3, False])
        truncated = np.array([False, self.k[1] == 2])
        final = self.observation()[[1]] if truncated[1] else None
        for n in range(2):
            if (terminated | truncated)[n]:
                self.k[n] = 0
                self.episode[n] += 1
        index = np.flatnonzero(truncated).astype(np.int64)
        return Steps(self.observation(), reward, terminated, truncated, index, final)

    def save_state(self) -> dict[str, Any]:
        return {"k": list(self.k), "episode": list(self.episode)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.k, self.episode = list(state["k"]), list(state["episode"])

    def render(self) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Linear:
    """V(n, k, e) = 100 n + 10 e + k, and logits (0, k)."""

    observation_normalizer = None

    def __call__(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        k = observation[:, 1]
        return torch.stack([torch.zeros_like(k), k], dim=-1), self.value(observation)

    def value(self, observation: Tensor) -> Tensor:
        return 100 * observation[:, 0] + 10 * observation[:, 2] + observation[:, 1]


def sampler(env: Any, *, bootstrap_truncated: bool = True, seed: int = 0) -> Sampler:
    generator = torch.Generator().manual_seed(seed)
    return Sampler(env, ActionSpec(env.action_space), bootstrap_truncated=bootstrap_truncated, generator=generator)


def sample(source: Sampler, steps: int, agent: Any = None) -> Rollout:
    return collect(source, agent or Linear(), steps, device=CPU, interrupts=Interrupts())


@pytest.mark.parametrize("bootstrap", [True, False])
def test_rollout_by_hand(bootstrap: bool) -> None:
    rollout = sample(sampler(Counter(), bootstrap_truncated=bootstrap), 5)
    # environment 0 ends after 3 steps, environment 1 after 2 and 4
    steps = [[0, 1, 2, 0, 1], [0, 1, 0, 1, 0]]
    episodes = [[0, 0, 0, 1, 1], [0, 0, 1, 1, 2]]
    assert isinstance(rollout.observation, Tensor)
    assert rollout.observation[..., 0].tolist() == [[0] * 5, [1] * 5]
    assert rollout.observation[..., 1].tolist() == steps
    assert rollout.observation[..., 2].tolist() == episodes
    assert rollout.reward.tolist() == [[1, 2, 3, 1, 2], [11, 12, 11, 12, 11]]
    assert rollout.first.int().tolist() == [[1, 0, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert rollout.done.int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 0, 1, 0]]
    assert rollout.value.tolist() == [[0, 1, 2, 10, 11], [100, 101, 110, 111, 120]]
    next_value = rollout.next_value.tolist()
    # environment 0: V of the next step; the last is the observation after the rollout, (k 2, episode 1): 12
    assert [next_value[0][t] for t in (0, 1, 3, 4)] == [1, 2, 11, 12]
    assert next_value[1][0::2] == [101, 111, 121]
    if bootstrap:
        # truncated steps bootstrap from the real last observation: (1, 2, 0) -> 102 and (1, 2, 1) -> 112
        assert next_value[1][1::2] == [102, 112]
        assert rollout.terminated.int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    else:
        assert torch.equal(rollout.terminated, rollout.done)


def test_recorded_distribution_is_the_one_that_acted() -> None:
    env = Counter()
    rollout = sample(sampler(env), 7)
    assert rollout.action.T.tolist() == env.actions
    assert rollout.action.unique().tolist() == [0, 1]
    k = rollout.observation[..., 1]  # type: ignore[index]
    assert torch.equal(rollout.behavior_params, torch.stack([torch.zeros_like(k), k], dim=-1))
    expected = rollout.behavior_params.log_softmax(-1).gather(-1, rollout.action.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(rollout.behavior_logp, expected)


def test_rollouts_join_without_a_seam() -> None:
    env, whole_env = Counter(), Counter()
    source, whole = sampler(env), sample(sampler(whole_env), 12)
    parts = [sample(source, steps) for steps in (5, 1, 6)]
    assert env.resets == 1
    for name in ("observation", "action", "reward", "value", "next_value", "first", "done", "behavior_logp"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(joined, getattr(whole, name)), name


def test_sampler_state_round_trip() -> None:
    original = sampler(Counter())
    sample(original, 4)
    state = copy.deepcopy(original.state_dict())
    other_env = Counter()
    restored = sampler(other_env, seed=99)
    assert restored.load_state_dict(state)
    a, b = sample(original, 9), sample(restored, 9)
    assert other_env.resets == 0
    assert torch.equal(a.action, b.action)
    assert torch.equal(a.observation, b.observation)  # type: ignore[arg-type]
    assert torch.equal(a.first, b.first)
    original.episodes.drain()
    restored.episodes.drain()
    assert original.episodes.state_dict().keys() == restored.episodes.state_dict().keys()
    for name, value in original.episodes.state_dict().items():
        assert torch.equal(value, restored.episodes.state_dict()[name]), name


def test_random_numbers_of_another_kind_of_device_are_left_aside() -> None:
    original, restored = sampler(Counter()), sampler(Counter(), seed=99)
    sample(original, 4)
    before = restored.generator.get_state()
    state = {**original.state_dict(), "generator": torch.zeros(16, dtype=torch.uint8)}  # a GPU's has 16 bytes
    assert restored.load_state_dict(state)
    assert torch.equal(restored.generator.get_state(), before)


def test_an_environment_that_cannot_be_saved_starts_new_episodes() -> None:
    class Unsavable(Counter):
        def save_state(self) -> None:  # type: ignore[override]
            return None

    original = sampler(Unsavable())
    sample(original, 4)
    state = original.state_dict()
    assert state["env"] is None
    env = Unsavable()
    restored = sampler(env, seed=99)
    assert not restored.load_state_dict(state)
    rollout = sample(restored, 3)
    assert env.resets == 1
    assert rollout.first[:, 0].all()
    assert torch.equal(restored.generator.get_state(), sampler_after(original, 3).generator.get_state())


def sampler_after(source: Sampler, steps: int) -> Sampler:
    sample(source, steps)
    return source


def test_episodes_are_counted_with_raw_rewards() -> None:
    source = sampler(Counter())
    sample(source, 5)
    sampled = source.episodes.drain()
    # environment 0: 1+2+3 = 6 in 3 steps; environment 1: 11+12 = 23 in 2 steps, twice
    assert sampled.env_steps == 10
    assert sorted(sampled.episode_returns) == [6, 23, 23]
    assert sorted(sampled.episode_lengths) == [2, 2, 3]
    assert source.episodes.drain().env_steps == 0
    sample(source, 1)
    # environment 0's second episode, begun in the first rollout, ends now: 1+2+3
    assert source.episodes.drain().episode_returns == [6, 23]


def test_restart_drops_the_episodes_that_run() -> None:
    tracker = EpisodeTracker(2)
    tracker.add(np.array([[1.0], [2.0]]), np.array([[False], [True]]))
    tracker.restart()
    tracker.add(np.array([[5.0], [7.0]]), np.array([[True], [True]]))
    sampled = tracker.drain()
    assert sampled.episode_returns == [2.0, 5.0, 7.0]
    assert sampled.episode_lengths == [1, 1, 1]
    assert sampled.env_steps == 4


def test_episodes_within_and_across_rollouts_in_the_order_of_their_ends() -> None:
    tracker = EpisodeTracker(2)
    done = np.array([[False, True, True, False], [True, False, False, False]])
    first = tracker.add(np.array([[1, 2, 4, 8], [16, 32, 64, 128]], np.float32), done)
    assert first.tolist() == [[True, False, True, True], [True, True, False, False]]
    # environment 1 ends 16 at t = 0; environment 0 ends 1 + 2 at t = 1 and 4 at t = 2
    assert tracker.drain().episode_returns == [16, 3, 4]
    first = tracker.add(np.array([[1], [1]], np.float32), np.array([[True], [True]]))
    assert first.tolist() == [[False], [False]]
    sampled = tracker.drain()  # 8 + 1 in 2 steps, 32 + 64 + 128 + 1 in 4
    assert (sampled.episode_returns, sampled.episode_lengths) == ([9, 225], [2, 4])


def step_of(reward: float, over: bool) -> Steps:
    """A step of one environment whose games are not its episodes."""
    none, flags = np.empty(0, np.int64), np.zeros(1, np.bool_)
    games = np.array([reward], np.float32), np.array([over])
    return Steps(np.zeros((1, 1)), np.zeros(1, np.float32), flags, flags, none, None, games=games)


def test_returns_are_those_of_games_where_lives_are_episodes() -> None:
    tracker = EpisodeTracker(1)
    clipped, lives = np.array([[1, 0, 1, 1]], np.float32), np.array([[False, True, False, True]])
    for reward, over in ((7, False), (0, False), (4, False), (1, True)):
        tracker.note(step_of(reward, over))
    assert tracker.add(clipped, lives).tolist() == [[True, False, True, False]]  # of lives
    sampled = tracker.drain()
    assert (sampled.episode_returns, sampled.episode_lengths) == ([12], [4])
    tracker.note(step_of(2, True))
    assert tracker.add(np.array([[1]], np.float32), np.array([[True]])).tolist() == [[True]]
    assert tracker.drain().episode_returns == [2]


def test_a_stop_request_ends_sampling() -> None:
    interrupts = Interrupts(patience=0.0)
    interrupts.request()
    with pytest.raises(Interrupted):
        collect(sampler(Counter()), Linear(), 5, device=CPU, interrupts=interrupts)  # type: ignore[arg-type]


class Broken(Linear):
    def __init__(self, where: str, junk: float) -> None:
        self.where, self.junk = where, junk

    def __call__(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        raw, value = super().__call__(observation)
        return (raw, value + self.junk) if self.where == "value" else (raw + self.junk, value)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_value_that_is_not_finite_ends_the_run(junk: float) -> None:
    with pytest.raises(DivergenceError):
        sample(sampler(Counter()), 3, Broken("value", junk))


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_policy_that_is_not_finite_ends_the_run(junk: float) -> None:
    with pytest.raises(DivergenceError):
        sample(sampler(Counter()), 3, Broken("policy", junk))


# ---------------------------------------------------------------- one iteration of optimisation


def small(**changes: Any) -> TrainConfig:
    settings = {
        "num_envs": 4,
        "steps": 32,
        "minibatches": 4,
        "precision": "fp32",
        "device": "cpu",
        "model": {"encoder": "mlp", "options": {"width": 16, "depth": 1}},
    }
    return ppo("gym:CartPole-v1", **{**settings, **changes})


def prepared(config: TrainConfig, seed: int = 0) -> tuple[Components, Batch]:
    parts = build(config, seed)
    rollout = parts.source.next(0)
    reward = parts.reward_normalizer(rollout.reward, rollout.first) if parts.reward_normalizer else rollout.reward
    batch, _ = estimate_advantages(rollout, reward, config, parts.advantage_normalizer)
    parts.env.close()
    return parts, batch


def weights(parts: Components) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in parts.learner.agent.state_dict().items()}


@pytest.mark.parametrize("proximal", ["behavior", "recent", "ewma"])
@pytest.mark.parametrize("objective", ["clip", "kl"])
@pytest.mark.parametrize("epochs", [(2, 2), (1, 2)])
def test_without_steps_every_ratio_is_1(proximal: str, objective: str, epochs: tuple[int, int]) -> None:
    config = small(
        step_size=0.0, proximal=proximal, objective=objective, policy_epochs=epochs[0], value_epochs=epochs[1]
    )
    parts, batch = prepared(config)
    before = weights(parts)
    seen = policy_phase(batch, parts.learner)
    assert seen["clip_fraction"] == 0
    assert 0 <= seen["kl_proximal"] < 1e-6
    assert 0 <= seen["kl_behavior"] < 1e-6
    assert seen["max_log_ratio"] < 1e-6
    assert seen["importance_capped"] == 0
    assert seen["effective_sample_size"] == pytest.approx(1, abs=1e-6)
    # normalised advantages have mean 0, and every weight is 1
    assert seen["policy_loss"] == pytest.approx(0, abs=1e-5)
    assert seen["gradient_steps"] == 4 * epochs[0]
    for name, value in weights(parts).items():
        assert torch.equal(value, before[name]), name


def test_with_steps_the_policy_moves() -> None:
    parts, batch = prepared(small(step_size=3e-2))
    seen = policy_phase(batch, parts.learner)
    assert seen["clip_fraction"] > 0
    assert seen["kl_proximal"] > 1e-4
    assert seen["max_log_ratio"] < 1e-6  # of the first step alone


@pytest.mark.parametrize("objective", ["clip", "kl"])
@pytest.mark.parametrize("epochs", [(2, 2), (1, 2)])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_micro_batches_do_not_change_the_step(objective: str, epochs: tuple[int, int], kind: str) -> None:
    results = []
    for micro_batch in (7, 32, 1000):
        config = small(
            micro_batch=micro_batch,
            objective=objective,
            proximal="ewma",
            policy_epochs=epochs[0],
            value_epochs=epochs[1],
            optimizer={"kind": kind, "step_size": 1e-2, "adam_eps": 1e-3},
        )
        parts, batch = prepared(config)
        before = weights(parts)
        seen = policy_phase(batch, parts.learner)
        after = weights(parts)
        results.append((after, seen))
        assert any(not torch.equal(after[name], before[name]) for name in after)
    for after, seen in results[:2]:
        for name, value in after.items():
            torch.testing.assert_close(value, results[2][0][name], rtol=0, atol=1e-6)
        for name in ("policy_loss", "value_loss", "entropy", "kl_behavior", "clip_fraction", "gradient_steps"):
            assert seen[name] == pytest.approx(results[2][1][name], abs=1e-5), name


@pytest.mark.parametrize("minibatches", [1, 4])
def test_an_epoch_is_textbook_sgd(minibatches: int) -> None:
    # theta <- theta - step_size * d/dtheta [policy loss + value loss - entropy bonus], for one minibatch after another
    config = small(
        minibatches=minibatches,
        policy_epochs=1,
        value_epochs=1,
        micro_batch=13,
        optimizer={"kind": "sgd", "step_size": 0.1},
    )
    parts, batch = prepared(config)
    reference = copy.deepcopy(parts.learner.agent)
    order = torch.Generator()
    order.set_state(parts.learner.shuffle.get_state())
    for minibatch in shuffled(batch, minibatches, order):
        params, value = reference(minibatch.observation)
        logp_all = params.log_softmax(-1)
        logp = logp_all.gather(-1, minibatch.action.unsqueeze(-1)).squeeze(-1)
        ratio, advantage = torch.exp(logp - minibatch.behavior_logp), minibatch.advantage
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
        loss = policy + 0.5 * (value - minibatch.value_target).square().mean() - 0.01 * entropy
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
                assert gradient.abs().sum() > 0
                parameter -= 0.1 * gradient
    policy_phase(batch, parts.learner)
    after = weights(parts)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_value_loss_by_hand() -> None:
    # .5 * ((1-3)^2 + (2-2)^2)/2 = 1; derivative .5 * 2 * (v - target)/2 = -1 and 0
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = value_loss(value, torch.tensor([3.0, 2.0]), 0.5)
    loss.backward()
    assert loss.item() == 1
    assert value.grad is not None
    assert value.grad.tolist() == [-1, 0]


def test_the_average_follows_steps_of_the_policy_alone() -> None:
    counts = {}
    for epochs in ((2, 2), (1, 3)):
        parts, batch = prepared(small(proximal="ewma", policy_epochs=epochs[0], value_epochs=epochs[1]))
        for _ in range(2):  # and goes on over iterations
            policy_phase(batch, parts.learner)
        proximal = parts.learner.proximal
        assert isinstance(proximal, EwmaProximal)
        counts[epochs] = int(proximal.state_dict()["terms"])
    # theta_0, and 4 minibatches for each policy epoch of 2 iterations
    assert counts == {(2, 2): 1 + 2 * 2 * 4, (1, 3): 1 + 2 * 1 * 4}


@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_separate_epochs_have_separate_optimisers(architecture: str) -> None:
    config = small(architecture=architecture, policy_epochs=1, value_epochs=3)
    parts, batch = prepared(config)
    optimizers = parts.learner.optimizers
    assert not optimizers.joint
    assert set(optimizers.optimizers) == {"policy", "value"}
    seen = policy_phase(batch, parts.learner)
    assert seen["gradient_steps"] == 4  # of the policy
    for name, count in (("policy", 4), ("value", 12)):
        state = optimizers.optimizers[name].state
        assert {int(s["step"]) for s in state.values()} == {count}, name
        assert len(state) == len(optimizers.parameters[name])
    shared = {id(p) for p in optimizers.parameters["policy"]} & {id(p) for p in optimizers.parameters["value"]}
    assert bool(shared) == (architecture == "shared")


def test_joint_epochs_have_one_optimiser_with_every_parameter_once() -> None:
    parts, batch = prepared(small())
    optimizers = parts.learner.optimizers
    assert optimizers.joint
    (parameters,) = optimizers.parameters.values()
    assert {id(p) for p in parameters} == {id(p) for p in parts.learner.agent.parameters()}
    assert len(parameters) == len({id(p) for p in parameters})
    assert policy_phase(batch, parts.learner)["gradient_steps"] == 12


@pytest.mark.parametrize("architecture", ["dual", "detach"])
def test_no_value_gradient_reaches_the_policy(architecture: str) -> None:
    parts, batch = prepared(small(architecture=architecture, policy_epochs=1, value_epochs=3))
    policy_phase(batch, parts.learner)
    # the same policy steps without any value loss; the order that follows three epochs of the value function
    config = small(architecture=architecture, policy_epochs=1, value_epochs=1, value_coefficient=0.0)
    other, other_batch = prepared(config)
    other.learner.shuffle.set_state(shuffle_after(config, epochs=3))
    policy_phase(other_batch, other.learner)
    for name, value in parts.learner.agent.policy.state_dict().items():
        torch.testing.assert_close(value, other.learner.agent.policy.state_dict()[name], rtol=1e-6, atol=1e-7)


def shuffle_after(config: TrainConfig, epochs: int) -> Tensor:
    """State of the generator of the minibatch order when `epochs` have been dealt out."""
    parts, batch = prepared(config)
    for _ in range(epochs):
        list(shuffled(batch, config.optimizer.minibatches, parts.learner.shuffle))
    return parts.learner.shuffle.get_state()


def test_gradient_norm_is_clipped_when_asked() -> None:
    moved = {}
    for limit in (None, 1e-3):
        optimizer = {"kind": "sgd", "step_size": 1.0, "max_grad_norm": limit}
        config = small(minibatches=1, policy_epochs=1, value_epochs=1, micro_batch=50, optimizer=optimizer)
        parts, batch = prepared(config)
        before = weights(parts)
        policy_phase(batch, parts.learner)
        after = weights(parts)
        moved[limit] = float(torch.cat([(after[n] - before[n]).flatten() for n in after]).norm())
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert moved[None] > 1e-2


def test_a_stop_request_ends_the_policy_phase() -> None:
    parts, batch = prepared(small())
    parts.learner.interrupts.request()
    parts.learner.interrupts.request()
    with pytest.raises(Interrupted):
        policy_phase(batch, parts.learner)


def test_advantages_are_normalised_over_the_iteration() -> None:
    config = small()
    parts = build(config, 0)
    rollout = parts.source.next(0)
    batch, seen = estimate_advantages(rollout, rollout.reward, config, parts.advantage_normalizer)
    assert batch.advantage.mean().item() == pytest.approx(0, abs=1e-6)
    assert batch.advantage.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    plain, _ = estimate_advantages(rollout, rollout.reward, config, None)
    assert plain.advantage.std(correction=0).item() == pytest.approx(seen["advantage_std"], rel=1e-5)
    assert plain.advantage.mean().item() == pytest.approx(seen["advantage_mean"], rel=1e-4, abs=1e-5)
    assert seen["advantage_std_used"] == pytest.approx(seen["advantage_std"], rel=1e-9)
    torch.testing.assert_close(plain.value_target, plain.advantage + rollout.value)
    torch.testing.assert_close(batch.value_target, plain.value_target)  # targets are not normalised
    with pytest.raises(DivergenceError):
        estimate_advantages(rollout, rollout.reward * math.nan, config, None)
    parts.env.close()
