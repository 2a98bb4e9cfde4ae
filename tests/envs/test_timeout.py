"""Environments whose steps and resets may take so long and no longer."""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from anybatch.envs.base import VectorEnv
from anybatch.envs.timeout import TimedEnv
from anybatch.errors import EnvError
from anybatch.system.signals import Interrupted, Interrupts


class Scripted:
    """Every reset and step does what `does` says; counts what is closed."""

    num_envs, observation_space, action_space, native_spaces, bootstrap_truncated = 1, None, None, None, True

    def __init__(self, does: Callable[[], Any]) -> None:
        self.does, self.closed = does, 0

    def reset(self) -> Any:
        return self.does()

    def step(self, action: Any) -> Any:
        return self.does()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def hang() -> Iterator[Callable[[], bool]]:
    """A call that does not return before the end of the test."""
    before = set(threading.enumerate())
    over = threading.Event()
    yield lambda: over.wait(60)
    over.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "anybatch-stepper":
            thread.join(20)  # a call that returns after all ends its thread
            assert not thread.is_alive()


def timed(env: Scripted, seconds: float) -> TimedEnv:
    return TimedEnv(cast(VectorEnv, env), seconds, "test:Env")


@pytest.mark.parametrize("what", ["reset", "step"])
def test_a_call_that_hangs_ends_in_a_sentence_and_is_left_behind(what: str, hang: Callable[[], bool]) -> None:
    env = Scripted(hang)
    wrapped = timed(env, 0.1)
    call = wrapped.reset if what == "reset" else lambda: wrapped.step(cast(Any, None))
    start = time.monotonic()
    for _ in range(2):  # the second call would have to wait for the first one's answer
        with pytest.raises(EnvError, match=rf"A {what} of test:Env has not returned after 0\.1 seconds"):
            call()
    wrapped.close()
    assert env.closed == 0  # it would hang as well
    assert time.monotonic() - start < 10


def test_an_interrupt_ends_the_wait_and_the_environment_is_left_behind(hang: Callable[[], bool]) -> None:
    env = Scripted(hang)
    wrapped = timed(env, 60.0)
    main = threading.main_thread().ident
    assert main is not None
    start = time.monotonic()
    with Interrupts(patience=0.1) as interrupts:
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(Interrupted), interrupts.interruptible():
            wrapped.reset()
    wrapped.close()
    assert env.closed == 0
    assert time.monotonic() - start < 10


def test_an_interrupted_close_ends_the_thread_once_the_call_returns(hang: Callable[[], bool]) -> None:
    env = Scripted(lambda: 5)
    env.close = hang  # type: ignore[method-assign, assignment]
    wrapped = timed(env, 60.0)
    main = threading.main_thread().ident
    assert main is not None
    with Interrupts(patience=0.1) as interrupts:
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(Interrupted), interrupts.interruptible():
            wrapped.close()
    # the fixture ends the call, and joins the thread


def test_errors_are_those_of_the_environment() -> None:
    def fail() -> None:
        raise queue.Empty  # its own, no timeout

    env = Scripted(fail)
    wrapped = timed(env, 60.0)
    for _ in range(2):
        with pytest.raises(queue.Empty):
            wrapped.reset()
    wrapped.close()
    assert env.closed == 1


def test_infinite_patience() -> None:
    wrapped = timed(Scripted(lambda: 5), math.inf)
    assert wrapped.reset() == wrapped.step(cast(Any, None)) == 5
    wrapped.close()
