"""Somebody else's run folder runs no code and writes nothing outside itself."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest
import yaml

from anybatch.cli.main import main
from anybatch.config.io import override, read_yaml, to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.envs.registry import find_environment
from anybatch.errors import CheckpointError, ConfigError
from anybatch.grid.grid_file import read_grid
from anybatch.grid.job import Job, Outcome
from anybatch.grid.run_folder import train_or_resume
from anybatch.presets import PRESETS
from anybatch.runs.evaluation import evaluate, load_policy
from anybatch.runs.trust import code_named, require_trust, signature
from anybatch.training import resume, train
from small_runs import tiny_ppo

MINE = """
import gymnasium
import pathlib
import torch

pathlib.Path(__file__).with_name("imported").touch()

def make():
    return gymnasium.make("CartPole-v1")

class Encoder(torch.nn.Module):
    out_features = 4

    def __init__(self, space):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight
"""


def small(env: str = "gym:CartPole-v1", encoder: str = "mlp") -> TrainConfig:
    options = {"width": 4, "depth": 1} if encoder == "mlp" else {}
    changes = {"env.id": env, "total_env_steps": 8, "model.encoder": encoder, "model.options": options}
    return override(tiny_ppo(), changes)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module on the path that notes its import in a file."""
    name = f"module_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def foreign(tmp_path: Path, mine: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that somebody else has made with code of theirs, which is not imported any more."""
    run = tmp_path / "run"
    train(small(f"{mine}:make"), run, quiet=True)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
    del sys.modules[mine]
    (tmp_path / "imported").unlink()
    return run


@pytest.mark.parametrize(
    ("env", "encoder", "fields"),
    [
        ("gym:CartPole-v1", "mlp", set()),
        ("procgen:starpilot-hard", "impala", set()),
        ("envpool:Pong-v5", "auto", set()),
        ("gym:os:system", "mlp", {"env.id"}),
        ("gym:GymV21Environment-v0", "mlp", {"env.id"}),
        ("os:system", "mlp", {"env.id"}),
        ("gym:CartPole-v1", "os:system", {"model.encoder"}),
        ("a.b:c", "d:E", {"env.id", "model.encoder"}),
    ],
)
def test_fields_that_name_code(env: str, encoder: str, fields: set[str]) -> None:
    assert set(code_named(small(env, encoder))) == fields


def test_a_downloaded_run_is_not_imported(
    foreign: Path, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("eval", "watch", "resume"):
        assert main([command, str(foreign)]) == 2
        error = capsys.readouterr().err
        assert f"env.id '{mine}:make'" in error and "--trust-code" in error and error.count("\n") == 1
    assert main(["train", str(foreign / "config.yaml"), "--out", str(tmp_path / "again")]) == 2
    for call in (load_policy, resume):
        with pytest.raises(ConfigError, match="trust_code=True"):
            call(foreign)  # type: ignore[operator]
    assert not (tmp_path / "imported").exists() and not (tmp_path / "again").exists()
    # with trust it runs
    assert main(["eval", str(foreign), "--episodes", "2", "--trust-code"]) == 0
    assert (tmp_path / "imported").exists()
    assert not resume(foreign, total_env_steps=16, trust_code=True, quiet=True).interrupted
    assert len(evaluate(load_policy(foreign), episodes=2).returns) == 2  # the resumed run is this user's now


def test_without_a_key_the_message_names_it(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))  # in which no folder can be made
    with pytest.raises(ConfigError, match=r"may not be yours: the key in your data folder, .* --trust-code"):
        load_policy(foreign)


def test_doctor_and_report_import_nothing(foreign: Path, tmp_path: Path) -> None:
    assert main(["doctor", str(foreign)]) == 0
    assert main(["report", str(foreign), "--out", str(tmp_path / "report.html")]) == 0
    assert not (tmp_path / "imported").exists()


def test_a_run_of_the_same_user_needs_no_flag(mine: str, tmp_path: Path) -> None:
    train(small(f"{mine}:make", f"{mine}:Encoder"), tmp_path / "run", quiet=True)
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "run", moved)
    assert len(evaluate(load_policy(moved), episodes=2).returns) == 2
    assert not resume(moved, total_env_steps=16, quiet=True).interrupted
    config = str(moved / "config.yaml")
    assert main(["train", config, "--out", str(tmp_path / "again"), "--quiet"]) == 0


def test_a_changed_file_is_not_signed_any_more(mine: str, tmp_path: Path) -> None:
    config = small(f"{mine}:make")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config, **signature(config)))
    require_trust(config, path, trust_code=False)
    for changed in (small("other:make"), small(f"{mine}:make", f"{mine}:Encoder")):
        with pytest.raises(ConfigError):
            require_trust(changed, path, trust_code=False)
    more = override(config, {"total_env_steps": 99, "env.options": {"size": 3}})  # may be edited by hand
    require_trust(small(f"{mine}:make", "auto"), path, trust_code=False)
    require_trust(more, path, trust_code=False)


def test_code_typed_on_the_command_line_is_trusted(foreign: Path, tmp_path: Path) -> None:
    flags = ["--env.id", "gym:CartPole-v1", "--out", str(tmp_path / "other"), "--quiet"]
    assert main(["train", str(foreign / "config.yaml"), *flags]) == 0
    assert not (tmp_path / "imported").exists()


def test_a_grid_of_runs_like_one_of_mine_needs_no_flag(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    train(small(f"{mine}:make"), tmp_path / "run", quiet=True)
    path = tmp_path / "grid.yaml"
    path.write_text("base: run/config.yaml\nset: {total_env_steps: 32}\n")
    assert len(read_grid(path, PRESETS)) == 1
    path.write_text("base: run/config.yaml\nset: {env.id: 'other:make'}\n")
    with pytest.raises(ConfigError, match=r"grid.yaml.*env.id 'other:make'.*--trust-code"):
        read_grid(path, PRESETS)
    written = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(re.sub("signature: .*", "signature: 0", written))
    path.write_text("base: run/config.yaml\n")
    with pytest.raises(ConfigError, match=r"run/config.yaml.*env.id '.*:make'"):
        read_grid(path, PRESETS)
    (tmp_path / "run" / "config.yaml").write_text(written)
    assert main(["train", "~/run/config.yaml", "--out", str(tmp_path / "again"), "--quiet"]) == 0


def test_a_grid_file_with_code_needs_trust(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({"base": "ppo", "vary": {"env.id": ["gym:CartPole-v1", "mine:make"]}}))
    with pytest.raises(ConfigError, match=r"grid.yaml.*env.id 'mine:make'.*--trust-code"):
        read_grid(path, PRESETS)
    first, second = (Outcome(job, tmp_path) for job in read_grid(path, PRESETS, trust_code=True))
    assert "--trust-code" not in first.command and "--trust-code" in second.command  # its runs need not ask again
    assert "--trust-code" not in Outcome(Job(small()), tmp_path).command


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "builtins:eval", "gymnasium.core:__builtins__.get"])
def test_the_standard_library_makes_no_environments(name: str) -> None:
    with pytest.raises(ConfigError, match=r"standard library|no attribute"):
        find_environment(name)


def test_a_standard_function_under_another_name(mine: str, tmp_path: Path) -> None:
    with open(tmp_path / f"{mine}.py", "a") as file:
        file.write("\nfrom os import system\nimport functools\nharm = functools.partial(system)\n")
    for name in ("system", "harm", "pathlib.os.system"):
        with pytest.raises(ConfigError, match="standard library"):
            find_environment(f"{mine}:{name}")
    assert callable(find_environment(f"{mine}:make"))


def test_os_system_is_not_run_even_with_trust(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(), run, quiet=True)
    values = read_yaml(run / "config.yaml")
    values["env"] |= {"id": "os:system", "options": {"command": f"touch {tmp_path / 'harm'}"}}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    for command in (["eval", str(run)], ["eval", str(run), "--trust-code"], ["resume", str(run), "--trust-code"]):
        assert main(command) == 2
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["progress-damaged.txt", "segments", "checkpoints/iteration-000000009.ckpt", "lock"])
def test_links_in_a_run_folder_are_not_written_through(name: str, tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "target"
    train(small(), run, quiet=True)
    with open(run / "progress.csv", "a") as file:
        file.write("half a li")  # is moved to progress-damaged.txt on resuming
    target.write_text("precious")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    with pytest.raises(ConfigError, match=rf"{name}.*symbolic link"):
        resume(run, total_env_steps=16, quiet=True)
    assert target.read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)  # so that reading it here would not block for ever
    os.write(writer, b"seed: 0")
    threading.Timer(5.0, os.close, [writer]).start()
    assert main(["doctor", str(tmp_path)]) == 2
    assert "pipe or device" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["progress.csv", "checkpoints/iteration-000000009.ckpt", "checkpoints/best.ckpt"])
def test_pipes_in_a_run_folder_are_not_waited_for(name: str, tmp_path: Path) -> None:
    run, config = tmp_path / "run", small()
    train(config, run, quiet=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for call in (lambda: resume(run, quiet=True), lambda: train_or_resume(config, run, 0, quiet=True)):
        with pytest.raises(
            ConfigError, match=rf"{name}' is a pipe or device, but a run folder must contain only files"
        ):
            call()
    if name.endswith("best.ckpt"):
        with pytest.raises(CheckpointError, match=r"best\.ckpt cannot be read: it is not a file"):
            load_policy(run, best=True)
    elif name.endswith(".ckpt"):
        with pytest.warns(UserWarning, match="cannot be read: it is not a file; using the previous checkpoint"):
            load_policy(run)
