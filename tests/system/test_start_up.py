"""Signals while the command starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

IMPORTING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "anybatch.cli.main":
            print("importing", flush=True)
            import time
            try:
                time.sleep(20)
            except BaseException:  # as some modules do while they are imported
                pass
sys.meta_path.insert(0, Slow())
from anybatch.__main__ import main
sys.argv = ["anybatch", "--version"]
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_command(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    began = time.monotonic()
    os.kill(process.pid, number)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - began < 10
    assert not out and not errors


def test_the_start_is_light() -> None:
    loaded = "import anybatch.__main__, sys; print(len(sys.modules), 'multiprocessing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    count, multiprocessing = done.stdout.split()
    assert multiprocessing == "False" and int(count) < 120


ENDING = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
from anybatch.__main__ import main
sys.argv = ["anybatch", "--version"]
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_signal_after_the_command_leaves_its_exit_code() -> None:
    assert subprocess.run([sys.executable, "-c", ENDING], capture_output=True).returncode == 0
