from __future__ import annotations

import io
import re
import sys

import pytest

from anybatch.system import display
from anybatch.system.display import Display


class Clock:
    """Replaces the clock; tests move it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(display.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_lines_come_after_5_seconds_and_then_ever_more_rarely(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Display(4000, "steps", done=1000)
    times = []
    for second in range(1, 2001):
        clock.now = 100.0 + second
        shown.update(1000 + second, "return 1.50")
        if err := capsys.readouterr().err:
            times.append(second)
            last = err
    # pauses of 5, 10, 20, ..., and 600 seconds at most: 5, 15, 35, 75, 155, 315, 635, 1235, 1835
    assert times == [5, 15, 35, 75, 155, 315, 635, 1235, 1835]
    # 1 a second: 4000 - 2835 are left
    assert last == "71% of 4,000 steps  1 steps/s  return 1.50  ETA 0:19:25  elapsed 0:30:35\n"
    shown.close()
    assert capsys.readouterr().err == "75% of 4,000 steps  1 steps/s  return 1.50  ETA 0:16:40  elapsed 0:33:20\n"


def test_short_work_prints_nothing_off_a_terminal(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    with Display(3, "episodes") as shown:
        for done in range(1, 4):
            clock.now += 1.0
            shown.update(done)
    assert capfd.readouterr() == ("", "")


def test_notes_are_lines_too(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Display(100, "steps")
    clock.now += 4.9
    shown.note("too early")
    clock.now += 0.2
    shown.note("auxiliary phase: gradient step 7 of 12")
    assert capsys.readouterr().err == "0% of 100 steps  auxiliary phase: gradient step 7 of 12  elapsed 0:00:05\n"
    shown.update(51)
    clock.now += 10.0
    shown.note("policy phase")
    # 51 in 15.1 s, so that the other 49 take 14.5 s
    assert capsys.readouterr().err == "51% of 100 steps  3.4 steps/s  ETA 0:00:15  policy phase  elapsed 0:00:15\n"


def test_a_terminal_has_a_bar_with_labelled_times(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with Display(40, "episodes") as shown:
        clock.now += 100.0
        shown.update(10, "5 frames")  # one in 10 s, so the other 30 take 300 s
        shown.note("closing")
        shown.update(10, "5 frames")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert re.search(r"25% 0\.1 episodes/s  5 frames  ETA 0:05:00 elapsed \d:\d\d:\d\d", text)
