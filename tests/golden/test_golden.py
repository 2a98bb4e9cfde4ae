"""Short fp32 runs of each preset against committed numbers, to a tolerance that survives another CPU model.

``make golden`` writes the numbers anew; look at the difference before committing it.
"""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from anybatch.config.io import override
from anybatch.presets import PRESETS
from anybatch.runs.evaluation import load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import train

FOLDER = Path(__file__).parent
NOT_COMPARED = {"env_steps_per_second", "max_log_ratio", "step_size"}


class Pictures(gymnasium.Env[np.ndarray, int]):
    """Random pictures in which the mean of the red channel tells the action that pays."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)

    def _picture(self) -> np.ndarray:
        self._right = int(self.np_random.integers(3))
        picture = self.np_random.integers(0, 100, (16, 16, 3), dtype=np.uint8)
        picture[..., 0] += np.uint8(70 * self._right)
        self._steps += 1
        return picture

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = float(action == self._right)
        return self._picture(), reward, self._steps > 9, False, {}


AUXILIARY = {"policy_iterations": 2, "aux_epochs": 2, "aux_minibatches": 4}
RUNS = {
    **{f"{preset}-cartpole": (preset, "gym:CartPole-v1", {}) for preset in ("ppo", "ppo-ewma")},
    "ppo-ewma-kl-cartpole": ("ppo-ewma", "gym:CartPole-v1", {"objective": "kl"}),
    **{f"{preset}-cartpole": (preset, "gym:CartPole-v1", AUXILIARY) for preset in ("ppg", "ppg-ewma")},
    "ppo-ewma-pictures": ("ppo-ewma", Pictures, {}),
    "ppo-ewma-recurrent-cartpole": ("ppo-ewma", "gym:CartPole-v1", {"model.recurrent": "gru"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_golden(name: str, tmp_path: Path, refresh_golden: bool) -> None:
    preset, env, changes = RUNS[name]
    small = {"num_envs": 4, "rollout_steps": 16, "minibatches": 4, "total_env_steps": 3 * 64, "precision": "fp32"}
    train(override(PRESETS[preset](env), small | changes), tmp_path / "run", seed=3, quiet=True)
    progress = read_progress(tmp_path / "run" / "progress.csv")
    weights = load_policy(tmp_path / "run", device="cpu").agent.state_dict()
    seen = {
        "progress": {
            column: values
            for column, values in progress.items()
            if column not in NOT_COMPARED and not column.startswith("seconds")
        },
        "norms": {key: float(value.norm()) for key, value in weights.items()},
    }
    path = FOLDER / f"{name}.json"
    if refresh_golden:
        path.write_text(json.dumps(seen, indent=1) + "\n")
    golden = json.loads(path.read_text())
    assert seen["progress"].keys() == golden["progress"].keys()
    for column, values in golden["progress"].items():
        np.testing.assert_allclose(seen["progress"][column], values, rtol=2e-3, atol=1e-5, err_msg=column)
    assert seen["norms"].keys() == golden["norms"].keys()
    for key, value in golden["norms"].items():
        np.testing.assert_allclose(seen["norms"][key], value, rtol=1e-4, atol=1e-6, err_msg=key)
