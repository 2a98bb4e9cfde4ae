"""Environments that raise, exit, die, hang or swallow every exception: the run ends, and with a sentence."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from anybatch.cli.main import main
from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.envs.factory import make
from anybatch.envs.registry import environment_id
from anybatch.errors import EnvError, UserCodeError
from anybatch.presets import ppo
from anybatch.runs import checkpoint
from anybatch.system.signals import HUNG_THREADS, Interrupts
from anybatch.training import train

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes and signals of Linux")


released = threading.Event()
signal_while_hanging = threading.Event()


@pytest.fixture(autouse=True)
def _no_thread_hangs_for_ever() -> Iterator[None]:
    before = set(threading.enumerate())
    released.clear()
    signal_while_hanging.clear()
    yield
    released.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(HUNG_THREADS):
            thread.join(0.5)  # that of an abandoned call waits for the next one, which never comes


class Odd(gymnasium.Env):  # type: ignore[type-arg]
    """Does something odd in its tenth step, or in another method."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, what: str = "nothing") -> None:
        self.what = what
        self.steps = 0
        if what == "exit when made":
            sys.exit(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if self.what == "exit in reset":
            sys.exit(0)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 10:
            ODDITIES.get(self.what, lambda: None)()
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def get_state(self) -> int:
        if self.what == "hang in get_state" and self.steps:
            hang()
        return self.steps

    def set_state(self, state: int) -> None:
        self.steps = state

    def close(self) -> None:
        if self.what == "hang in close":
            hang()
        if self.what == "exit in close":
            sys.exit(0)


class Fatal(BaseException):
    pass


def fail(error: BaseException) -> None:
    raise error


def hang() -> None:
    if signal_while_hanging.is_set():
        signal_while_hanging.clear()
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    released.wait(60)


def swallow() -> None:
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    while True:
        with suppress(BaseException):
            time.sleep(0.1)


ODDITIES: dict[str, Callable[[], None]] = {
    "exit": lambda: sys.exit(0),
    "raise": lambda: fail(ZeroDivisionError("my own")),
    "raise a BaseException": lambda: fail(Fatal()),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "swallow": swallow,
}


def odd(what: str = "nothing") -> Odd:
    return Odd(what)


def config(what: str, **changes: Any) -> TrainConfig:
    base = ppo(
        environment_id(odd),
        num_envs=2,
        steps=4,
        minibatches=1,
        total_env_steps=8 * 6,
        tensorboard=False,
        device="cpu",
        model={"encoder": "mlp", "options": {"width": 4, "depth": 1}},
    )
    return override(replace(base, env=replace(base.env, options={"what": what, **changes.pop("options", {})})), changes)


ASYNC = {"options": {"vectorization": "async"}}
THREAD = {"rollout.source.kind": "asynchronous", "policy.proximal": "ewma"}


@pytest.mark.parametrize("how", [{}, ASYNC, THREAD], ids=["sync", "processes", "thread"])
@pytest.mark.parametrize("what", ["exit", "raise", "raise a BaseException"])
@pytest.mark.filterwarnings("ignore:.*Received the following error")
def test_whatever_a_step_raises_is_an_environment_error(what: str, how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"environment [01], step 10: step of .*odd raised") as caught:
        train(config(what, **how), tmp_path / "run", quiet=True)
    name = {"exit": "SystemExit: 0", "raise": "ZeroDivisionError: my own"}.get(what, "Fatal")
    assert str(caught.value).endswith(name)
    assert checkpoint.load_newest(tmp_path / "run" / "checkpoints")  # the run can be resumed
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("what", ["exit when made", "exit in reset"])
def test_sys_exit_elsewhere(what: str, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"(making|reset of) .*odd raised SystemExit: 0"):
        train(config(what), tmp_path / "run", quiet=True)


def test_sys_exit_in_close_leaves_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not train(config("exit in close"), tmp_path / "run", quiet=True).interrupted
    assert "odd raised SystemExit: 0" in capsys.readouterr().err


class OddVector(gymnasium.vector.VectorEnv):  # type: ignore[type-arg]
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Odd.observation_space, Odd.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, action: Any) -> Any:
        sys.exit(0)


def test_sys_exit_in_a_vector_environment(tmp_path: Path) -> None:
    vector = replace(config("").env, id=environment_id(OddVector), options={})
    with pytest.raises(UserCodeError, match=r"after 0 steps: step of .*OddVector raised SystemExit: 0"):
        train(replace(config(""), env=vector), tmp_path / "run", quiet=True)


def test_the_command_line_prints_a_sentence_and_the_users_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_env.py").write_text(
        "import gymnasium\nclass Broken(gymnasium.Wrapper):\n    def step(self, action):\n        return [][3]\n"
        "def make():\n    return Broken(gymnasium.make('CartPole-v1'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--env.num-envs", "1", "--rollout.steps", "4", "--optimizer.minibatches", "1", "--quiet"]
    run = str(tmp_path / "run")
    assert main(["train", "ppo", "--env.id", "broken_env:make", *flags, "--total-env-steps", "8", "--out", run]) == 1
    sentence, *trace = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("anybatch: environment 0, step 1: step of broken_env:make raised IndexError")
    assert trace[0].startswith("Traceback") and "broken_env.py" in trace[1]  # no frame of anybatch before it
    assert trace[-1] == "IndexError: list index out of range"


@linux
@pytest.mark.parametrize("how", [{}, {"env.step_timeout": 30.0}, THREAD], ids=["alone", "with a limit", "thread"])
def test_a_killed_process_ends_the_run(how: dict[str, Any], tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(EnvError, match=r"environment \d of .*odd was killed by SIGKILL"):
        train(config("die", **ASYNC, **how), tmp_path / "run", quiet=True)
    assert time.monotonic() - began < 30
    assert not multiprocessing.active_children()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupts.__init__, "__defaults__", (0.2,))


@linux
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ["hang in get_state", "hang in close"])
@pytest.mark.parametrize("how", [{}, {"env.step_timeout": 50.0}], ids=["alone", "with a limit"])
def test_a_signal_ends_calls_that_hang(what: str, how: dict[str, Any], tmp_path: Path) -> None:
    began = time.monotonic()
    signal_while_hanging.set()
    result = train(config(what, **how), tmp_path / "run", quiet=True)
    assert time.monotonic() - began < 20
    assert result.interrupted == (what == "hang in get_state")


@pytest.mark.parametrize("what", ["hang in get_state", "hang in close"])
def test_the_time_limit_ends_calls_that_hang(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limited = config(what, **{"env.step_timeout": 0.5})
    if what == "hang in get_state":
        with pytest.raises(EnvError, match=r"A get_state of .* has not returned after 0.5 seconds"):
            train(limited, tmp_path / "run", quiet=True)
    else:
        assert not train(limited, tmp_path / "run", quiet=True).interrupted
        assert "A close of" in capsys.readouterr().err


def _train_swallowing(folder: str) -> None:
    train(config("swallow"), folder, quiet=True)


@linux
@pytest.mark.usefixtures("impatient")
def test_an_environment_that_swallows_every_exception_ends_with_the_process(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_train_swallowing, args=[str(tmp_path / "run")])
    process.start()
    process.join(30)
    alive = process.is_alive()
    process.kill()
    assert not alive and process.exitcode == 130
    assert checkpoint.load_newest(tmp_path / "run" / "checkpoints")


@linux
def test_processes_of_environments_die_with_a_killed_parent(tmp_path: Path) -> None:
    numbers = multiprocessing.get_context("fork").Queue()

    def parent() -> None:
        env = make(replace(config("nothing").env, options={"vectorization": "async"}), 3, 0)
        env.reset()
        numbers.put([process.pid for process in multiprocessing.active_children()])
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    children = numbers.get(timeout=20)
    assert len(children) == 3
    process.kill()
    process.join()
    deadline = time.monotonic() + 10
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if _runs(child)]


def _runs(number: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
