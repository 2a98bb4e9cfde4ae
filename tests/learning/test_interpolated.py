"""A proximal policy by interpolation: it is limited by the age of the data that it trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anybatch.presets import ppo
from anybatch.runs.progress import read_progress
from anybatch.training import train


def test_an_interpolated_policy_is_as_old_as_the_data_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the behaviour policy is the centre of mass over the age of each iteration's data."""
    import anybatch.policy_phase as phase

    seen, share = [], phase.behavior_share

    def record(center_of_mass: float, age: float) -> float:
        seen.append((age, share(center_of_mass, age)))
        return seen[-1][1]  # type: ignore[return-value]

    monkeypatch.setattr(phase, "behavior_share", record)
    source = {"rollout.source.kind": "delayed", "delay": 2}
    small: dict[str, Any] = {"num_envs": 2, "steps": 8, "minibatches": 2, "policy_epochs": 1, "value_epochs": 1}
    config = ppo("gym:CartPole-v1", **small, **source, interpolated=True, center_of_mass=3.0, total_env_steps=16 * 7)
    train(config, tmp_path / "run", quiet=True)
    # 2 of 7 rollouts fill the buffer. Two gradient steps an iteration: data 0, 1 and then always 2 iterations old;
    # 3/2 and 3/4 of its age, at most 1
    expected = [(0, 1.0), (2, 1.0), (4, 0.75), (4, 0.75), (4, 0.75)]
    assert list(dict.fromkeys(seen)) == list(dict.fromkeys(expected))
    assert [age for age, _ in seen[::2]] == [age for age, _ in expected]
    columns = read_progress(tmp_path / "run" / "progress.csv")
    # half the square of (1/4) log(theta/behav) is 1/16 of that of the whole log-ratio, and so not KL[behav, theta]
    assert all(a < b for a, b in zip(columns["kl_proximal"][3:], columns["kl_behavior"][3:], strict=True))
