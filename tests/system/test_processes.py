"""Child processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from anybatch.system.processes import KILLED, ChildProcess, visible_gpus


def ended(process: ChildProcess) -> int:
    deadline = time.monotonic() + 30
    while (code := process.exit_code()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return code


def test_variables_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "set")
    monkeypatch.setenv("B", "set")
    monkeypatch.delenv("C", raising=False)
    (tmp_path / "log").write_text("before\n")
    code = "import os, sys; print(os.environ['A'], os.environ['B'], os.environ['C'], os.getcwd()); sys.exit(3)"
    process = ChildProcess(
        [sys.executable, "-c", code],
        tmp_path / "log",
        defaults={"A": "default", "C": "default"},
        variables={"B": "variable"},
        cwd=str(tmp_path),
    )
    assert ended(process) == 3
    assert (tmp_path / "log").read_text() == f"before\nset variable default {tmp_path}\n"


@pytest.mark.parametrize("detached", [False, True])
def test_stop_and_kill(detached: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    first, second = (ChildProcess(command, tmp_path / "log", detached=detached) for _ in range(2))
    assert first.exit_code() is None
    first.stop()
    second.kill()
    assert (ended(first), ended(second)) == (-15, KILLED)
    first.stop()  # no error after the end
    second.kill()


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
