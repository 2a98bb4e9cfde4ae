from __future__ import annotations

import os
import subprocess
import sys

import pytest

from anybatch.system import atomic_files as atomic


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "config.yaml"
    atomic.write_text(path, "a: 1\n")
    atomic.write_text(path, "a: é\n")
    assert path.read_bytes() == "a: é\n".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "last.pt"
    atomic.write_bytes(path, b"old")

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space"):
        atomic.write_bytes(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_kill_between_write_and_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "last.pt"
    atomic.write_bytes(path, b"old")
    program = (
        "import os, signal; from pathlib import Path; from anybatch.system import atomic_files as atomic\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"atomic.write_bytes(Path({str(path)!r}), b'new' * 100_000)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2  # the leftover is hidden, and goes when asked to
    atomic.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_new_file_has_the_rights_that_the_umask_gives(tmp_path):
    (tmp_path / "plain").write_text("")
    atomic.write_bytes(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode
