"""bf16 in the encoders hurts neither learning nor log-ratios, and is nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from anybatch.presets import PRESETS
from anybatch.runs import checkpoint
from anybatch.runs.progress import read_progress
from anybatch.training import train


class Brightest(gym.Env[np.ndarray, int]):
    """Which quarter of a noisy picture is the brightest? One step an episode; 1 for the right answer."""

    observation_space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.answer = int(self.np_random.integers(4))
        picture = self.np_random.integers(0, 160, (16, 16, 3), dtype=np.uint8)
        row, column = divmod(self.answer, 2)
        picture[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 95
        return picture, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.answer)
        return self.reset()[0], reward, True, False, {}


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [tensor for one in state for tensor in tensors(one)]
    return [state] if isinstance(state, torch.Tensor) else []


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ppo-ewma", "ppg-ewma"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_learns_as_well(preset: str, precision: str, tmp_path: Path) -> None:
    """By chance 0.25 of the answers are right."""
    config = PRESETS[preset](
        f"{__name__}:Brightest",
        num_envs=16,
        rollout_steps=16,
        minibatches=4,
        total_env_steps=16 * 16 * 16,
        precision=precision,
        policy_iterations=8,
        aux_epochs=1,
        device="cpu",
    )
    train(config, tmp_path, seed=5, quiet=True)
    progress = read_progress(tmp_path / "progress.csv")
    assert progress["mean_episode_return"][-1] > 0.9
    # the first gradient step, of the weights that sampled: rounding alone
    assert progress["max_log_ratio"][0] < (1e-4 if precision == "fp32" else 0.02)
    kept = checkpoint.load_newest(tmp_path / "checkpoints")[0]["state"]
    for part in ("agent", "proximal", "optimizers"):
        found = {tensor.dtype for tensor in tensors(kept[part])}
        assert found == {torch.float32}, part
