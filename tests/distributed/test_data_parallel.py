"""Several workers compute what one would, and end or continue together."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate_envs_per_worker
from anybatch.distributed.collectives import envs_per_worker
from anybatch.errors import ConfigError
from anybatch.runs.checkpoint import checkpoints, load_newest
from anybatch.training import resume
from distributed.programs import (
    STEPS,
    differing_weights,
    exchange,
    recorded,
    replay_as_one,
    small,
    train_rank,
)
from distributed.ranks import RankError, run_ranks

TIME_COLUMNS = (
    "seconds",
    "env_steps_per_second",
    "seconds_sampling",
    "seconds_policy_phase",
    "seconds_auxiliary_phase",
)


def rows(out: Path) -> list[dict[str, str]]:
    with open(out / "progress.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in csv.DictReader(file)]


def test_exchange() -> None:
    found = run_ranks(3, exchange)
    # samples 1, 2, 3 of gradients 1, 2, 3: (1*1 + 2*2 + 3*3) / 6
    values = [0.0, 100.0, 101.0, 200.0, 201.0, 202.0]
    mean, var = statistics.fmean(values), statistics.pvariance(values)
    for rank, one in enumerate(found):
        assert one["gradient"] == pytest.approx([14 / 6, 140 / 6])
        assert one["unused"] is None
        assert one["skipped"] == pytest.approx([3 * 2 / 6, 6 * 2 / 6, 9 * 2 / 6])  # 2 of 6 samples had a gradient
        assert one["moments"] == [pytest.approx([mean, var, 6]), pytest.approx([-mean, var, 6])]
        seen = one["statistics"]
        assert seen["count"] == 7
        assert seen["mean"] == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
        assert seen["max_seen"] == 2 and math.isnan(seen["gone"])
        assert one["any"] == [False, True]
        assert one["all_gather"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one["main"] == "from 0" and one["error"] == "no"
        assert one["mismatch"].startswith("then the odd of worker 1 differ from those of worker 0"), rank
        assert one["stopped"]
        assert one["moments"] == found[0]["moments"]  # to the last bit


def test_shares() -> None:
    assert envs_per_worker(10, 4) == [3, 3, 2, 2]
    assert envs_per_worker(8, 4) == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match=r"env.num_envs is 3, but 4 workers need at least one"):
        envs_per_worker(3, 4)
    validate_envs_per_worker(small(envs=5), [3, 2])
    with pytest.raises(ConfigError, match=r"2 workers share env.num_envs 5: optimizer.minibatches 8"):
        validate_envs_per_worker(small(envs=5, minibatches=8), [3, 2])  # 3 x 12 steps, in 8 chunks


CASES: dict[str, tuple[int, TrainConfig]] = {
    "ppo-ewma, 2 x 2": (2, small(envs=4, policy_epochs=2, value_epochs=2)),
    "ppo-ewma, passes spread out": (2, small(envs=4, policy_epochs=2, value_epochs=2, epoch_window=3.0)),
    "ppo-ewma, 4 x 1": (4, small(envs=4)),
    "ppg-ewma, 2 + 2 + 1": (3, small("ppg-ewma", envs=5, span=3.0)),
    "normalised observations, 3 + 2": (2, small(envs=5, **{"observation.normalize": True})),
    "separate epochs, 3 + 2, clipped": (2, small("ppg-ewma", envs=5, value_epochs=2, max_grad_norm=0.1)),
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_trains_the_same(case: str, tmp_path: Path) -> None:
    count, config = CASES[case]
    ranks = run_ranks(count, recorded, config, str(tmp_path / "apart"))
    assert not any(isinstance(one, RankError) for one in ranks), ranks
    for one in ranks[1:]:  # the same bits on every rank
        assert all(torch.equal(x, one["learned"][name]) for name, x in ranks[0]["learned"].items())
    assert not torch.equal(ranks[0]["rollouts"][0]["observation"][0], ranks[1]["rollouts"][0]["observation"][0])
    alone = replay_as_one(config, str(tmp_path / "alone"), ranks)
    assert alone.keys() == ranks[0]["learned"].keys()
    for name, x in alone.items():
        torch.testing.assert_close(
            ranks[0]["learned"][name], x, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    apart, together = rows(tmp_path / "apart"), rows(tmp_path / "alone")
    assert len(apart) == len(together) == 6
    aside = ("episode", "effective_sample_size")  # a replay counts no episodes; the share is of each piece
    for mine, other in zip(apart, together, strict=True):
        assert mine.keys() == other.keys()
        for column in mine:
            if not any(word in column for word in aside):
                numbers = [float(one[column] or "nan") for one in (mine, other)]
                assert numbers[0] == pytest.approx(numbers[1], rel=2e-3, abs=2e-6, nan_ok=True), column


def content(out: Path) -> Any:
    return load_newest(out / "checkpoints")[0]


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict):
        return [x for key in sorted({*a, *b}, key=str) for x in differences(a.get(key), b.get(key), f"{path}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [x for i, (p, q) in enumerate(zip(a, b, strict=True)) for x in differences(p, q, f"{path}[{i}]")]
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    same = a == b or (a != a and b != b)
    return [] if same or path.endswith("seconds") else [f"{path}: {a} != {b}"]


@pytest.mark.parametrize("preset", ["ppo-ewma", "ppg-ewma"])
def test_a_stop_on_one_worker_stops_all_and_resume_goes_on_to_the_same_bits(preset: str, tmp_path: Path) -> None:
    config = small(preset, envs=5)
    run_ranks(2, train_rank, config, str(tmp_path / "whole"))
    stopped = run_ranks(2, train_rank, config, str(tmp_path / "run"), ("term", 1, 2))
    # the signal comes while iteration 3 samples, and that iteration is completed
    assert [(one["interrupted"], one["env_steps"]) for one in stopped] == [(True, 3 * 5 * STEPS)] * 2
    assert content(tmp_path / "run")["run"]["iteration"] == 3
    resumed = run_ranks(2, train_rank, config, str(tmp_path / "run"))
    assert [(one["interrupted"], one["env_steps"]) for one in resumed] == [(False, 6 * 5 * STEPS)] * 2
    assert differences(content(tmp_path / "run"), content(tmp_path / "whole")) == []
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_an_iteration_that_one_worker_abandons_is_abandoned_by_all(tmp_path: Path) -> None:
    stopped = run_ranks(2, train_rank, small(), str(tmp_path / "run"), ("overdue", 1, 2))
    assert [(one["interrupted"], one["env_steps"]) for one in stopped] == [(True, 2 * 4 * STEPS)] * 2
    assert len(rows(tmp_path / "run")) == 2


@pytest.mark.parametrize("trouble", ["kill", "stop"])
def test_a_dead_or_stopped_worker_ends_the_others_and_resume_goes_on_with_those_left(
    trouble: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("ppg-ewma", envs=5, checkpoint_seconds=0.0)
    out = tmp_path / "run"
    found = run_ranks(3, train_rank, config, str(out), (trouble, 1, 3), worker_timeout=2.0)
    assert found[1] is None
    for one in (found[0], found[2]):
        assert str(one).startswith("WorkerError: worker 1 has died or hangs"), one
    assert content(out)["run"]["iteration"] == 3
    assert len(content(out)["workers"]) == 3
    result = resume(out)
    assert not result.interrupted and result.env_steps == 6 * 5 * STEPS
    said = capsys.readouterr().err
    assert "the checkpoint was written by 3 workers, but this run has 1 worker" in said
    assert "new episodes" not in said  # CartPole's environments are shared out anew as they stood
    assert "new policy phase" not in said  # and so is the phase's data
    assert [int(row["env_steps"]) for row in rows(out)] == [5 * STEPS * i for i in range(1, 7)]


def test_resume_with_more_workers(tmp_path: Path) -> None:
    config = small(envs=4, **{"rollout.source": {"kind": "delayed", "delay": 1}})
    first = run_ranks(1, train_rank, config, str(tmp_path / "run"), ("term", 0, 2))
    assert first[0]["interrupted"]
    before = content(tmp_path / "run")
    assert "workers" not in before
    then = run_ranks(2, train_rank, config, str(tmp_path / "run"))
    assert [one["env_steps"] for one in then] == [(6 + 1) * 4 * STEPS] * 2 or then[0]["env_steps"] >= 6 * 4 * STEPS
    assert len(content(tmp_path / "run")["workers"]) == 2
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) <= config.keep_checkpoints


@pytest.mark.parametrize("source", [{"kind": "delayed", "delay": 2}, {"kind": "asynchronous", "deterministic": True}])
def test_stale_sources(source: dict[str, Any], tmp_path: Path) -> None:
    config = small(envs=3, proximal="recent", **{"rollout.source": source})
    for out in ("a", "b"):
        found = run_ranks(2, train_rank, config, str(tmp_path / out))
        assert not any(isinstance(one, RankError) for one in found), found
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    ages = [float(row["staleness_iterations"]) for row in rows(tmp_path / "a")]
    lag = source.get("delay", 1)
    assert ages == [min(i, lag) for i in range(len(ages))]


def test_buffers_are_those_of_worker_0(tmp_path: Path) -> None:
    config = small("ppg-ewma", **{"model.encoder": "distributed.programs:BatchNormEncoder", "model.options": {}})
    found = run_ranks(2, train_rank, config, str(tmp_path / "run"))
    assert [one["env_steps"] for one in found] == [6 * 4 * STEPS] * 2


def test_weights_that_differ_end_the_run(tmp_path: Path) -> None:
    found = run_ranks(2, differing_weights, small(), str(tmp_path / "run"))
    for one in found:
        assert str(one).startswith(
            "WorkerError: after iteration 1 the networks of worker 1 differ from those of worker 0"
        )


def test_too_few_environments(tmp_path: Path) -> None:
    found = run_ranks(2, train_rank, small(envs=1), str(tmp_path / "run"))
    assert all("env.num_envs is 1, but 2 workers need at least one environment each" in str(one) for one in found)
    assert not (tmp_path / "run").exists()
