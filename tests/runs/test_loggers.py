from __future__ import annotations

import io
import math
import re
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.config.schema import LogConfig
from anybatch.errors import AnybatchError, CheckpointError
from anybatch.runs import loggers as logs
from anybatch.runs import progress
from anybatch.system import display


def rows(n, start=1):
    return [{"iteration": i, "env_steps": 256 * i, "entropy": 1 / i} for i in range(start, start + n)]


def write(path, some_rows):
    log = progress.ProgressLog(path)
    for row in some_rows:
        log.append(row)
    log.close()


def test_numbers_read_back_exactly_and_give_the_same_bytes(tmp_path):
    row = {
        "iteration": np.int64(1),
        "float32": torch.tensor(0.1),
        "third": 1 / 3,
        "nan": math.nan,
        "none": None,
        "inf": math.inf,
        "flag": True,
    }
    for name in ("a.csv", "b.csv"):
        write(tmp_path / name, [row, row])
    # 0.1 in float32 is 13421773 / 2^27 = 0.100000001490116...
    line = b"1,0.10000000149011612,0.3333333333333333,,,inf,1\n"
    assert (tmp_path / "a.csv").read_bytes() == b"iteration,float32,third,nan,none,inf,flag\n" + line + line
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    columns = progress.read_progress(tmp_path / "a.csv")
    assert columns["third"] == [1 / 3, 1 / 3]
    assert math.isnan(columns["nan"][0])


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=5))
def test_any_float_survives(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("run") / "progress.csv"
    write(path, [{"value": value} for value in values])
    assert progress.read_progress(path)["value"] == values


def test_reopening_appends_without_a_second_header(tmp_path):
    path = tmp_path / "progress.csv"
    write(path, rows(2))
    write(path, rows(2, start=3))
    write(tmp_path / "once.csv", rows(4))
    assert path.read_bytes() == (tmp_path / "once.csv").read_bytes()


@pytest.mark.parametrize("cut", range(1, 16))
def test_a_half_written_last_line_is_moved_away(tmp_path, cut):
    path = tmp_path / "progress.csv"
    write(path, rows(2))
    whole = path.read_bytes()
    last = b"3,768,0.3333333333333333\n"
    path.write_bytes(whole + last[:-cut])
    assert progress.read_progress(path)["iteration"] == [1, 2]  # a reader does not see it either
    progress.ProgressLog(path).close()
    assert path.read_bytes() == whole
    assert (tmp_path / "progress-damaged.txt").read_bytes() == last[:-cut] + b"\n"
    write(path, rows(1, start=3))
    assert path.read_bytes() == whole + last


def test_zeros_after_a_power_cut_and_a_torn_header_are_moved_away(tmp_path):
    path = tmp_path / "progress.csv"
    write(path, rows(2))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 40 + b"\n3,768\n")
    progress.ProgressLog(path).close()
    assert path.read_bytes() == whole
    path.write_bytes(b"iteration,env_st")
    write(path, rows(2))
    assert path.read_bytes() == whole
    assert (tmp_path / "progress-damaged.txt").read_bytes() == b"\0" * 40 + b"\n3,768\niteration,env_st\n"


def test_every_row_that_was_appended_survives_kill_9(tmp_path):
    path = tmp_path / "progress.csv"
    program = (
        "import os, signal; from pathlib import Path; from anybatch.runs.progress import ProgressLog\n"
        f"log = ProgressLog(Path({str(path)!r}))\n"
        "for i in range(1, 101): log.append({'iteration': i, 'x': i / 7})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert progress.read_progress(path)["x"] == [i / 7 for i in range(1, 101)]


def test_a_new_column_gives_the_union_header(tmp_path):
    path = tmp_path / "progress.csv"
    log = progress.ProgressLog(path)
    for row in [{"iteration": 1, "a": 0.5}, {"b": 2.5, "iteration": 2}, {"iteration": 3, "a": 1.5, "b": 3.5}]:
        log.append(row)
    log.close()
    assert path.read_text() == "iteration,a,b\n1,0.5,\n2,,2.5\n3,1.5,3.5\n"


def test_truncate_after_moves_later_rows_so_that_each_iteration_stands_once(tmp_path):
    path = tmp_path / "progress.csv"
    write(path, rows(5))
    log = progress.ProgressLog(path)
    assert log.truncate_after(3) == 2
    for row in rows(3, start=4):
        log.append(row)
    log.close()
    assert progress.read_progress(path)["iteration"] == [1, 2, 3, 4, 5, 6]
    assert progress.read_progress(tmp_path / "progress-lost.csv")["iteration"] == [4, 5]
    again = progress.ProgressLog(path)
    assert again.truncate_after(5) == 1
    assert again.truncate_after(5) == 0
    again.close()
    assert progress.read_progress(tmp_path / "progress-lost.csv")["iteration"] == [4, 5, 6]
    write(tmp_path / "once.csv", rows(5))
    assert path.read_bytes() == (tmp_path / "once.csv").read_bytes()


def test_truncating_a_new_run_or_a_foreign_file(tmp_path):
    log = progress.ProgressLog(tmp_path / "progress.csv")
    assert log.truncate_after(0) == 0
    log.append({"loss": 1.0})
    with pytest.raises(CheckpointError, match="no column 'iteration'"):
        log.truncate_after(0)
    log.close()
    with pytest.raises(CheckpointError, match="does not exist"):
        progress.read_progress(tmp_path / "nowhere.csv")


def events(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def next_second():
    """TensorBoard reads files in the order of names: by second, and then the tenth of a process before the ninth."""
    time.sleep(1.01 - time.time() % 1)


def test_tensorboard_events_are_readable_and_hidden_after_a_resume(tmp_path):
    config = LogConfig(tensorboard=True)
    with logs.open_logs(tmp_path, config, 1024, quiet=True) as run:
        run.write({"iteration": 1, "env_steps": 256, "entropy": 0.5, "mean_episode_return": math.nan})
        run.write({"iteration": 2, "env_steps": 512, "entropy": 0.25, "mean_episode_return": 3})
    assert events(tmp_path) == {
        "iteration": [(256, 1.0), (512, 2.0)],
        "entropy": [(256, 0.5), (512, 0.25)],
        "mean_episode_return": [(512, 3.0)],
    }
    next_second()
    with logs.open_logs(tmp_path, config, 1024, quiet=True, resume_after=1) as run:
        run.write({"iteration": 2, "env_steps": 512, "entropy": 0.75, "mean_episode_return": 4})
    assert events(tmp_path)["entropy"] == [(256, 0.5), (512, 0.75)]
    assert progress.read_progress(tmp_path / "progress.csv")["entropy"] == [0.5, 0.75]


def test_a_run_that_starts_again_has_each_iteration_once(tmp_path):
    for count in (3, 2):  # killed before its first checkpoint, so that the second attempt begins at iteration 1 again
        with logs.open_logs(tmp_path, LogConfig(), 1024, quiet=True) as run:
            for row in rows(count):
                run.write(row)
        next_second()
    assert progress.read_progress(tmp_path / "progress.csv")["iteration"] == [1, 2]
    assert events(tmp_path)["iteration"] == [(256, 1.0), (512, 2.0)]


def test_a_row_is_shown_with_its_return_and_the_last_evaluation(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    shown = logs.ProgressDisplay(4000, start_env_steps=1000)
    now[0] = 10.0
    shown.write({"env_steps": 2000, "mean_episode_return": math.nan, "eval_return": 3})  # the other 2000 take 20 s
    assert capsys.readouterr().err == (
        "50% of 4,000 steps  100 steps/s  return -  evaluation 3.00  ETA 0:00:20  elapsed 0:00:10\n"
    )
    now[0] = 30.0
    shown.write({"env_steps": 4000, "mean_episode_return": 1.5, "eval_return": math.nan})
    shown.close()
    assert "return 1.50  evaluation 3.00  ETA 0:00:00  elapsed 0:00:30" in capsys.readouterr().err


def test_the_bar_shows_what_goes_on_between_two_rows(monkeypatch, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with logs.open_logs(tmp_path, LogConfig(tensorboard=False), 4000) as run:
        run.write({"iteration": 1, "env_steps": 1000, "mean_episode_return": 1.5})
        run.note("auxiliary phase: gradient step 7 of 12")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert re.search(r"25% \S+ steps/s  return 1.50  ETA \S+  auxiliary phase: gradient step 7 of 12", shown)


def test_wandb_missing_is_one_sentence_and_leaves_nothing_open(tmp_path, monkeypatch):
    for module in (None, types.ModuleType("wandb")):  # not installed; an empty folder of that name
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(AnybatchError, match=r"pip install '\.\[wandb\]'"):
            logs.open_logs(tmp_path, LogConfig(wandb=True), 1024)


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_failure_of_wandb_does_not_end_training(tmp_path, monkeypatch, fails):
    def fail(*_):
        raise ConnectionResetError(104, "Connection reset by peer")

    calls = []
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=calls.append, finish=lambda: None)
    setattr(run, fails, fail)
    module = types.SimpleNamespace(init=lambda **_: run, errors=types.SimpleNamespace(Error=KeyError))
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = logs.WandbLog(tmp_path, "x", {})
    if fails == "finish":
        sink.write({"env_steps": 1})
    with pytest.warns(UserWarning, match=r"Weights & Biases failed \(ConnectionResetError: .*the run continues"):
        sink.write({"env_steps": 2}) if fails == "log" else sink.close()
    sink.write({"env_steps": 3})  # says nothing more, and sends nothing
    sink.close()
    assert calls == ([] if fails == "log" else [{"env_steps": 1.0}])


def test_closing_goes_on_after_a_sink_fails(tmp_path):
    class Broken:
        def write(self, row): ...

        def close(self):
            raise OSError("gone")

    log = progress.ProgressLog(tmp_path / "progress.csv")
    run = logs.Logs([Broken(), log])
    run.write(rows(1)[0])
    with pytest.raises(OSError, match="gone"):
        run.close()
    assert log._file.closed
    run.close()


def test_importing_logs_is_light():
    program = (
        "import sys, anybatch.runs.loggers; print([m for m in ('torch', 'tensorboard', 'rich') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
