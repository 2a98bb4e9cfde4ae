"""Weights & Biases as it is, in its offline mode: what its files hold after a run was stopped and resumed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anybatch.callbacks import StopAt
from anybatch.config.io import override, to_dict, to_yaml
from anybatch.errors import ConfigError
from anybatch.presets import ppo
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train

wandb = pytest.importorskip("wandb")
_BLOCK, _FIRST_HEADER, _HEADER = 1 << 15, 7, 7


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, which has the format of LevelDB's logs: blocks of fragments of records."""
    from wandb.proto import wandb_internal_pb2

    data, position, record = path.read_bytes(), _FIRST_HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:  # padding
            position += _BLOCK - position % _BLOCK
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + _HEADER])
        record += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # complete, or the last fragment
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            yield message
            record = b""


def values(items: Any) -> dict[str, Any]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


CONFIG = ppo(
    "gym:CartPole-v1",
    num_envs=2,
    steps=8,
    minibatches=2,
    total_env_steps=3 * 16,
    device="cpu",
    tensorboard=False,
    wandb=True,
    wandb_project="a-project",
)


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_run_with_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config, run = CONFIG, tmp_path / "run"
    train(config, run, 5, [StopAt(2, "iteration")], quiet=True)
    resume(run, total_env_steps=4 * 16, quiet=True)
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    identity = (run / "wandb-id.txt").read_text().strip()
    assert [path.stem for path in files] == [f"run-{identity}"] * 2
    history = []
    for path, total in zip(files, (3 * 16, 4 * 16), strict=True):
        found = list(records(path))
        started = next(record.run for record in found if record.HasField("run"))
        assert (started.project, started.run_id, started.display_name) == ("a-project", identity, "run")
        shown = values(started.config.update)
        assert shown["seed"] == 5 and shown["total_env_steps"] == total
        assert shown["env"] == to_dict(config)["env"] and shown["optimizer"] == to_dict(config)["optimizer"]
        history += [values(record.history.item) for record in found if record.HasField("history")]
    progress = read_progress(run / "progress.csv")
    assert [row["iteration"] for row in history] == progress["iteration"] == [1, 2, 3, 4]
    for column in ("env_steps", "entropy", "advantage_std"):
        assert [row[column] for row in history] == progress[column]


@pytest.mark.slow
def test_a_user_who_is_not_logged_in_is_told_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(CONFIG))
    environment = {**os.environ, "WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    environment.pop("WANDB_API_KEY", None)
    command = [sys.executable, "-m", "anybatch", "train", "config.yaml", "--out", "run", "--quiet"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("anybatch: Weights & Biases cannot be started: No API key") and "WANDB_MODE=offline" in last


def test_links_inside_its_folder_are_allowed_and_no_others(tmp_path: Path) -> None:
    config, run = override(CONFIG, {"wandb": False, "total_env_steps": 16}), tmp_path / "run"
    (run / "wandb" / "inner").mkdir(parents=True)
    for link in (run / "wandb" / "latest-run", run / "wandb" / "inner" / "wandb"):
        link.symlink_to(tmp_path)
    train(config, run, quiet=True)
    other = tmp_path / "other"
    (other / "checkpoints" / "wandb").mkdir(parents=True)
    (other / "checkpoints" / "wandb" / "x").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        train(config, other, quiet=True)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "wandb").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        train(config, tmp_path / "third", quiet=True)
