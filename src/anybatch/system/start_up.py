"""Signals while a program starts, before it has anything to lose."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def exit_on_signals() -> None:
    """End the program at once, with exit code 130, on Ctrl-C and SIGTERM.

    By default Ctrl-C raises KeyboardInterrupt wherever the program is, and modules that are being imported swallow it
    or turn it into another error. A run that trains handles signals with :class:`anybatch.system.signals.Interrupts`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # of nohup, or a process in the background
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    multiprocessing = sys.modules.get("multiprocessing")
    for process in multiprocessing.active_children() if multiprocessing else ():
        process.kill()
    os._exit(_INTERRUPTED)
