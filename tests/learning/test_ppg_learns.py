"""PPG and PPG-EWMA learn CartPole in seconds, through three auxiliary phases and more."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppg, ppg_ewma
from anybatch.training import train

RANDOM_POLICY = 22  # mean return of uniformly random actions


@pytest.mark.slow
@pytest.mark.parametrize("preset", [ppg, ppg_ewma])
def test_ppg_learns_cartpole(preset: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = preset(
        "gym:CartPole-v1",
        num_envs=8,
        steps=64,
        step_size=2e-3,
        total_env_steps=24_576,
        precision="fp32",
        device="cpu",
        tensorboard=False,
        **{
            "optimizer.minibatches": 8,
            "advantage.discount": 0.99,
            "model.encoder": "mlp",
            "model.options": {"width": 32, "depth": 2},
            "aux.policy_iterations": 8,
            "aux.epochs": 4,
            "aux.minibatches": 32,
            "aux.step_size": 2e-3,
        },
    )
    result = train(config, tmp_path / "run", quiet=True)
    with open(tmp_path / "run" / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    first = float(rows[4]["mean_episode_return"])
    assert first < 2 * RANDOM_POLICY
    # three seeds of each preset gave 197 to 203
    assert result.mean_episode_return > 150
    phases = [row for row in rows if row["aux_clone_kl"]]
    assert [int(row["iteration"]) for row in phases] == [9, 17, 25, 33, 41]
    assert all(0 <= float(row["aux_clone_kl"]) < 0.01 for row in phases)  # the policy stays where it was
    assert all(math.isfinite(float(row["aux_value_loss"])) for row in phases)
