"""One process at a time writes to a run folder."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import gymnasium
import pytest

from anybatch.cli.main import main
from anybatch.config.schema import TrainConfig
from anybatch.envs.registry import environment_id
from anybatch.errors import CheckpointError, ConfigError
from anybatch.presets import ppo
from anybatch.runs.owned import owned
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train


def test_the_home_folder_of_nobody_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="run_dir is '~nosuchuser/run', but there is no such user"):
        resume("~nosuchuser/run")


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def small(env: str = "gym:CartPole-v1", iterations: int = 4) -> TrainConfig:
    return ppo(
        env,
        num_envs=1,
        steps=8,
        minibatches=1,
        total_env_steps=8 * iterations,
        tensorboard=False,
        device="cpu",
        model={"encoder": "mlp", "options": {"width": 4, "depth": 1}},
    )


def in_thread(action: object) -> list[BaseException]:
    """Errors of a call in another thread, which is as foreign to the lock as another process."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            action()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return errors


def test_resume_and_train_beside_a_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    errors: list[BaseException] = []

    class Meddling(gymnasium.Wrapper):  # type: ignore[type-arg]
        steps = 0

        def step(self, action: object) -> object:  # type: ignore[override]
            Meddling.steps += 1
            if Meddling.steps == 20:  # in the third of four iterations of 8 steps
                errors.extend(in_thread(lambda: resume(run, quiet=True)))
                errors.extend(in_thread(lambda: train(small(), run, quiet=True)))
            return super().step(action)  # type: ignore[return-value]

    def make() -> gymnasium.Env:  # type: ignore[type-arg]
        return Meddling(gymnasium.make("CartPole-v1"))

    train(small(environment_id(make)), run, quiet=True)
    assert [type(error) for error in errors] == [ConfigError, ConfigError]
    assert all("another process is currently training" in str(error) for error in errors)
    assert read_progress(run / "progress.csv")["iteration"] == [1, 2, 3, 4]
    assert not resume(run, total_env_steps=48, quiet=True).interrupted  # the lock has gone


def test_another_process_has_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(small(), run, quiet=True)
    new = tmp_path / "new"
    new.mkdir()
    for folder, command in ((run, ["resume", str(run)]), (new, ["train", "ppo", "--out", str(new)])):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        extra = [] if folder == run else ["--env.id", "gym:CartPole-v1", "--env.num-envs", "1", "--rollout.steps", "8"]
        assert main([*command, *extra, *(["--optimizer.minibatches", "1"] if extra else [])]) == 2
        error = capsys.readouterr().err
        assert "another process is currently training" in error and error.count("\n") == 1
        holder.kill()
        holder.communicate()
    assert [path.name for path in new.iterdir()] == ["lock"]
    assert not resume(run, total_env_steps=48, quiet=True).interrupted  # a killed process holds nothing


def test_nested_blocks_of_one_thread_are_one(tmp_path: Path) -> None:
    with owned(tmp_path / "run"):
        with owned(tmp_path / "run"):
            pass
        (error,) = in_thread(lambda: owned(tmp_path / "run").__enter__())
        assert isinstance(error, ConfigError)
    assert not in_thread(lambda: owned(tmp_path / "run").__enter__())


def test_resume_makes_no_folder(tmp_path: Path) -> None:
    assert main(["resume", str(tmp_path / "nowhere")]) == 2
    assert not list(tmp_path.iterdir())


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        train(ppo("gym:CartPole-v1"), tmp_path / "new" / "run", init_from=tmp_path / "missing", quiet=True)
    assert not (tmp_path / "new" / "run").exists()
