"""Gradient steps compiled as a whole learn what they learn otherwise."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils._pytree import tree_leaves

from anybatch.config.schema import ModelConfig
from anybatch.models.agent import build_agent
from anybatch.policy_phase import policy_phase
from anybatch.presets import override, ppg_ewma, ppo_ewma
from anybatch.runs.build import build
from anybatch.runs.checkpoint import load_newest
from anybatch.training import estimate_advantages, resume, train
from small_runs import tiny_ppo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]


@pytest.mark.parametrize(
    ("preset", "env", "more"),
    [
        # minibatches of 4 * 26 / 8 = 13 in pieces of 6 and 7: what is compiled has to serve both
        (ppo_ewma, "gym:CartPole-v1", {"micro_batch": 7}),
        (ppo_ewma, "gym:Pendulum-v1", {"policy.objective": "kl", "value_epochs": 2, "max_grad_norm": 0.1}),
        (ppg_ewma, "gym:CartPole-v1", {"log.noise_scale": True, "max_grad_norm": 0.1}),
    ],
)
def test_phases_learn_the_same(preset: Any, env: str, more: dict[str, Any], tmp_path: Path) -> None:
    config = preset(env, num_envs=4, rollout_steps=26, total_env_steps=10_000, device="cpu")
    changes = {"aux.policy_iterations": 1, "aux.epochs": 1, "aux.minibatches": 2}
    changes |= {"log.noise_scale": False, **more}
    learned = []
    for compiled in (False, True):
        parts = build(override(config, {**changes, "compile": compiled}), 1, segments=tmp_path / str(compiled))
        rollout = parts.source.next(0)
        batch, _ = estimate_advantages(rollout, rollout.reward, parts.learner.config, parts.advantage_normalizer)
        start = copy.deepcopy(parts.learner.agent.state_dict())
        seen = policy_phase(batch, parts.learner) | policy_phase(batch, parts.learner)
        if parts.auxiliary:
            parts.auxiliary.store.open()
            parts.auxiliary.after_iteration(batch)
            for _ in parts.auxiliary.gradient_steps(0.0):
                pass
            seen |= parts.auxiliary.statistics()
        learned.append((parts.learner.agent.state_dict(), seen))
        parts.env.close()
    (weights, seen), (fused_weights, fused_seen) = learned
    for name, x in weights.items():
        assert not torch.equal(x, start[name])
        # fp32 rounds to 6e-8, and sums in another order to a few times that; Adam divides by the gradient's size, so
        # that 16 or 32 steps of 5e-4 may differ by 1e-6 of a weight near 0, and by less than 1e-4 of others
        torch.testing.assert_close(fused_weights[name], x, rtol=1e-4, atol=1e-6, msg=name)
    assert seen.keys() == fused_seen.keys()
    for name, number in seen.items():
        assert fused_seen[name] == pytest.approx(number, rel=1e-3, abs=1e-5, nan_ok=True), name


def test_a_compiled_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    """Also its optimiser, whose steps are counted in memory that one operation updates."""
    config = override(tiny_ppo(), {"compile": True, "policy.proximal": "ewma", "max_grad_norm": 0.5})
    train(override(config, {"total_env_steps": 32}), tmp_path / "whole", seed=1, quiet=True)
    train(config, tmp_path / "halves", seed=1, quiet=True)
    resume(tmp_path / "halves", total_env_steps=32, quiet=True)
    whole, halves = (load_newest(tmp_path / name / "checkpoints")[0]["state"] for name in ("whole", "halves"))
    for name in ("agent", "optimizers", "proximal"):
        expected, numbers = tree_leaves(whole[name]), tree_leaves(halves[name])
        assert expected
        for x, y in zip(numbers, expected, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a processor with bf16")
def test_bf16_images_on_a_cpu() -> None:
    """Where the library would run on oneDNN's own tensors, which the compiler does not know."""
    images = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    agent = build_agent(ModelConfig(), images, spaces.Discrete(3), precision="bf16")
    observation = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    expected = agent.policy(observation)
    agent.policy.encoder.compile(dynamic=False)
    params = agent.policy(observation)
    params.square().sum().backward()
    torch.testing.assert_close(params, expected, rtol=0.02, atol=0.02)
