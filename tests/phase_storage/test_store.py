"""Where a phase is kept: the same samples from memory and from files, and what happens when it fits nowhere."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

import anybatch.phase_storage.store as segments
from anybatch.errors import ConfigError
from anybatch.phase_storage.arrays import DiskArray, RamArray
from anybatch.phase_storage.layout import IN_CHECKPOINT, SegmentLayout, choose_storage, free_disk, gigabytes, layout_of
from anybatch.phase_storage.store import SegmentStore

IMAGE = gym.spaces.Box(0, 255, (3, 2), np.uint8)
BOTH = gym.spaces.Dict({"a/b": IMAGE, "n": gym.spaces.Discrete(900)})
SEGMENTS, ENVS, STEPS = 3, 2, 4
KINDS = ["ram", "disk"]


def layout(space: gym.Space = IMAGE) -> SegmentLayout:
    return layout_of(space, 5, segments=SEGMENTS, num_envs=ENVS, steps=STEPS)


def store_of(kind: str, folder: Path, space: gym.Space = IMAGE) -> SegmentStore:
    store = SegmentStore(layout(space), kind, folder / "segments")
    store.open()
    return store


def numbers(segment: int) -> Tensor:
    """(N, T): the number of each sample within the phase."""
    return (torch.arange(ENVS * STEPS) + segment * ENVS * STEPS).view(ENVS, STEPS)


def image(number: Tensor) -> Tensor:
    return (number[..., None, None] * 7 + torch.arange(6).view(3, 2)).to(torch.uint8)


def fill(store: SegmentStore, count: int = SEGMENTS, shift: int = 0) -> None:
    for segment in range(store.count, store.count + count):
        number = numbers(segment) + shift
        as_dict = store.layout.keys is not None
        observation = {"a/b": image(number), "n": number} if as_dict else image(number)
        store.append(observation, number.float())
    store.write_old_params(0, torch.arange(store.samples)[:, None] + torch.arange(5) * 0.5 + shift)


# ---------------------------------------------------------------- layout


def test_the_papers_phase_takes_26_gb() -> None:
    space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    paper = layout_of(space, 15, segments=32, num_envs=256, steps=256)
    assert 32 * 65_536 * 64 * 64 * 3 == 25_769_803_776
    assert paper.sample_bytes == 64 * 64 * 3 + 4 + 4 * 15  # uint8 stays uint8; a target; 15 logits
    assert paper.total_bytes == 32 * 65_536 * 12_352
    assert gigabytes(paper.total_bytes) == "25.9 GB"
    assert gigabytes(310e6) == "310.0 MB"
    assert gigabytes(4500) == "4.5 kB"


def test_dictionaries_keep_the_type_of_every_entry() -> None:
    found = layout(BOTH)
    assert found.keys == ("a/b", "n")
    assert found.arrays["observation0"] == (torch.uint8, (3, 2))
    assert found.arrays["observation1"] == (torch.int64, ())
    assert found.sample_bytes == 6 + 8 + 4 + 20


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", [IMAGE, BOTH], ids=["image", "dict"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_pieces_are_the_samples_that_were_stored(kind: str, space: gym.Space, length: int, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path, space)
    assert store.kind == kind
    fill(store)
    assert store.full
    assert store.samples == 24
    pieces = torch.randperm(24 // length)
    for chosen in pieces.split(3):
        minibatch = store.minibatch(chosen, length)
        number = (chosen[:, None] * length + torch.arange(length)).flatten()
        assert len(minibatch) == len(number)
        observation = minibatch.observation
        picture = observation["a/b"] if isinstance(observation, dict) else observation
        assert picture.dtype == torch.uint8
        assert torch.equal(picture, image(number))
        if isinstance(observation, dict):
            assert list(observation) == ["a/b", "n"]
            assert torch.equal(observation["n"], number)
        assert torch.equal(minibatch.value_target, number.float())
        assert torch.equal(minibatch.old_params, number[:, None] + torch.arange(5) * 0.5)
        for piece in minibatch.micro_batches(2):
            assert len(piece) <= 2
        together = torch.cat([piece.value_target for piece in minibatch.micro_batches(2)])
        assert torch.equal(together, minibatch.value_target)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_and_reuse(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    fill(store)
    assert torch.equal(store.observation(slice(5, 11)), image(torch.arange(5, 11)))
    with pytest.raises(RuntimeError, match="clear"):
        fill(store, 1)
    store.clear()
    assert store.count == 0
    assert not store.full
    fill(store, shift=50)
    assert torch.equal(store.observation(slice(0, 3)), image(torch.arange(50, 53)))
    store.close()


def test_files_have_the_size_that_was_announced_and_go_away(tmp_path: Path) -> None:
    store = store_of("disk", tmp_path)
    files = [path for path in (tmp_path / "segments").iterdir() if "number" not in path.name]
    assert sum(path.stat().st_size for path in files) == store.need == layout().total_bytes
    assert str(tmp_path / "segments") in store.describe()
    fill(store, 1)
    store.discard()
    assert not (tmp_path / "segments").exists()
    assert list(tmp_path.iterdir()) == []


def test_memory_leaves_no_files(tmp_path: Path) -> None:
    store = store_of("ram", tmp_path)
    fill(store)
    store.discard()
    assert store.full  # and what is in memory is part of the last checkpoint
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- what a checkpoint keeps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_restored_in_another_process(kind: str, count: int, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    fill(store)
    store.clear()  # so that the phase is not the run's first
    fill(store, count, shift=100)
    state = store.state_dict(old_params=True)
    if kind == "ram" and count:
        assert {len(x) for x in state["arrays"].values()} == {count * ENVS * STEPS}
    elif kind == "disk":
        assert "arrays" not in state
    store.close()
    again = store_of(kind, tmp_path)
    assert again.load_state_dict(state)
    assert again.count == count
    if count:
        assert torch.equal(again.minibatch(torch.tensor([0]), 4).value_target, torch.arange(100.0, 104.0))
        assert torch.equal(again.minibatch(torch.tensor([0]), 4).old_params[0], 100 + torch.arange(5) * 0.5)
    again.close()


def test_files_of_another_phase_are_not_mistaken_for_the_checkpoints(tmp_path: Path) -> None:
    store = store_of("disk", tmp_path)
    fill(store)
    state = store.state_dict(old_params=True)
    store.clear()
    fill(store, 1, shift=60)  # overwrites what the checkpoint refers to
    store.close()
    again = store_of("disk", tmp_path)
    assert not again.load_state_dict(state)
    assert again.count == 0
    fill(again)
    again.close()


def test_missing_files_are_noticed(tmp_path: Path) -> None:
    store = store_of("disk", tmp_path)
    fill(store, 1)  # the run's first segment: a file full of zeros must not pass for it
    state = store.state_dict(old_params=False)
    store.discard()
    again = store_of("disk", tmp_path)
    assert not again.load_state_dict(state)
    assert again.count == 0
    again.close()


def test_too_large_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "IN_CHECKPOINT", 10)
    store = store_of("ram", tmp_path)
    fill(store, 2)
    assert "collect them again" in store.describe()
    state = store.state_dict(old_params=False)
    assert "arrays" not in state
    assert not store_of("ram", tmp_path).load_state_dict(state)


# ---------------------------------------------------------------- where


GB = 10**9


@pytest.mark.parametrize(
    ("wanted", "need", "free_ram", "disk", "chosen"),
    [
        ("auto", IN_CHECKPOINT, 8 * GB, 80 * GB, "ram"),
        ("auto", IN_CHECKPOINT + 1, 8 * GB, 80 * GB, "disk"),
        ("auto", 26 * GB, 8 * GB, 80 * GB, "disk"),
        ("auto", 26 * GB, 80 * GB, 8 * GB, "ram"),
        ("auto", 1000, 0, 80 * GB, "disk"),
        ("ram", 26 * GB, 80 * GB, 80 * GB, "ram"),
        ("disk", 1000, 80 * GB, 80 * GB, "disk"),
    ],
)
def test_where_a_phase_goes(wanted: str, need: int, free_ram: int, disk: int, chosen: str) -> None:
    assert choose_storage(wanted, need, free_ram=free_ram, free_disk=disk) == chosen


@pytest.mark.parametrize(
    ("wanted", "free_ram", "disk", "advice"),
    [
        ("auto", 8 * GB, 8 * GB, "env.num_envs"),
        ("ram", 8 * GB, 80 * GB, "set aux.storage disk"),
        ("disk", 80 * GB, 8 * GB, "set aux.storage ram"),
        ("disk", 8 * GB, 8 * GB, "env.num_envs"),
    ],
)
def test_one_sentence_when_it_fits_nowhere(wanted: str, free_ram: int, disk: int, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_storage(wanted, 26 * GB, free_ram=free_ram, free_disk=disk)
    sentence = str(refused.value)
    for part in (f"aux.storage is {wanted}", "26.0 GB", gigabytes(free_ram), gigabytes(disk), advice):
        assert part in sentence
    assert "\n" not in sentence


def test_segments_of_another_size_are_not_taken(tmp_path: Path) -> None:
    for kind in ("disk", "ram"):
        store = store_of(kind, tmp_path)
        fill(store, 2)
        state = store.state_dict(old_params=False)
        store.close()
        content = {path: path.read_bytes() for path in (tmp_path / "segments").glob("*")}
        for change in ({"steps": 2 * store.layout.steps}, {"num_envs": 1}, {"segments": 1}):
            other = SegmentStore(replace(store.layout, **change), kind, tmp_path / "segments")
            assert not other.load_state_dict(state) and other.count == 0
            other.close()
            assert content == {path: path.read_bytes() for path in content}  # until the run is known to fit
        again = SegmentStore(store.layout, kind, tmp_path / "segments")
        assert again.load_state_dict(state) and again.count == 2
        again.close()


def test_files_that_had_another_size_in_between_are_not_taken(tmp_path: Path) -> None:
    store = store_of("disk", tmp_path)
    fill(store, 2)
    state = store.state_dict(old_params=False)
    store.close()
    other = SegmentStore(replace(store.layout, num_envs=1), "disk", tmp_path / "segments")
    assert not other.load_state_dict(state)
    other.open()  # the run goes on with one environment, and is killed before its next checkpoint
    other.close()
    again = SegmentStore(store.layout, "disk", tmp_path / "segments")
    assert not again.load_state_dict(state)
    again.close()


def test_a_segment_that_is_half_written_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of("disk", tmp_path)
    fill(store, 1)
    state = store.state_dict(old_params=False)
    store.clear()
    monkeypatch.setattr(DiskArray, "write", killed_after_the_first(DiskArray.write))
    with pytest.raises(KeyboardInterrupt):
        fill(store, 1)
    monkeypatch.undo()
    store.close()
    again = SegmentStore(store.layout, "disk", tmp_path / "segments")
    assert not again.load_state_dict(state)  # its position holds part of another segment
    again.close()


def killed_after_the_first(write: Any) -> Any:
    calls: list[int] = []

    def killed(array: DiskArray, start: int, samples: torch.Tensor) -> None:
        calls.append(start)
        if len(calls) > 2:  # the number, and one array
            raise KeyboardInterrupt
        write(array, start, samples)

    return killed


def test_segments_from_memory_stay_in_files(tmp_path: Path) -> None:
    memory = store_of("ram", tmp_path)
    fill(memory, 2)
    disk = store_of("disk", tmp_path)
    assert disk.load_state_dict(memory.state_dict(old_params=False))
    state = disk.state_dict(old_params=False)
    disk.close()
    again = SegmentStore(disk.layout, "disk", tmp_path / "segments")
    assert again.load_state_dict(state) and again.count == 2
    again.close()


def test_reserved_files_need_no_more_room() -> None:
    # 10 GB in place on a disk with 1 GB beside them: nothing more is needed
    assert choose_storage("disk", 10 * GB, free_ram=100 * GB, free_disk=11 * GB, reserved=10 * GB) == "disk"
    assert choose_storage("auto", 10 * GB, free_ram=100 * GB, free_disk=11 * GB, reserved=10 * GB) == "disk"
    with pytest.raises(ConfigError):  # 2 GB more, of 1 GB
        choose_storage("disk", 12 * GB, free_ram=100 * GB, free_disk=11 * GB, reserved=10 * GB)


def test_free_disk_counts_the_segments_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: Path) -> SimpleNamespace:
        assert Path(path).exists()
        return SimpleNamespace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert free_disk(tmp_path / "not" / "yet") == 1000
    array = DiskArray(tmp_path / "segments" / "worker0-x.segments", 50, torch.float64, (2,))
    assert free_disk(tmp_path / "segments") == 1800
    array.close()


def test_a_disk_that_fills_up_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("this system cannot reserve space")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"aux\.storage is disk.*No space left on device"):
        store_of("disk", tmp_path)
    assert list((tmp_path / "segments").iterdir()) == []


def test_a_disk_that_has_room_for_some_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("this system cannot reserve space")
    reserve, calls = os.posix_fallocate, [0]

    def nearly_full(*arguments: int) -> None:
        calls[0] += 1
        if calls[0] % 2 == 0:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        reserve(*arguments)

    folder = tmp_path / "segments"
    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    with pytest.raises(ConfigError, match="quota exceeded"):
        store_of("disk", tmp_path)
    assert list(folder.iterdir()) == []
    # what an interrupted run has left stays
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    store = store_of("disk", tmp_path)
    fill(store, 1)
    state = store.state_dict(old_params=False)
    store.close()
    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    with pytest.raises(ConfigError, match="quota exceeded"):
        store_of("disk", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    again = store_of("disk", tmp_path)
    assert again.load_state_dict(state)
    again.close()


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bool, torch.int8])
def test_both_arrays_hold_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    data = torch.randint(0, 2 if dtype == torch.bool else 100, (12, 3)).to(dtype)
    ram, disk = RamArray(12, dtype, (3,)), DiskArray(tmp_path / "x", 12, dtype, (3,))
    for array in (ram, disk):
        array.write(4, data[4:].t().contiguous().t())  # not contiguous
        array.write(0, data[:4])
        array.sync()
        assert torch.equal(array.read_range(2, 9), data[2:9])
        assert torch.equal(array.read_chunks(torch.tensor([3, 0]), 3), torch.cat([data[9:12], data[0:3]]))
        copied = array.read_range(0, 1)
        copied.zero_()
        assert torch.equal(array.read_range(0, 1), data[:1])
        array.close()
    assert (tmp_path / "x").stat().st_size == 12 * 3 * dtype.itemsize


def test_a_truncated_file_is_noticed(tmp_path: Path) -> None:
    array = DiskArray(tmp_path / "x", 4, torch.float32, ())
    os.truncate(tmp_path / "x", 5)
    with pytest.raises(EOFError, match="shorter"):
        array.read_range(0, 4)
    array.close()
