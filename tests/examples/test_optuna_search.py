from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna")


@pytest.mark.slow
def test_the_search_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import optuna_search

    options = ["--trials", "6", "--env-steps", "2000", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["optuna_search.py", *options])
    optuna_search.main()
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("of 6 trials were pruned") and last.startswith("best: trial ")
    assert {path.name for path in tmp_path.iterdir()} == {f"trial-{number}" for number in range(6)}
