"""Stop requests: from signals and from code."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from anybatch.system.signals import Interrupted, Interrupts, ignoring_sigint, separate_calls


def test_nothing_happens_without_a_request() -> None:
    interrupts = Interrupts(patience=0.0)
    assert not interrupts.requested
    interrupts.check()


def test_a_request_lets_the_iteration_end_within_its_patience() -> None:
    interrupts = Interrupts(patience=60.0)
    interrupts.request()
    assert interrupts.requested
    interrupts.check()  # there is time left


def test_patience_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("anybatch.system.signals.time.monotonic", lambda: now[0])
    interrupts = Interrupts(patience=4.0)
    interrupts.request()
    now[0] = 103.9
    interrupts.check()
    now[0] = 104.0
    with pytest.raises(Interrupted):
        interrupts.check()


def test_a_second_request_is_at_once() -> None:
    interrupts = Interrupts(patience=60.0)
    interrupts.request()
    interrupts.request()
    with pytest.raises(Interrupted):
        interrupts.check()


def test_interrupted_passes_through_except_exception() -> None:
    assert not issubclass(Interrupted, Exception)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_requests_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts(patience=60.0) as interrupts:
        assert signal.getsignal(number) != before
        signal.raise_signal(number)
        assert interrupts.requested
        interrupts.check()
        signal.raise_signal(number)
        with pytest.raises(Interrupted):
            interrupts.check()
    assert signal.getsignal(number) == before


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Interrupts():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with Interrupts() as interrupts:
            seen.append(signal.getsignal(signal.SIGTERM))
            interrupts.request()
            seen.append(interrupts.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, True]


def signal_main_thread(after: float) -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(after, signal.pthread_kill, (main, signal.SIGINT)).start()


def test_a_call_that_hangs_is_broken_off_when_patience_has_run_out() -> None:
    start = time.monotonic()
    with Interrupts(patience=0.3) as interrupts:
        signal_main_thread(0.1)  # one signal, which the call outlasts
        with pytest.raises(Interrupted), interrupts.interruptible():
            time.sleep(30)
        assert interrupts.call_interrupted
    assert 0.35 < time.monotonic() - start < 10


def test_a_second_signal_breaks_it_off_at_once() -> None:
    start = time.monotonic()
    with Interrupts(patience=60.0) as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal_main_thread(0.1)
        with pytest.raises(Interrupted), interrupts.interruptible():
            threading.Event().wait(30)  # a lock, as in a queue
    assert time.monotonic() - start < 10


def test_elsewhere_nothing_is_broken_off() -> None:
    with Interrupts(patience=0.05) as interrupts:
        signal.raise_signal(signal.SIGINT)
        with interrupts.interruptible():
            pass
        time.sleep(0.3)  # saving a checkpoint, say
        signal.raise_signal(signal.SIGINT)
        assert not interrupts.call_interrupted
        with pytest.raises(Interrupted):
            interrupts.check()


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """That of nohup, or of a shell for a process in the background; the other one works alone."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts(patience=0.1) as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.requested
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted), interrupts.interruptible():
                time.sleep(10)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_that_python_does_not_know_become_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: set_to.append(handler))  # None: set by C code
    with Interrupts():
        assert len(set_to) == 2
    with ignoring_sigint():
        pass
    assert set_to[2:] == [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN, signal.SIG_DFL]


def test_calls_of_objects_that_end_with_their_block_are_forgotten() -> None:
    with Interrupts(patience=60.0) as interrupts:
        signal.raise_signal(signal.SIGINT)
        for block, abandoned in ((separate_calls(), False), (contextlib.nullcontext(), True), (separate_calls(), True)):
            with pytest.raises(Interrupted), block, interrupts.interruptible():
                signal.raise_signal(signal.SIGINT)
            assert interrupts.call_interrupted == abandoned


def test_no_signal_comes_afterwards() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Interrupts(patience=0.1):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == []
