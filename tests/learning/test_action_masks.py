"""Training with masks of illegal actions: none is ever sampled, whatever acts and however old the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from anybatch.errors import EnvError
from anybatch.presets import ppg_ewma, ppo_ewma
from anybatch.reproduce.stacked import run_stacked
from anybatch.runs.build import build
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import train

ACTIONS = 5
BAIT = 1e6
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "rollout.steps": 32,
    "minibatches": 4,
    "total_env_steps": 12 * 4 * 32,
    "device": "cpu",
    "precision": "fp32",
    "log.tensorboard": False,
}


class Ruled(gymnasium.Env[Any, Any]):
    """Two of five actions are illegal, others at every step; the reward of an illegal one is a bait.

    The reward of a legal one is 1 if it is the one that the observation tells.
    """

    length = 10

    def __init__(self, info: bool = False, several: bool = False) -> None:
        self.info = info
        box = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space: Any = spaces.MultiDiscrete([ACTIONS, ACTIONS]) if several else spaces.Discrete(ACTIONS)
        self.parts = 2 if several else 1
        mask = spaces.MultiBinary(ACTIONS * self.parts)
        self.observation_space: Any = box if info else spaces.Dict({"action_mask": mask, "observation": box})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._result()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        illegal = 1 - self.mask[np.arange(self.parts), np.atleast_1d(action)]
        reward = BAIT * illegal.mean() + np.mean(action == self.told)
        self.t += 1
        observation, info = self._result()
        return observation, float(reward), self.t == self.length, False, info

    def _result(self) -> tuple[Any, dict[str, Any]]:
        order = np.stack([self.np_random.permutation(ACTIONS) for _ in range(self.parts)])
        self.mask = (order < 3).astype(np.int8)
        self.told = int(self.np_random.integers(ACTIONS))
        observation = np.array([self.told / 2 - 1, 0], np.float32)
        if self.info:
            parts = tuple(self.mask) if self.parts > 1 else self.mask[0]
            return observation, {"action_mask": parts}
        return {"action_mask": self.mask.reshape(-1), "observation": observation}, {}


def illegal_fraction(folder: Path) -> float:
    """Over all episodes of a run."""
    progress = read_progress(folder / "progress.csv")
    assert np.isfinite(progress["entropy"]).all() and np.isfinite(progress["kl_proximal"]).all()
    return float(np.nanmax(progress["mean_episode_return"]) // Ruled.length) / BAIT


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("info", [False, True])
def test_unmasked_training_samples_illegal_actions_and_masked_training_none(
    info: bool, several: bool, tmp_path: Path
) -> None:
    """Two of five actions are illegal: without a mask, and before anything is learned, 40% of those sampled."""
    options = {"env.options": {"info": info, "several": several}}
    for setting in ("none", "info" if info else "auto"):
        config = ppo_ewma(Ruled, **SMALL, **options, action_mask=setting, step_size=1e-5)
        train(config, tmp_path / setting, seed=1, quiet=True)
    assert illegal_fraction(tmp_path / "none") == pytest.approx(0.4, abs=0.06)
    assert illegal_fraction(tmp_path / ("info" if info else "auto")) == 0


VARIANTS: dict[str, dict[str, Any]] = {
    "ewma, kl": {"objective": "kl"},
    "recent, stale": {"proximal": "recent", "rollout.source.kind": "delayed", "rollout.source.delay": 1},
    "behavior": {"proximal": "behavior"},
    "dual": {"architecture": "dual", "value_epochs": 2},
    "in torch": {"model.options": {"width": 600}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_proximal_policy_is_masked(name: str, tmp_path: Path) -> None:
    """Log-ratios of legal actions stay small, which those to an unmasked policy would not."""
    train(ppo_ewma(Ruled, **{**SMALL, **VARIANTS[name]}, step_size=3e-3), tmp_path, seed=1, quiet=True)
    assert illegal_fraction(tmp_path) == 0
    progress = read_progress(tmp_path / "progress.csv")
    assert max(progress["entropy"]) < np.log(3) + 1e-6  # nats of 3 legal actions
    assert 0 < max(progress["kl_proximal"]) < 0.1 and 0 < max(progress["kl_behavior"]) < 0.3


def test_the_auxiliary_phase_clones_the_masked_policy(tmp_path: Path) -> None:
    aux = {"aux.policy_iterations": 2, "aux.epochs": 2, "aux.minibatches": 4}
    train(ppg_ewma(Ruled, **SMALL, **aux, step_size=3e-3), tmp_path, seed=1, quiet=True)
    assert illegal_fraction(tmp_path) == 0
    clone = [x for x in read_progress(tmp_path / "progress.csv")["aux_clone_kl"] if not np.isnan(x)]
    assert len(clone) == 5 and 0 < max(clone) < 0.1


def test_stacked_runs_mask_as_single_ones_do(tmp_path: Path) -> None:
    configs = [ppo_ewma(Ruled, **SMALL, encoder="mlp", step_size=x) for x in (3e-3, 1e-3)]
    for i, result in enumerate(run_stacked(configs, [1, 2], rows=None, statistics=True)):
        train(configs[i], tmp_path / str(i), seed=i + 1, quiet=True)
        single = read_progress(tmp_path / str(i) / "progress.csv")
        assert max(result.columns["mean_episode_return"][1:]) <= Ruled.length
        for column in ("entropy", "kl_proximal", "kl_behavior", "clip_fraction", "explained_variance"):
            np.testing.assert_allclose(result.columns[column], single[column], rtol=1e-3, atol=1e-5, err_msg=column)


def test_a_loaded_policy_is_masked(tmp_path: Path) -> None:
    train(ppo_ewma(Ruled, **SMALL, env_options={"info": True}, action_mask="info"), tmp_path, seed=1, quiet=True)
    policy = load_policy(tmp_path, device="cpu")
    assert max(evaluate(policy, episodes=20).returns) <= Ruled.length
    assert max(evaluate(policy, episodes=20, greedy=True).returns) <= Ruled.length
    observation, info = Ruled(info=True).reset(seed=3)
    for _ in range(50):
        action = policy.act({"observation": observation, "action_mask": info["action_mask"]})
        assert info["action_mask"][action] == 1
    with pytest.raises(EnvError, match="allows nothing: at least one choice must be legal"):
        policy.act({"observation": observation, "action_mask": np.zeros(ACTIONS)})


def test_the_recorded_policy_is_the_masked_one() -> None:
    """The ratio of the first gradient step is 1, and the recorded probability counts legal actions alone."""
    parts = build(ppo_ewma(Ruled, **SMALL), 1)
    rollout = parts.source.next(0)
    params = parts.learner.agent.policy({key: x.flatten(0, 1) for key, x in rollout.observation.items()})  # type: ignore[union-attr]
    torch.testing.assert_close(params, rollout.behavior_params.flatten(0, 1))
    probabilities = rollout.behavior_params.softmax(-1)
    mask = rollout.observation["action_mask"]  # type: ignore[index, call-overload]
    assert float(probabilities[mask == 0].max()) == 0 and bool((mask.sum(-1) == 3).all())
    parts.env.close()
