"""Asynchronous training: bitwise equal to its synchronous counterparts, stopped and resumed, and when it fails."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import anybatch.runs.build as parts
import anybatch.training as training
from anybatch.config.io import to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError, DivergenceError, EnvError, UserCodeError
from anybatch.normalize import RewardNormalizer
from anybatch.presets import ppg_ewma, ppo, ppo_ewma
from anybatch.runs import checkpoint
from anybatch.sampling.threaded import Asynchronous
from anybatch.system.signals import Interrupts
from anybatch.training import resume, train
from runs.test_resume import ITERATION, differences, final_state, hooked, rows, small, stopped


def asynchronous(max_lag: int, *, deterministic: bool = True, **changes: Any) -> TrainConfig:
    source = {"kind": "asynchronous", "max_lag": max_lag, "deterministic": deterministic}
    return small(ppo_ewma, **{"rollout.source": source, **changes})


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())  # calls that other tests abandoned
    yield
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("anybatch")]


def learned(out: Path) -> dict[str, Any]:
    """The final state without that of the sampler, and without the configuration, which names the source."""
    state: dict[str, Any] = final_state(out)
    del state["state"]["source"], state["config"]
    return state


def slowed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let either thread fall behind now and then."""
    generator = np.random.default_rng(seed)
    pauses = [float(x) for x in generator.choice([0.0, 0.0, 0.02], 1000)]
    collect, policy_phase = parts.collect_any, training.policy_phase

    def late(function: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            time.sleep(pauses.pop())
            return function(*arguments, **options)

        return wrapped

    monkeypatch.setattr(parts, "collect_any", late(collect))
    monkeypatch.setattr(training, "policy_phase", late(policy_phase))


# ---------------------------------------------------------------- the same as in turns


@pytest.mark.parametrize("deterministic", [False, True])
def test_max_lag_0_is_the_synchronous_run(deterministic: bool, tmp_path: Path) -> None:
    train(small(ppo_ewma), tmp_path / "sync", seed=2, quiet=True)
    train(asynchronous(0, deterministic=deterministic), tmp_path / "async", seed=2, quiet=True)
    assert rows(tmp_path / "sync") == rows(tmp_path / "async")
    assert differences(learned(tmp_path / "sync"), learned(tmp_path / "async")) == []


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lag", [1, 3])
def test_the_deterministic_schedule_is_that_of_a_delay(lag: int, normalize: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"observation.normalize": normalize}
    train(asynchronous(lag, **changes), tmp_path / "async", seed=2, quiet=True)
    # a delay's warm-up counts at once, so that its run needs as many more environment steps for as many iterations
    delayed = small(ppo_ewma, iterations=6 + lag, **{"rollout.source": {"kind": "delayed", "delay": lag}, **changes})
    train(delayed, tmp_path / "delayed", seed=2, quiet=True)
    counted = {"env_steps", "episodes", "mean_episode_return", "mean_episode_return_400", "mean_episode_length"}
    a, b = (
        [{name: value for name, value in row.items() if name not in counted} for row in rows(tmp_path / name)]
        for name in ("async", "delayed")
    )
    assert a == b
    assert {row["staleness_iterations"] for row in a[lag:]} == {str(lag)}
    a, b = (learned(tmp_path / name)["state"] for name in ("async", "delayed"))
    assert differences(a, b) == []


@pytest.mark.parametrize("lag", [1, 2])
def test_same_seed_same_bytes_whichever_thread_is_slow(
    lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, out in enumerate(("a", "b")):
        slowed(monkeypatch, number)
        train(asynchronous(lag), tmp_path / out, seed=5, quiet=True)
        monkeypatch.undo()
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert differences(learned(tmp_path / "a"), learned(tmp_path / "b")) == []


def test_a_smaller_lag_of_a_deterministic_run_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hooked(lambda i, interrupts: interrupts.request() if i == 4 else None):
        train(asynchronous(2, iterations=8), out, quiet=True)
    file = out / "config.yaml"
    file.write_text(file.read_text().replace("max_lag: 2", "max_lag: 1"))
    assert not resume(out, quiet=True).interrupted
    assert [int(row["staleness_iterations"]) for row in rows(out)][-2:] == [1, 1]


def test_without_a_schedule_the_lag_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, 7)
    train(asynchronous(2, deterministic=False, iterations=20), tmp_path / "run", quiet=True)
    found = rows(tmp_path / "run")
    assert [int(row["env_steps"]) for row in found] == [ITERATION * i for i in range(1, 21)]
    assert all(int(row["staleness_iterations"]) <= 2 for row in found)


def test_ppg_goes_together_with_it(tmp_path: Path) -> None:
    changes = {"optimizer.minibatches": 4, "aux.minibatches": 8, "aux.policy_iterations": 3, "aux.epochs": 1}
    source = {"kind": "asynchronous", "max_lag": 0}
    train(small(ppg_ewma, minibatches=4, **changes), tmp_path / "sync", quiet=True)
    train(small(ppg_ewma, minibatches=4, **changes, **{"rollout.source": source}), tmp_path / "async", quiet=True)
    assert differences(learned(tmp_path / "sync"), learned(tmp_path / "async")) == []


# ---------------------------------------------------------------- stop and resume


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_stopping_and_resuming_changes_nothing(lag: int, tmp_path: Path) -> None:
    config = asynchronous(lag)
    train(config, tmp_path / "whole", seed=3, quiet=True)
    out = tmp_path / "parts"
    assert stopped(config, out, 2, seed=3).interrupted
    with hooked(lambda iteration, interrupts: interrupts.request() if iteration == 2 else None):
        assert resume(out, quiet=True).interrupted
    assert not resume(out, quiet=True).interrupted
    assert rows(out) == rows(tmp_path / "whole")
    assert differences(learned(out), learned(tmp_path / "whole")) == []


def test_rows_beyond_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    config = asynchronous(2, checkpoint_seconds=0.0, keep_checkpoints=100)
    train(config, tmp_path / "run", quiet=True)
    whole, state = rows(tmp_path / "run"), learned(tmp_path / "run")
    for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[4:]:
        path.unlink()
    assert final_state(tmp_path / "run")["run"]["iteration"] == 3
    resume(tmp_path / "run", quiet=True)
    assert rows(tmp_path / "run") == whole
    assert differences(learned(tmp_path / "run"), state) == []


class Walk(gymnasium.Env[np.ndarray, int]):
    """A step to the left or right; ends 3 steps from the middle. ``trouble`` comes in the step of that number."""

    def __init__(self, trouble: str = "", at: int = 10, savable: bool = True) -> None:
        self.observation_space = gymnasium.spaces.Box(-10, 10, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.trouble, self.at, self.count, self.place = trouble, at, 0, 0
        self.extra = None if savable else threading.Lock()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        self.place += 2 * int(action) - 1
        observation, reward = np.full(1, self.place, np.float32), 1.0
        if self.count == self.at:
            if self.trouble == "raise":
                raise ZeroDivisionError("the user's own")
            if self.trouble == "hang":
                time.sleep(60)
            if self.trouble == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "nan":
                observation = observation * math.nan
            if self.trouble == "shape":
                observation = np.zeros(2, np.float32)
            if self.trouble == "reward":
                reward = math.inf
        return observation, reward, abs(self.place) == 3, False, {}


def walk(source: dict[str, Any], iterations: int = 6, **changes: Any) -> TrainConfig:
    options = {name: changes.pop(name) for name in ("trouble", "at", "savable", "vectorization") if name in changes}
    names = {"env.id": ppo(Walk).env.id, "env.options": options, "rollout.source": source}
    return small(ppo_ewma, iterations=iterations, **names, **changes)


SYNC: dict[str, Any] = {"kind": "synchronous"}
ASYNC: dict[str, Any] = {"kind": "asynchronous", "max_lag": 2, "deterministic": True}


def test_environments_that_cannot_be_saved_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = walk(ASYNC, savable=False)
    stopped(config, tmp_path / "run", 4)
    assert not resume(tmp_path / "run", quiet=True).interrupted
    said = capsys.readouterr().err
    assert "start new episodes" in said and "(up to 2)" in said
    ages = [int(row["staleness_iterations"]) for row in rows(tmp_path / "run")]
    assert ages == [0, 1, 2, 2, 0, 1]


# ---------------------------------------------------------------- failure


@pytest.mark.parametrize("source", [SYNC, ASYNC])
@pytest.mark.parametrize(
    ("trouble", "error", "text"),
    [
        ("raise", UserCodeError, "raised ZeroDivisionError: the user's own"),
        ("nan", EnvError, "nan|not finite|NaN"),
        ("shape", EnvError, "shape"),
        ("reward", EnvError, "reward"),
    ],
)
def test_a_broken_environment_ends_the_run(
    source: dict[str, Any], trouble: str, error: type[Exception], text: str, tmp_path: Path
) -> None:
    # in the third rollout of 16 steps: two iterations are done and saved before
    config = walk(source, trouble=trouble, at=40, checkpoint_seconds=0.0)
    with pytest.raises(error, match=text):
        train(config, tmp_path / "run", quiet=True)
    assert len(rows(tmp_path / "run")) == 2
    assert final_state(tmp_path / "run")["run"]["iteration"] == 2


@pytest.mark.parametrize("source", [SYNC, ASYNC])
def test_an_environment_that_hangs_ends_the_run(source: dict[str, Any], tmp_path: Path) -> None:
    config = walk(source, trouble="hang", at=40, checkpoint_seconds=0.0, step_timeout=1.0)
    start = time.monotonic()
    with pytest.raises(EnvError, match="has not returned after 1 seconds"):
        train(config, tmp_path / "run", quiet=True)
    assert time.monotonic() - start < 30
    assert final_state(tmp_path / "run")["run"]["iteration"] == 2
    for thread in threading.enumerate():  # left behind, and a daemon
        if thread.name == "anybatch-stepper":
            assert thread.daemon
            thread.name = "left"


def test_time_enough_changes_nothing(tmp_path: Path) -> None:
    for name, timeout in (("without", None), ("with", 60.0)):
        train(walk(ASYNC, step_timeout=timeout), tmp_path / name, quiet=True)
    assert rows(tmp_path / "without") == rows(tmp_path / "with")


@pytest.mark.parametrize("source", [SYNC, ASYNC])
def test_a_learner_that_diverges_keeps_its_last_good_checkpoint(
    source: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = RewardNormalizer.__call__

    def huge(self: Any, reward: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return normal(self, reward, first) * 1e30  # finite, and its square is not

    def break_in(iteration: int, _: Interrupts) -> None:
        if iteration == 4:
            monkeypatch.setattr(RewardNormalizer, "__call__", huge)

    config = walk(source, checkpoint_seconds=0.0, **{"advantage.normalize": False})
    with hooked(break_in), pytest.raises(DivergenceError, match=r"value_loss was inf.*optimizer\.step_size"):
        train(config, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    state = final_state(tmp_path / "run")
    assert state["run"]["iteration"] == 3
    assert all(bool(torch.isfinite(x).all()) for x in state["state"]["agent"].values())
    assert not resume(tmp_path / "run", quiet=True).interrupted


def test_weights_that_overflow_are_not_saved(tmp_path: Path) -> None:
    # the losses of the only gradient step are finite
    once = {"policy_epochs": 1, "value_epochs": 1, "minibatches": 1, "value_coefficient": 1e3}
    config = small(ppo, checkpoint_seconds=0.0, **once, optimizer={"kind": "sgd", "step_size": 1e38})
    with pytest.raises(DivergenceError, match="weights overflowed"):
        train(config, tmp_path / "run", quiet=True)
    assert final_state(tmp_path / "run")["run"]["iteration"] == 0
    assert all(bool(torch.isfinite(x).all()) for x in final_state(tmp_path / "run")["state"]["agent"].values())


# ---------------------------------------------------------------- Ctrl-C

INTERRUPTED = textwrap.dedent(
    """
    import sys
    import torch
    torch.set_num_threads(1)
    from anybatch.cli.main import main

    sys.argv[1:] = ["train", sys.argv[1], "--out", sys.argv[2], "--quiet", "--trust-code"]
    sys.exit(main())
    """
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "trouble", "how"),
    [
        (ASYNC, "", "sync"),
        (ASYNC, "hang", "sync"),
        (SYNC, "hang", "sync"),  # in the main thread
        (SYNC, "", "async"),  # in processes, to which a terminal sends Ctrl-C as well
        (ASYNC, "hang", "async"),
    ],
)
def test_ctrl_c_ends_the_program_within_seconds(source: dict[str, Any], trouble: str, how: str, tmp_path: Path) -> None:
    config = walk(source, iterations=10**6, trouble=trouble, at=60, vectorization=how, checkpoint_seconds=0.0)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    out = tmp_path / "run"
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "config.yaml"), str(out)]
    tests = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while len(checkpoint.checkpoints(out / "checkpoints")) < 2 and time.monotonic() < end:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        if trouble:
            time.sleep(3)
        os.killpg(process.pid, signal.SIGINT)
        start = time.monotonic()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert not any(word in said for word in ("Traceback", "Error", "WARN")), said  # of no process of an environment
    assert time.monotonic() - start < 60  # patience 4, and 5 for a thread that does not end; a hang would last for ever
    assert final_state(out)["run"]["iteration"] > 0


# ---------------------------------------------------------------- a full disk, and a folder that is taken


@pytest.mark.parametrize("source", [SYNC, ASYNC])
def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(
    source: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = walk(source, checkpoint_seconds=0.0), tmp_path / "run"
    train(config, tmp_path / "whole", quiet=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(iteration: int, _: Interrupts) -> None:
        if iteration == 4:
            monkeypatch.setattr(os, "replace", full)

    with (
        hooked(fill),
        pytest.raises(OSError, match=r"No space left on device; this checkpoint was not written") as caught,
    ):
        train(config, out, quiet=True)
    assert str(out) in str(caught.value)
    monkeypatch.undo()
    assert final_state(out)["run"]["iteration"] == 3
    assert not list((out / "checkpoints").glob(".*"))  # nothing half-written is left
    assert not resume(out, quiet=True).interrupted
    assert rows(out) == rows(tmp_path / "whole")


def test_what_was_started_ends_when_the_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(walk(ASYNC), tmp_path / "run", quiet=True)
    closed: list[str] = []
    original = Asynchronous.close
    monkeypatch.setattr(Asynchronous, "close", lambda self: closed.append("source") or original(self))
    with pytest.raises(ConfigError, match="already contains a run"):
        train(walk(ASYNC), tmp_path / "run", quiet=True)
    assert closed == ["source"]


def test_a_delayed_run_that_is_stopped_while_its_buffer_fills_begins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = walk({"kind": "delayed", "delay": 3}, iterations=8)
    train(config, tmp_path / "whole", quiet=True)
    collect = parts.collect_any

    def stop(*arguments: Any, interrupts: Interrupts, version: int, **options: Any) -> Any:
        counted.append(version)
        if len(counted) == 3:  # the third of four rollouts before the first iteration
            interrupts.request()
            interrupts.request()
        return collect(*arguments, interrupts=interrupts, version=version, **options)

    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "collect_any", stop)
        assert train(config, tmp_path / "run", quiet=True).interrupted
    assert counted == [0, 0, 0]
    assert final_state(tmp_path / "run")["run"]["iteration"] == 0
    assert not resume(tmp_path / "run", quiet=True).interrupted
    assert capsys.readouterr().err == ""  # nothing was lost
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
