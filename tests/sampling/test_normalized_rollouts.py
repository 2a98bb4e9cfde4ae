"""Rollouts of normalised observations: what acted is what is trained on, whoever sampled and whenever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from anybatch.config.schema import TrainConfig
from anybatch.envs.registry import environment_id
from anybatch.presets import ppg, ppo
from anybatch.runs.build import Components, build
from anybatch.runs.checkpoint import load_newest
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.sampling.rollout import Rollout
from anybatch.sampling.sources import Delayed
from anybatch.training import train

SMALL: dict[str, Any] = {
    "num_envs": 3,
    "steps": 16,
    "minibatches": 1,
    "policy_epochs": 1,
    "value_epochs": 1,
    "device": "cpu",
    "tensorboard": False,
    "observation.normalize": True,
    "step_size": 1e-2,
}


class Shifted(gym.Env[Any, Any]):
    """A target near 50 that moves by 0.1 a step; the reward is for telling its side. Truncated after 5 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = float(action == (self.target > 50))
        return self.observe(), reward, False, self.t == 5, {}

    def observe(self) -> np.ndarray:
        self.target = float(50 + 0.1 * self.np_random.normal())
        return np.array([self.target, 1e3], np.float32)


def config(**changes: Any) -> TrainConfig:
    return ppo(environment_id(Shifted), **{**SMALL, **changes})


def iterations(parts: Components, count: int) -> list[Rollout]:
    """Rollouts, with statistics that follow as in the training loop, and weights that move."""
    taken = []
    for iteration in range(count):
        taken.append(parts.source.next(iteration))
        assert taken[-1].observation_moments is not None
        parts.learner.update_observation_normalizer(taken[-1].observation_moments)
        with torch.no_grad():
            for weight in parts.learner.agent.parameters():
                weight.add_(0.01)
    return taken


def test_the_ratio_is_1_at_the_first_gradient_step() -> None:
    parts = build(config(), 1)
    learner = parts.learner
    for iteration in range(3):
        rollout = parts.source.next(iteration)
        learner.update_observation_normalizer(rollout.observation_moments)  # type: ignore[arg-type]
        with torch.no_grad():
            params = learner.agent.policy(rollout.observation.flatten(0, 1))  # type: ignore[union-attr]
        logp = learner.action_spec.distribution(params).log_prob(rollout.action.flatten())
        # to the rounding of a matrix product in NumPy and in PyTorch
        assert float((logp - rollout.behavior_logp.flatten()).exp().sub(1).abs().max()) < 2e-6
    parts.env.close()


def test_values_of_next_and_last_observations_are_normalised_too() -> None:
    parts = build(config(), 1)
    iterations(parts, 2)
    learner = parts.learner
    statistics = learner.agent.observation_normalizer.shift_and_scale()  # type: ignore[union-attr]
    rollout = parts.source.next(2)
    assert rollout.done.sum() > 0 and not rollout.terminated.any()
    # neither is anywhere near the values of observations around (50, 1000)
    raw = torch.tensor([[50.0, 1000.0]])
    far = float((learner.agent.value(raw) - rollout.value.mean()).abs().detach())
    assert float((rollout.next_value - rollout.value.mean()).abs().max()) < far / 2
    sampler_observation = parts.source.state_dict()["sampler"]["observation"]
    last = learner.agent.value(
        (sampler_observation - torch.from_numpy(statistics[0])) * torch.from_numpy(statistics[1])
    )
    ongoing = ~rollout.done[:, -1]
    torch.testing.assert_close(rollout.next_value[ongoing, -1], last[ongoing].detach())
    parts.env.close()


@pytest.mark.parametrize("delay", [0, 2])
def test_late_data_is_what_acted(delay: int) -> None:
    """Each rollout is normalised by the statistics that belonged to its weights, and counted when it is trained on."""
    source = {"rollout.source.kind": "delayed", "rollout.source.delay": delay, "proximal": "recent"}
    parts = build(config(**source), 1)
    assert isinstance(parts.source, Delayed)
    normalizer = parts.learner.agent.observation_normalizer
    assert normalizer is not None
    versions = []
    for iteration in range(6):
        versions.append([*normalizer.shift_and_scale(), float(normalizer.count)])
        assert versions[-1][2] == iteration * 48  # 3 environments * 16 steps
        rollout = parts.source.next(iteration)
        normalizer.update(rollout.observation_moments, 16)  # type: ignore[arg-type]
        shift, scale, count = versions[max(0, iteration - delay)]
        if count:
            # normalised numbers turned back are near the raw ones only with the right statistics
            back = rollout.observation[..., 0] / scale[0] + shift[0]  # type: ignore[call-overload, index]
            mean = rollout.observation_moments[:, 0, 0]  # type: ignore[index]
            torch.testing.assert_close(back.double().mean(1), mean, rtol=1e-6, atol=1e-4)
    parts.env.close()


def test_ppg_keeps_what_is_trained_on() -> None:
    changes = {name: value for name, value in SMALL.items() if name != "minibatches"}
    aux = {"policy_iterations": 2, "epochs": 1, "minibatches": 2}
    parts = build(ppg(environment_id(Shifted), **changes, minibatches=1, aux=aux), 1)
    assert parts.auxiliary is not None
    parts.auxiliary.store.open()
    (rollout,) = iterations(parts, 1)
    parts.auxiliary.store.append(rollout.observation, rollout.value)
    kept = parts.auxiliary.store.observation(slice(0, 48))
    assert torch.equal(kept, rollout.observation.flatten(0, 1))  # type: ignore[arg-type, union-attr]
    assert float(kept.abs().max()) <= 10  # type: ignore[union-attr]
    parts.env.close()


def test_statistics_are_saved_with_the_policy_and_frozen(tmp_path: Path) -> None:
    learning = {"total_env_steps": 60 * 48, "minibatches": 6, "policy_epochs": 3, "value_epochs": 3}
    train(config(**learning), tmp_path, seed=1, quiet=True)
    policy = load_policy(tmp_path)
    saved = load_newest(tmp_path / "checkpoints")[0]["state"]["agent"]
    normalizer = policy.agent.observation_normalizer
    assert normalizer is not None and float(normalizer.count) == 60 * 48
    assert float(normalizer.mean[0]) == pytest.approx(50, abs=0.02)
    # it has learned what it can only see if its input is normalised as in training
    assert evaluate(policy, episodes=50, greedy=True).mean > 3.8  # by chance 2.5
    for name, value in policy.agent.state_dict().items():
        assert torch.equal(value, saved[name])
