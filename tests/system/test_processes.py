"""Child processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anybatch.reproduce.stacked.launcher import _start_process as start_process_of_a_pool
from anybatch.system.launcher import end_with_launcher
from anybatch.system.processes import KILLED, ChildProcess, end_with_parent, visible_gpus


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


@pytest.mark.skipif(sys.platform != "linux", reason="a signal on the death of the parent is a feature of Linux")
@pytest.mark.parametrize("prepare", [end_with_parent, end_with_launcher, start_process_of_a_pool])
def test_no_process_outlives_a_killed_parent(
    prepare: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a pool of `reproduce run --processes`, of a worker of torchrun, and of an environment."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    file = tmp_path / "number"

    def child() -> None:
        prepare()
        file.write_text(str(os.getpid()))
        time.sleep(60)

    def parent() -> None:
        multiprocessing.get_context("fork").Process(target=child).start()
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    number = wait_for(lambda: int(file.read_text()) if file.exists() and file.read_text() else 0)
    process.kill()
    process.join()
    assert wait_for(lambda: not is_running(number)), "the child lives on"


def wait_for(value: Callable[[], int], seconds: float = 10.0) -> int:
    deadline = time.monotonic() + seconds
    while not (found := value()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
