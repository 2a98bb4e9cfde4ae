"""Grids: real runs in processes; finished runs are skipped, interrupted ones resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anybatch.grid.run_folder as run_folder
import anybatch.grid.runner as grid
from anybatch.cli.main import main
from anybatch.config.io import to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.errors import AnybatchError, ConfigError, DivergenceError
from anybatch.grid.job import Job, Outcome
from anybatch.grid.run_folder import finished, has_diverged, last_row, train_or_resume
from anybatch.grid.runner import plan, run_grid
from anybatch.presets import ppo
from anybatch.runs.files import DIVERGED
from anybatch.scaling import rescale
from anybatch.training import resume, train


def small(iterations: int = 2, **changes: Any) -> TrainConfig:
    return ppo(
        "gym:CartPole-v1",
        **{"num_envs": 2, "steps": 8, "minibatches": 2, "total_env_steps": iterations * 16, **changes},
        device="cpu",
        tensorboard=False,
        noise_scale=False,
        model={"encoder": "mlp", "options": {"width": 8, "depth": 1}},
    )


EARLY, DIVERGES = -1000, -1001


def write_run(outcome: Outcome, fraction: float) -> None:
    """Write the last row and the checkpoint of a run that has done a fraction of its environment steps."""
    steps = int(outcome.job.config.total_env_steps * fraction)
    (outcome.folder / "progress.csv").write_text(f"iteration,env_steps,mean_episode_return\n2,{steps},1.5\n")
    (outcome.folder / "checkpoints").mkdir(exist_ok=True)
    (outcome.folder / "checkpoints" / "iteration-000000002.ckpt").touch()


class Scripted:
    """A launcher whose runs end with given exit codes, one for each start; EARLY is exit code 0 in the middle."""

    def __init__(self, processes: int, ends: dict[int, list[int]]) -> None:
        self.processes = processes
        self.ends = ends
        self.most = 0
        self.slots: set[int] = set()
        self.killed = 0

    def start(self, outcome: Outcome, slot: int) -> Any:
        assert slot not in self.slots and slot < self.processes
        self.slots.add(slot)
        self.most = max(self.most, len(self.slots))
        code = self.ends[outcome.job.seed].pop(0)
        (outcome.folder / "log.txt").write_text("begins\nanybatch: it broke\n\n")
        launcher = self

        class Run:
            polls = 0

            def exit_code(self) -> int | None:
                self.polls += 1
                if self.polls < 2:
                    return None
                launcher.slots.discard(slot)
                if code == DIVERGES:
                    (outcome.folder / DIVERGED).touch()
                    return 1
                if code in (0, EARLY):
                    write_run(outcome, 1.0 if code == 0 else 0.5)
                return 0 if code == EARLY else code

            def stop(self) -> None: ...

            def kill(self) -> None:
                launcher.killed += 1

        return Run()

    def close(self) -> None: ...


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(processes: int, ends: dict[int, list[int]]) -> Scripted:
        launcher = Scripted(processes, ends)
        monkeypatch.setattr(grid, "make_launcher", lambda *_: launcher)
        monkeypatch.setattr(grid, "_POLL_SECONDS", 0.001)
        return launcher

    return use


def test_restarts_are_bounded_and_failures_are_reported(
    scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {
        0: [0],
        1: [-9, 0],
        2: [1, 1, 1, 0],
        3: [2, 0],
        4: [130, 130, 0],
        5: [EARLY, 0],
        6: [EARLY] * 3,
        7: [DIVERGES, 0],
    }
    launcher = scripted(2, ends)
    result = run_grid([(small(), seed) for seed in range(8)], tmp_path, restarts=2)
    assert launcher.most == 2
    assert [(o.status, o.starts) for o in result.outcomes] == [
        ("done", 1),
        ("done", 2),
        ("failed", 3),  # started again twice, and no more
        ("failed", 1),  # bad input stays bad
        ("done", 3),
        ("done", 2),  # exit code 0 before the last environment step is not the end
        ("failed", 3),
        ("diverged", 1),  # it would diverge again
    ]
    assert result.exit_code == 1
    assert result.outcomes[2].error == "anybatch: it broke (exit code 1)"
    assert result.outcomes[6].error.endswith("(ended early, after 16 of 32 environment steps)")
    printed = capsys.readouterr().err
    assert printed.count("failed runs") == 1
    assert "8 runs: 4 done, 3 failed, 1 diverged" in printed
    assert "killed by signal 9" in printed


def test_repetitions_count_once_and_bad_jobs_are_refused_before_anything_runs(scripted: Any, tmp_path: Path) -> None:
    scripted(1, {0: [0]})
    assert len(run_grid([(small(), 0), Job(small(), 0, "again")], tmp_path, quiet=True).outcomes) == 1
    for jobs, words in (
        ([], "no jobs"),
        *(([(small(), seed)], f"seed is {seed!r}, but must be an integer") for seed in (-1, "1", True, 1.5)),
        ([(small(minibatches=3), 0)], "minibatches 3"),
        *((jobs, "must contain pairs of a TrainConfig and a seed") for jobs in ([small()], [("ppo", 0)], (small(), 0))),
        ([(rescale(small(), num_envs=1), 0)], "must contain pairs of a TrainConfig and a seed"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_grid(jobs, tmp_path / "other", quiet=True)  # type: ignore[arg-type]
    for wrong in ({"processes": 1.5}, {"processes": 0}, {"restarts": None}, {"restarts": -1}):
        with pytest.raises(ConfigError, match=r"(processes|restarts) is .*, but must be an integer of at least"):
            run_grid([(small(), 0)], tmp_path / "other", quiet=True, **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def test_what_other_processes_cannot_import_is_refused_before_anything_runs(tmp_path: Path) -> None:
    local = ppo(lambda: None, device="cpu")  # type: ignore[arg-type, return-value]
    encoder = replace(small(), model=replace(small().model, encoder="__main__:Mine", options={}))
    for config, words in ((local, "env.id is .*a callable without an import path"), (encoder, "a class of this progr")):
        with pytest.raises(ConfigError, match=rf"{words}.*which the processes of a grid cannot find; move it to"):
            run_grid([(config, 0)], tmp_path / "grid")
    assert not (tmp_path / "grid").exists()


def test_numpy_seeds_and_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    outcomes = plan([(small(), seed) for seed in np.arange(2)], "~/grid")
    assert outcomes[1].folder == tmp_path / "grid" / Job(small(), 1).folder_name
    assert [type(outcome.job.seed) for outcome in outcomes] == [int, int]


@pytest.mark.parametrize("terminal", [False, True])
def test_names_that_look_like_markup_are_shown_as_they_are(
    terminal: bool, scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(1, {0: [1]})
    monkeypatch.setattr("anybatch.grid.display._REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    result = run_grid([Job(small(), 0, "a [/b] [red]c")], tmp_path, restarts=0)
    assert result.outcomes[0].status == "failed"
    assert "a [/b] [red]c" in " ".join(capsys.readouterr().err.split())


def test_an_error_in_the_grid_leaves_no_run_behind(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = scripted(2, {0: [0], 1: [0]})

    def broken(*_: Any) -> None:
        raise RuntimeError("the display broke")

    monkeypatch.setattr("anybatch.grid.display.Display.update", broken)
    with pytest.raises(RuntimeError, match="the display broke"):
        run_grid([(small(), 0), (small(), 1)], tmp_path, quiet=True)
    assert launcher.killed == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals the runs")
def test_runs_end_when_the_grid_is_killed(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(to_yaml(small(10**6)))
    (tmp_path / "grid.yaml").write_text("base: base.yaml\n")
    command = [sys.executable, "-m", "anybatch", "grid", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    folder = plan([(small(10**6), 0)], tmp_path / "out")[0].folder
    wait_for(lambda: bool(last_row(folder)))
    process.kill()
    process.wait()
    wait_for(lambda: "anybatch resume" in (folder / "log.txt").read_text(), seconds=10)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def test_runs_are_the_runs_of_train_and_done_ones_are_skipped(tmp_path: Path) -> None:
    jobs = [Job(small(), 1, "a"), Job(small(), 2, "b")]
    result = run_grid(jobs, tmp_path / "grid", processes=2, quiet=True)
    assert result.exit_code == 0, [outcome.error for outcome in result.outcomes]
    train(small(), tmp_path / "alone", seed=2, quiet=True)
    alone, there = last_row(tmp_path / "alone"), last_row(result.outcomes[1].folder)
    for column in alone.keys() - {"env_steps_per_second"}:
        if column.startswith("seconds"):
            continue
        assert alone[column] == there[column] or alone[column] != alone[column]
    again = run_grid(jobs, tmp_path / "grid", processes=2, quiet=True)
    assert [outcome.starts for outcome in again.outcomes] == [0, 0]
    assert again.exit_code == 0
    index = (tmp_path / "grid" / "grid.csv").read_text().splitlines()
    assert len(index) == 3 and index[1].split(",")[1:5] == ["a", "1", "done", "32"]


def test_a_run_that_reached_its_return_is_done(tmp_path: Path) -> None:
    job = Job(small(4, eval={"every": 16, "episodes": 1, "stop_at": 1.0}), 1, "a")  # CartPole gives 1 a step
    grids = [run_grid([job], tmp_path / "grid", restarts=0, quiet=True) for _ in range(2)]
    assert [grid.exit_code for grid in grids] == [0, 0], grids[0].outcomes[0].error
    assert [grid.outcomes[0].starts for grid in grids] == [1, 0]
    assert last_row(grids[0].outcomes[0].folder)["env_steps"] == 16


def test_train_or_resume_whatever_is_there(tmp_path: Path) -> None:
    config, out = small(4), tmp_path / "run"
    assert not finished(out, config)
    first = train_or_resume(config, out, 3, quiet=True)
    train(config, tmp_path / "alone", 3, quiet=True)
    assert (out / "progress.csv").read_text().splitlines()[-1].split(",")[0] == "4"
    assert finished(out, config) and not finished(out, replace(config, total_env_steps=1000))
    written = (out / "progress.csv").stat().st_mtime_ns
    assert train_or_resume(config, out, 3, quiet=True).env_steps == first.env_steps == 64
    assert (out / "progress.csv").stat().st_mtime_ns == written  # nothing was trained
    for other, seed in ((small(5), 3), (config, 4)):
        with pytest.raises(ConfigError, match="another configuration or seed"):
            train_or_resume(other, out, seed, quiet=True)
    # killed between its last row and its last checkpoint; killed before its first checkpoint
    shutil.copytree(out, tmp_path / "late")
    (tmp_path / "late" / "checkpoints" / "iteration-000000004.ckpt").unlink()
    assert not finished(tmp_path / "late", config)
    assert train_or_resume(config, tmp_path / "late", 3, quiet=True).env_steps == 64
    shutil.copytree(out, tmp_path / "early")
    shutil.rmtree(tmp_path / "early" / "checkpoints")
    assert train_or_resume(config, tmp_path / "early", 3, quiet=True).env_steps == 64
    assert len((tmp_path / "early" / "progress-lost.csv").read_text().splitlines()) == 1 + 4  # the rows of before
    assert finished(tmp_path / "late", config) and finished(tmp_path / "early", config)


def test_a_divergence_is_recorded_until_the_run_is_started_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(DivergenceError) as error:
            train_or_resume(small(optimizer={"step_size": 1e30}), tmp_path / "bad", 1, quiet=True)
        assert has_diverged(tmp_path / "bad") and (tmp_path / "bad" / DIVERGED).read_text() == f"{error.value}\n"
    train_or_resume(small(1), tmp_path / "mended", 1, quiet=True)
    (tmp_path / "mended" / DIVERGED).touch()
    train(small(2), tmp_path / "other", 1)
    shutil.copy(tmp_path / "other" / "config.yaml", tmp_path / "mended")
    assert train_or_resume(small(2), tmp_path / "mended", 1, quiet=True).env_steps == 32
    assert not has_diverged(tmp_path / "mended")
    # finished by hand, with a smaller step size
    file = tmp_path / "bad" / "config.yaml"
    file.write_text(file.read_text().replace("step_size: 1.0e+30", "step_size: 0.001"))
    resume(tmp_path / "bad", quiet=True)
    assert finished(tmp_path / "bad", small(optimizer={"step_size": 0.001})) and not has_diverged(tmp_path / "bad")


def test_two_processes_never_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    with open(tmp_path / "lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(run_folder, "_PATIENCE", 0.1)
        with pytest.raises(ConfigError, match="another process is currently training"):
            train_or_resume(small(), tmp_path, 0, quiet=True)
        monkeypatch.setattr(run_folder, "_PATIENCE", 60.0)
        threading.Timer(0.5, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()  # it ends, as after a grid was killed
        assert train_or_resume(small(), tmp_path, 0, quiet=True).env_steps == 32


def test_last_row_survives_a_kill(tmp_path: Path) -> None:
    assert last_row(tmp_path) == {}
    (tmp_path / "progress.csv").write_text("iteration,env_steps,mean\n1,16,\n2,32,4.5\n3,4")
    assert last_row(tmp_path) == {"iteration": 2, "env_steps": 32, "mean": 4.5}
    (tmp_path / "progress.csv").write_text("iteration,env_steps\n" + "".join(f"{i},{i}\n" for i in range(9000)))
    assert last_row(tmp_path) == {"iteration": 8999, "env_steps": 8999}


def test_ctrl_c_stops_the_runs_with_checkpoints(tmp_path: Path) -> None:
    jobs = [(small(10**6), 0), (small(10**6), 1), (small(10**6), 2)]
    folders = [outcome.folder for outcome in plan(jobs, tmp_path)]

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not all(last_row(folder) for folder in folders[:2]) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = run_grid(jobs, tmp_path, processes=2, quiet=True)
    thread.join()
    assert [outcome.status for outcome in result.outcomes] == ["interrupted"] * 3
    assert [outcome.starts for outcome in result.outcomes] == [1, 1, 0]
    assert result.exit_code == 130
    for folder in folders[:2]:
        row = last_row(folder)
        assert (folder / "checkpoints" / f"iteration-{int(row['iteration']):09d}.ckpt").exists()
        assert "anybatch resume" in (folder / "log.txt").read_text()


def test_printed_commands_run_in_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.yaml").write_text(to_yaml(small()))
    (tmp_path / "grid.yaml").write_text("base: base.yaml\nvary: {clip: [0.1, 0.2]}\n")
    command = ["grid", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "with space"), "--launcher", "print"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("anybatch train ") for line in lines)
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(lines[0], shell=True, env={**os.environ, "PATH": here}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines() == lines[1:]  # what is done is not printed again


def test_what_is_no_address_of_ray_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(AnybatchError, match="no Ray cluster answers at 'nonsense': Invalid address format"):
        run_grid([(small(), 0)], tmp_path, launcher="ray", address="nonsense", quiet=True)


@pytest.mark.slow
def test_ray(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        jobs = [(small(), 0), (small(optimizer={"step_size": 1e30}), 1)]
        result = run_grid(jobs, tmp_path, launcher="ray", quiet=True)
        assert [(o.status, o.starts) for o in result.outcomes] == [("done", 1), ("diverged", 1)]
        assert "not finite" in result.outcomes[1].error
        assert last_row(result.outcomes[0].folder)["env_steps"] == 32
        # a stop request reaches the run on the cluster
        long = plan([(small(10**6), 5)], tmp_path)[0].folder

        def interrupt() -> None:
            deadline = time.monotonic() + 60
            while not last_row(long) and time.monotonic() < deadline:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        stopped = run_grid([(small(10**6), 5)], tmp_path, launcher="ray", quiet=True)
        thread.join()
        assert stopped.exit_code == 130
        assert "anybatch resume" in (long / "log.txt").read_text()
    finally:
        ray.shutdown()
