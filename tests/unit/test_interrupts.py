"""Stop requests: from signals and from code."""

from __future__ import annotations

import signal
import threading

import pytest

from anybatch.interrupts import Interrupted, Interrupts


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
    monkeypatch.setattr("anybatch.interrupts.time.monotonic", lambda: now[0])
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
