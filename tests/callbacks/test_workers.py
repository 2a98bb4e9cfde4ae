"""Callbacks with several workers: worker 0 has them, and all end together."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from anybatch.runs.progress import read_progress
from distributed.programs import STEPS, small, train_hooked
from distributed.ranks import RankError, run_ranks


@pytest.mark.slow
def test_a_slow_callback_of_worker_0_stops_all(tmp_path: Path) -> None:
    config = small(**{"eval.every": 4 * STEPS, "eval.episodes": 2})
    results = run_ranks(2, train_hooked, config, str(tmp_path / "run"), "stop", 8.0, worker_timeout=3.0)
    assert results == [("enough", 2 * 4 * STEPS, False)] * 2
    columns = read_progress(tmp_path / "run" / "progress.csv")
    assert columns["rank"] == [0, 0]
    assert all(map(math.isfinite, columns["eval_return"]))
    assert (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()


@pytest.mark.slow
def test_an_error_ends_all(tmp_path: Path) -> None:
    results = run_ranks(2, train_hooked, small(), str(tmp_path / "run"), "fail", 0.0)
    expected = "UserCodeError: after_iteration of the callback Hook raised ZeroDivisionError: no luck"
    assert [str(x) for x in results] == [expected] * 2
    assert all(isinstance(x, RankError) for x in results)
