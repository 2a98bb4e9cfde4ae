"""A disk that is full outside a checkpoint: the file is named, and no thread prints a traceback."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anybatch.runs.loggers import TensorBoardLog
from anybatch.runs.progress import ProgressLog
from anybatch.system.atomic_files import write_bytes

resource = pytest.importorskip("resource")


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let writes beyond a size fail, as on a full disk; Python ignores the signal that goes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_progress_names_its_file(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path / "progress.csv")
    log.append({"iteration": 1})

    def fill() -> None:
        for _ in range(100):
            log.append({"iteration": 2})

    with files_up_to(64), pytest.raises(OSError, match=r"progress.csv'$"):
        fill()


def test_atomic_files_name_the_file_and_leave_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    path.write_text("old")
    with files_up_to(64), pytest.raises(OSError, match=r"grid.csv'$"):
        write_bytes(path, b"x" * 1000)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_names_its_folder_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hook = threading.excepthook
    log = TensorBoardLog(tmp_path)

    def fill() -> None:
        for step in range(200):
            log.write({"env_steps": step, "entropy": 1.0})
            time.sleep(0.02)

    with files_up_to(64), pytest.raises(OSError, match=r"tensorboard'$"):
        fill()
    with contextlib.suppress(OSError):
        log.close()
    assert threading.excepthook is hook
    assert "Traceback" not in capfd.readouterr().err


def test_errors_of_other_threads_are_still_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: seen.append(failure.exc_value))
    log = TensorBoardLog(tmp_path)
    thread = threading.Thread(target=lambda: sys.modules["no such module"])
    thread.start()
    thread.join()
    log.close()
    assert isinstance(seen[0], KeyError)
