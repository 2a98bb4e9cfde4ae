"""PPG stopped, or killed, in a policy phase and in an auxiliary phase: it ends as a run that was not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch.phase_storage.store as segments
from anybatch.auxiliary_phase import AuxiliaryPhase
from anybatch.config.schema import TrainConfig
from anybatch.errors import CheckpointError, DivergenceError
from anybatch.grid.run_folder import finished, train_or_resume
from anybatch.phase_storage.store import AuxiliaryMinibatch
from anybatch.presets import ppg, ppg_ewma
from anybatch.runs import checkpoint
from anybatch.training import resume, train
from runs.test_resume import differences, final_state, hooked, rows
from small_runs import small_ppg

ENVS, STEPS, N_PI, EPOCHS, MINIBATCHES = 4, 16, 3, 2, 8
ITERATION = ENVS * STEPS
PHASE = EPOCHS * MINIBATCHES
KINDS = ["ram", "disk"]


def small(
    storage: str, preset: Callable[..., TrainConfig] = ppg_ewma, *, iterations: int = 8, **changes: Any
) -> TrainConfig:
    changes["aux.storage"] = storage
    return small_ppg(preset, envs=ENVS, steps=STEPS, iterations=iterations, phase=N_PI, epochs=EPOCHS, **changes)


@contextlib.contextmanager
def at_step(wanted: int, action: Callable[[AuxiliaryPhase], None]) -> Iterator[None]:
    """Call `action` in the auxiliary gradient step `wanted`, counted from 1 since the process began."""
    count = 0
    original = AuxiliaryPhase._gradient_step

    def step(self: AuxiliaryPhase, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == wanted:
            action(self)
        original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuxiliaryPhase, "_gradient_step", step)
        yield


def ask_to_stop(phase: AuxiliaryPhase) -> None:
    phase._learner.interrupts.request()


def assert_same(out: Path, whole: Path) -> None:
    assert differences(final_state(out), final_state(whole)) == []
    assert rows(out) == rows(whole)
    assert not (out / "segments").exists()


@pytest.mark.parametrize("storage", KINDS)
@pytest.mark.parametrize("iteration", [2, 3, 5])  # 3: the phase is complete, its auxiliary phase pending
def test_stopped_in_a_policy_phase(storage: str, iteration: int, tmp_path: Path) -> None:
    config = small(storage)
    train(config, tmp_path / "whole", seed=3, quiet=True)
    with hooked(lambda i, interrupts: interrupts.request() if i == iteration else None):
        assert train(config, tmp_path / "run", seed=3, quiet=True).interrupted
    # an iteration ends with its auxiliary phase: its row is written after that
    assert len(rows(tmp_path / "run")) == iteration - (iteration == N_PI)
    assert (tmp_path / "run" / "segments").exists() == (storage == "disk")
    assert not resume(tmp_path / "run", quiet=True).interrupted
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("storage", KINDS)
@pytest.mark.parametrize("step", [1, 5, MINIBATCHES, PHASE, PHASE + 3])
def test_stopped_in_an_auxiliary_phase(storage: str, step: int, tmp_path: Path) -> None:
    config = small(storage)
    train(config, tmp_path / "whole", seed=3, quiet=True)
    with at_step(step, ask_to_stop):
        assert train(config, tmp_path / "run", seed=3, quiet=True).interrupted
    assert len(rows(tmp_path / "run")) == (N_PI if step <= PHASE else 2 * N_PI) - 1
    state = final_state(tmp_path / "run")["state"]["auxiliary"]
    assert state["total_steps"] == step  # nothing of the phase is done twice
    assert not resume(tmp_path / "run", quiet=True).interrupted
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("storage", KINDS)
def test_stopped_at_every_step(storage: str, tmp_path: Path) -> None:
    config = small(storage, ppg, iterations=4, architecture="shared")
    train(config, tmp_path / "whole", quiet=True)
    with at_step(1, ask_to_stop):
        interrupted = train(config, tmp_path / "run", quiet=True).interrupted
    times = 0
    while interrupted:
        times += 1
        with at_step(1, ask_to_stop):
            interrupted = resume(tmp_path / "run", quiet=True).interrupted
    assert times == PHASE
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("storage", KINDS)
def test_long_phases_are_saved_on_the_way(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(storage, checkpoint_seconds=0.0)
    train(config, tmp_path / "whole", quiet=True)

    def crash(_: AuxiliaryPhase) -> None:
        raise MemoryError

    with at_step(11, crash), pytest.raises(MemoryError):
        train(config, tmp_path / "run", quiet=True)
    assert final_state(tmp_path / "run")["state"]["auxiliary"]["steps"] == 10
    resume(tmp_path / "run", quiet=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("storage", KINDS)
def test_data_of_another_size_is_not_trained_on(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = tmp_path / "run", []
    train(small(storage, iterations=2), run, quiet=True)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(f"num_envs: {ENVS}\n", f"num_envs: {ENVS // 2}\n"))
    with pytest.raises(CheckpointError, match=f"set env.num_envs back to {ENVS}"):
        resume(run, total_env_steps=8 * ENVS * STEPS, quiet=True)
    (run / "config.yaml").write_text(config.replace(f"steps: {STEPS}\n", f"steps: {2 * STEPS}\n", 1))
    step = AuxiliaryPhase._gradient_step

    def record(phase: AuxiliaryPhase, minibatch: AuxiliaryMinibatch, *arguments: Any) -> None:
        seen.append(minibatch.observation)
        step(phase, minibatch, *arguments)

    monkeypatch.setattr(AuxiliaryPhase, "_gradient_step", record)
    resume(run, total_env_steps=12 * ENVS * STEPS, quiet=True)
    assert "the data of the unfinished policy phase is not available" in capsys.readouterr().err
    assert seen and all(bool((x != 0).any(1).all() & (x.abs() < 100).all()) for x in seen)  # all from CartPole


def test_a_run_whose_last_checkpoint_is_missing_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = small("ram", iterations=N_PI), tmp_path / "run"
    train(config, tmp_path / "whole", seed=3, quiet=True)
    with at_step(8, ask_to_stop):  # in the auxiliary phase of the last iteration, which that leaves open
        assert train(config, out, seed=3, quiet=True).interrupted
    assert not finished(out, config)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            resume(out, quiet=True)
    assert len(rows(out)) == N_PI and not finished(out, config)  # the last row is there, its checkpoint is not
    assert not train_or_resume(config, out, 3, quiet=True).interrupted
    assert finished(out, config)
    assert_same(out, tmp_path / "whole")


def test_after_an_error_the_data_stays_for_the_resumed_run(tmp_path: Path) -> None:
    config = small("disk", checkpoint_seconds=0.0)
    train(config, tmp_path / "whole", quiet=True)

    def diverge(iteration: int, _: object) -> None:
        if iteration == 6:
            raise DivergenceError("as if")

    with hooked(diverge), pytest.raises(DivergenceError):
        train(config, tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "segments").exists()
    resume(tmp_path / "run", quiet=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("kept", ["files lost", "too large for a checkpoint"])
@pytest.mark.parametrize("in_phase", [False, True])
def test_a_phase_that_was_lost_begins_anew(
    kept: str, in_phase: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = "disk" if kept == "files lost" else "ram"
    if storage == "ram":
        monkeypatch.setattr(segments, "IN_CHECKPOINT", 10)
    config, out = small(storage), tmp_path / "run"
    if in_phase:
        with at_step(5, ask_to_stop):
            train(config, out, quiet=True)
    else:
        with hooked(lambda i, interrupts: interrupts.request() if i == 2 else None):
            train(config, out, quiet=True)
    for path in (out / "segments").glob("*"):
        path.unlink()
    capsys.readouterr()
    assert not resume(out, quiet=True).interrupted
    assert "a new policy phase begins" in capsys.readouterr().err
    # 3 iterations and 5 steps, then 5 iterations: one phase; 2 iterations, then 6: one phase before the last iteration
    assert int(rows(out)[-1]["aux_gradient_steps"]) == PHASE + (5 if in_phase else 0)


@pytest.mark.parametrize(("stop_in_phase", "n_pi"), [(True, N_PI + 2), (False, 2)])
def test_another_length_of_a_phase_begins_a_new_one(
    stop_in_phase: bool, n_pi: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Longer after auxiliary steps, whose old policy lacks the new segments; as long as the segments that are kept."""
    out = tmp_path / "run"
    with at_step(3, ask_to_stop) if stop_in_phase else hooked(lambda i, x: x.request() if i == 2 else None):
        assert train(small("ram", iterations=9), out, quiet=True).interrupted
    text = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(text.replace(f"policy_iterations: {N_PI}", f"policy_iterations: {n_pi}"))
    capsys.readouterr()
    assert not resume(out, quiet=True).interrupted
    assert "a new policy phase begins" in capsys.readouterr().err
    # iterations 4 to 8 make a phase; 3 and 4, 5 and 6, 7 and 8
    assert int(rows(out)[-1]["aux_gradient_steps"]) == (3 + PHASE if stop_in_phase else 3 * PHASE)


def test_a_finished_run_is_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small("ram", iterations=8), tmp_path / "whole", quiet=True)
    for storage in KINDS:
        out = tmp_path / storage
        train(small(storage, iterations=5), out, quiet=True)
        before = final_state(out)
        capsys.readouterr()
        resume(out, quiet=True)
        assert differences(final_state(out), before) == []
        assert capsys.readouterr().err == ""  # no policy phase begins
        resume(out, total_env_steps=8 * ITERATION, quiet=True)
        said = capsys.readouterr().err
        assert ("a new policy phase begins" in said) == (storage == "disk")  # its files were removed at the end
        assert not (out / "segments").exists()
    assert rows(tmp_path / "ram") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "disk")) == 8


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    import anybatch.training as training
    from anybatch.auxiliary_phase import AuxiliaryPhase
    from anybatch.runs.folder import read_config
    from anybatch.phase_storage.store import SegmentStore

    config, seed = read_config(Path(sys.argv[1]))
    name, at, count = sys.argv[3], int(sys.argv[4]), 0
    owner = {"_gradient_step": AuxiliaryPhase, "append": SegmentStore, "clear": SegmentStore}[name]
    original = getattr(owner, name)

    def dies(*args, **options):
        global count
        count += 1
        result = original(*args, **options)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dies)
    training.train(config, sys.argv[2], seed, quiet=True)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("storage", KINDS)
@pytest.mark.parametrize(
    ("function", "at"),
    [("_gradient_step", 11), ("_gradient_step", PHASE), ("append", 2), ("append", 4), ("clear", 1)],
)
def test_kill_9(storage: str, function: str, at: int, tmp_path: Path) -> None:
    config = small(storage, checkpoint_seconds=0.0 if function == "append" else 60.0)
    train(config, tmp_path / "whole", seed=4, quiet=True)
    out = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "whole"), str(out), function, str(at)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint.checkpoints(out / "checkpoints")
    assert not resume(out, quiet=True).interrupted
    assert_same(out, tmp_path / "whole")


def test_the_state_is_plain_and_holds_only_what_is_needed(tmp_path: Path) -> None:
    with hooked(lambda i, interrupts: interrupts.request() if i == 2 else None):
        train(small("ram"), tmp_path / "run", quiet=True)
    arrays = final_state(tmp_path / "run")["state"]["auxiliary"]["segments"]["arrays"]
    assert list(arrays) == ["observation0", "value_target"]  # the old policy comes when the phase is complete
    assert {len(x) for x in arrays.values()} == {2 * ITERATION}
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in arrays.values())
    assert isinstance(arrays["value_target"], torch.Tensor)
