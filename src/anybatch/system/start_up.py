"""Signals while a program starts, before it has anything to lose, and while it ends, when all is written."""

from __future__ import annotations

import functools
import os
import signal
import sys
from types import FrameType

from anybatch.system.exit_codes import INTERRUPTED


def exit_on_signals(hint: str = "") -> None:
    """End the program at once, with exit code 130 and a ``hint`` to the user, on Ctrl-C and SIGTERM.

    By default Ctrl-C raises KeyboardInterrupt wherever the program is, and modules that are being imported swallow it
    or turn it into another error. A run that trains handles signals with :class:`anybatch.system.signals.Interrupts`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # of nohup, or a process in the background
            signal.signal(number, functools.partial(_exit, hint=hint))


def ignore_signals() -> None:
    """Ignore Ctrl-C and SIGTERM while the interpreter shuts down, so that the exit code is that of the command.

    Python restores the default handlers there, and a signal would end a command that has done its work as if killed.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _exit(number: int, frame: FrameType | None, *, hint: str) -> None:
    if hint:
        print(hint, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a bar has hidden the cursor
    multiprocessing = sys.modules.get("multiprocessing")
    for process in multiprocessing.active_children() if multiprocessing else ():
        process.kill()
    os._exit(INTERRUPTED)
