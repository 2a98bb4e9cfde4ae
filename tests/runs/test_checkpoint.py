"""Checkpoint files: whole, verified, and never code."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anybatch.config.io import override
from anybatch.errors import CheckpointError, ConfigError
from anybatch.runs import checkpoint
from anybatch.training import train
from small_runs import tiny_ppo


def content(number: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "run": {"iteration": number, "seconds": 1.5, "returns": [1.0, float(number)]},
        "state": {
            "weights": torch.randn(5, 3, generator=generator),
            "half": torch.randn(4, generator=generator).bfloat16(),
            "generator": generator.get_state(),
            "nothing": None,
            "nested": [{"flags": torch.tensor([True, False])}, "text", 2**60],
        },
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def signed(payload: bytes) -> bytes:
    """What a file with a right digest around `payload` looks like."""
    return b"anybatch checkpoint 1\n" + hashlib.sha256(payload).digest() + payload


def test_round_trip(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, content(7), keep=2)
    assert path.parent == tmp_path
    assert equal(checkpoint.load(path), content(7))
    assert not equal(checkpoint.load(path), content(8))
    newest, passed_over = checkpoint.load_newest(tmp_path)
    assert equal(newest, content(7))
    assert passed_over == []
    assert os.listdir(tmp_path) == [path.name]  # nothing temporary stays


def test_keep_deletes_the_oldest(tmp_path: Path) -> None:
    # names sort as text beyond 9 digits too: iterations count, not names
    for iteration in (8, 9, 10, 999_999_999, 1_000_000_000):
        checkpoint.save(tmp_path, iteration, content(iteration), keep=3)
    kept = [checkpoint.load(path)["run"]["iteration"] for path in checkpoint.checkpoints(tmp_path)]
    assert kept == [10, 999_999_999, 1_000_000_000]
    checkpoint.save(tmp_path, 1_000_000_001, content(), keep=1)
    assert len(checkpoint.checkpoints(tmp_path)) == 1


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("best.ckpt", "iteration-abc.ckpt", "notes.txt", "iteration-000000001.ckpt.bak"):
        (tmp_path / name).write_bytes(b"mine")
    checkpoint.save(tmp_path, 1, content(), keep=1)
    checkpoint.save(tmp_path, 2, content(), keep=1)
    assert len(os.listdir(tmp_path)) == 5
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["iteration-000000002.ckpt"]


def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, content(), keep=1)
    good = path.read_bytes()
    for position in [0, 5, 21, 22, 40, 53, 54, 55, len(good) // 2, len(good) - 1]:
        bad = bytearray(good)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(CheckpointError) as refused:
            checkpoint.load(path)
        assert path.name in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("length", [0, 10, 22, 30, 54, 100, -1])
def test_a_truncated_file_is_noticed(tmp_path: Path, length: int) -> None:
    path = checkpoint.save(tmp_path, 1, content(), keep=1)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.load(path)


def test_foreign_and_missing_files(tmp_path: Path) -> None:
    foreign = tmp_path / "iteration-000000003.ckpt"
    torch.save(content(), foreign)  # a plain torch file
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(foreign)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "iteration-000000004.ckpt")
    folder = tmp_path / "iteration-000000005.ckpt"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(folder)


class Explosive:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    plain = pickle.dumps(Explosive(mark), protocol=2)
    pickle.loads(plain)
    assert mark.exists()  # so the trap works
    mark.rmdir()
    path = tmp_path / "iteration-000000001.ckpt"
    path.write_bytes(signed(plain))
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    checkpoint.save(tmp_path, 2, {"state": Explosive(mark)}, keep=5)  # inside torch's own format
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "iteration-000000002.ckpt")
    assert not mark.exists()


@pytest.mark.parametrize("payload", [b"", b"garbage", b"PK\x03\x04abc", b"\x00" * 100, b"cos\nsystem\n."])
def test_foreign_content_with_a_right_digest(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "iteration-000000001.ckpt"
    path.write_bytes(signed(payload))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("payload", [b"\x80\x02.", b"abc\n.", b"h\x05."])
def test_odd_pickles_with_a_right_digest(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "iteration-000000001.ckpt"
    path.write_bytes(signed(payload))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(path)


def test_the_previous_checkpoint_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        checkpoint.save(tmp_path, iteration, content(iteration), keep=3)
    paths = checkpoint.checkpoints(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-5])
    found, passed_over = checkpoint.load_newest(tmp_path)
    assert equal(found, content(2))
    assert len(passed_over) == 1
    assert paths[2].name in passed_over[0]
    paths[1].write_bytes(b"")
    found, passed_over = checkpoint.load_newest(tmp_path)
    assert equal(found, content(1))
    assert len(passed_over) == 2
    paths[0].unlink()
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load_newest(tmp_path)
    assert paths[1].name in str(refused.value)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load_newest(tmp_path)


def test_a_write_that_fails_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, content(1), keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, content(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000000001.ckpt"]
    assert equal(checkpoint.load_newest(tmp_path)[0], content(1))


def test_saving_below_a_damaged_checkpoint_keeps_what_was_saved(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 8, content(8), keep=2)
    damaged = checkpoint.save(tmp_path, 10, content(10), keep=2)
    damaged.write_bytes(b"")
    # resumed from 8, with keep_checkpoints 1 by now
    saved = checkpoint.save(tmp_path, 9, content(9), keep=1)
    assert saved.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [saved.name, f"{damaged.name}.damaged"]


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the next reading of a file fail."""
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        monkeypatch.setattr(Path, "read_bytes", read)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", fail)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_read_that_fails_is_no_damage(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (1, 2):
        checkpoint.save(tmp_path, iteration, content(iteration), keep=2)
    failing(monkeypatch, number)
    with pytest.raises(CheckpointError, match=r"000002.ckpt cannot be read: .*; try again, or remove the file"):
        checkpoint.load_newest(tmp_path)
    assert equal(checkpoint.load_newest(tmp_path)[0], content(2))


def test_a_run_in_progress_may_delete_what_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, content(1), keep=1)
    read = Path.read_bytes

    def next_one(path: Path) -> bytes:
        monkeypatch.setattr(Path, "read_bytes", read)
        checkpoint.save(tmp_path, 2, content(2), keep=1)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", next_one)
    found, passed_over = checkpoint.load_newest(tmp_path)
    assert equal(found, content(2)) and passed_over == []


class Remembering(nn.Module):
    """An encoder with a NumPy array in its state."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__()
        self.out_features = 4
        self.layer = nn.Linear(4, 4)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(observation.float())
        return features

    def get_extra_state(self) -> Any:
        return {"seen": np.zeros(2)}

    def set_extra_state(self, state: Any) -> None: ...


def test_an_encoder_whose_state_cannot_be_loaded_is_refused_before_training(tmp_path: Path) -> None:
    config = override(tiny_ppo(), {"model": {"encoder": f"{__name__}:Remembering", "options": {}}})
    with pytest.raises(ConfigError, match=r"its state contains objects of numpy\..*: look at get_extra_state\(\)"):
        train(config, tmp_path / "run", quiet=True)
    assert not checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    assert not (tmp_path / "run" / "progress.csv").read_text()
    train(tiny_ppo(), tmp_path / "run", quiet=True)  # the folder is free
