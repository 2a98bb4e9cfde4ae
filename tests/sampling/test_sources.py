"""Where rollouts come from, and what the log says of their age."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.observations import leaves
from anybatch.presets import ppo
from anybatch.runs.build import build
from anybatch.runs.checkpoint import load_newest
from anybatch.runs.progress import read_progress
from anybatch.sampling.rollout import Rollout, Sampled
from anybatch.sampling.sources import Delayed, Synchronous, staleness
from anybatch.training import train

ENVS, STEPS = 2, 8
ITERATION = ENVS * STEPS


def small(source: dict[str, Any], iterations: int = 6) -> TrainConfig:
    return override(
        ppo("gym:CartPole-v1", num_envs=ENVS, steps=STEPS, minibatches=2, precision="fp32", device="cpu"),
        {
            "total_env_steps": iterations * ITERATION,
            "tensorboard": False,
            "proximal": "recent",
            "model": {"encoder": "mlp", "options": {"width": 4, "depth": 1}},
            "rollout.source": source,
        },
    )


@pytest.mark.parametrize(
    ("source", "ages"),
    [
        ({"kind": "synchronous"}, [0, 0, 0, 0, 0, 0]),
        # rollouts 0, 1 and 2 act with the first weights, and wait for 0, 1 and 2 iterations; they use up the first
        # half of the environment steps at once, so three iterations with a new rollout each follow
        ({"kind": "delayed", "delay": 2}, [0, 1, 2, 2]),
        ({"kind": "delayed", "delay": 0}, [0, 0, 0, 0, 0, 0]),
        # here a rollout counts when it is trained on
        ({"kind": "asynchronous", "max_lag": 2, "deterministic": True}, [0, 1, 2, 2, 2, 2]),
        ({"kind": "asynchronous", "max_lag": 0}, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_the_log_tells_the_age_of_the_data(source: dict[str, Any], ages: list[int], tmp_path: Path) -> None:
    train(small(source), tmp_path / "run", quiet=True)
    progress = read_progress(tmp_path / "run" / "progress.csv")
    assert progress["staleness_iterations"] == ages
    assert progress["staleness_env_steps"] == [ITERATION * age for age in ages]
    assert all(1 / ITERATION <= share <= 1 for share in progress["effective_sample_size"])
    for name in ("kl_behavior", "kl_proximal"):
        assert len(progress[name]) == len(ages) and all(0 <= kl < math.inf for kl in progress[name])


def test_staleness_of_a_rollout() -> None:
    config = small({"kind": "synchronous"})
    parts = build(config, 0)
    rollout = parts.source.next(5)
    parts.env.close()
    assert rollout.version == 5
    assert staleness(rollout, 5, config) == {"staleness_iterations": 0, "staleness_env_steps": 0}
    assert staleness(replace(rollout, version=2), 10, config) == {
        "staleness_iterations": 8,
        "staleness_env_steps": 8 * ITERATION,
    }


@pytest.mark.parametrize("keys", [False, True])
def test_a_rollout_survives_a_checkpoint(keys: bool) -> None:
    parts = build(small({"kind": "synchronous"}), 0)
    rollout = parts.source.next(3)
    parts.env.close()
    if keys:
        rollout = replace(rollout, observation={"a": leaves(rollout.observation)[0], "b": rollout.reward})
    restored = Rollout.from_state_dict(rollout.state_dict(), torch.device("cpu"))
    assert restored.version == 3
    for name, value in rollout.state_dict().items():
        other = restored.state_dict()[name]
        if name == "observation":
            assert all(torch.equal(a, b) for a, b in zip(leaves(value), leaves(other), strict=True))
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other), name
        else:
            assert value == other, name


def test_sampled_adds_up() -> None:
    total = Sampled()
    total.add(Sampled(8, [1.0], [4]))
    total.add(Sampled(16, [2.0, 3.0], [5, 6]))
    assert (total.env_steps, total.episode_returns, total.episode_lengths) == (24, [1.0, 2.0, 3.0], [4, 5, 6])


@pytest.mark.parametrize("kind", ["synchronous", "delayed"])
def test_sources_in_turns_have_nothing_to_stop(kind: str) -> None:
    parts = build(small({"kind": kind}), 0)
    assert isinstance(parts.source, Synchronous if kind == "synchronous" else Delayed)
    assert parts.source.close()
    parts.env.close()


@pytest.mark.parametrize("source", [{"kind": "delayed", "delay": 0}, {"kind": "asynchronous", "max_lag": 0}])
def test_no_lag_at_all_is_synchronous_to_the_last_bit(source: dict[str, Any], tmp_path: Path) -> None:
    weights, rows = [], []
    for name, one in (("synchronous", {"kind": "synchronous"}), ("other", source)):
        train(small(one), tmp_path / name, seed=4, quiet=True)
        content, _ = load_newest(tmp_path / name / "checkpoints")
        weights.append(content["state"]["agent"])
        progress = read_progress(tmp_path / name / "progress.csv")
        rows.append({k: v for k, v in progress.items() if "second" not in k})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    np.testing.assert_equal(rows[0], rows[1])  # NaN equals NaN
