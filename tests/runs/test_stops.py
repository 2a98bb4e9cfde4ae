"""A stop takes effect inside a long iteration, and its progress is shown."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from anybatch.config.io import override
from anybatch.runs.checkpoint import load_newest
from anybatch.runs.loggers import Logs
from anybatch.training import train
from small_runs import tiny_ppo


def test_a_stop_inside_a_hundred_thousand_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = override(tiny_ppo(), {"steps": 8, "minibatches": 1})
    notes: list[str] = []
    began: list[float] = []

    def note(logs: Logs, text: str) -> None:
        notes.append(text)
        if len(notes) == 1:
            began.append(time.monotonic())
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(Logs, "note", note)
    epochs = {"optimizer.policy_epochs": 100_000, "optimizer.value_epochs": 100_000}
    result = train(override(config, epochs), tmp_path / "run", quiet=True)
    assert result.interrupted and time.monotonic() - began[0] < 4  # two seconds on an idle machine
    assert notes[0] == "policy phase: epoch 2 of 100,000"
    assert load_newest(tmp_path / "run" / "checkpoints")[0]["run"]["iteration"] == 0
