"""One run of a grid: train it, go on with it, or see that it is done."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.runs.files import CHECKPOINTS, CONFIG, PROGRESS
from anybatch.scaling.changes import Change

if TYPE_CHECKING:
    from anybatch.training import TrainResult

_LOCK = "lock"
_TAIL = 1 << 14


def go_on(
    config: TrainConfig, folder: Path, seed: int, *, quiet: bool = False, changes: Sequence[Change] = ()
) -> TrainResult:
    """Train a run into a folder, whatever part of it is there already; nothing is done to a finished one.

    Raises:
        ConfigError: the folder holds a run of another configuration or seed, or another process is training it.
        CheckpointError: none of its checkpoints is intact.
        EnvError, DivergenceError: as for :func:`anybatch.training.train`.
    """
    from anybatch.distributed.collectives import joined_process_group, on_main
    from anybatch.runs.run import read_config
    from anybatch.training import TrainResult, resume, train

    def look() -> TrainResult | bool:
        """How the run ended; else whether there is something to go on from."""
        if not (folder / CONFIG).exists():
            return False
        if read_config(folder) != (config, seed):
            raise ConfigError(
                f"out is {str(folder)!r}, which holds a run of another configuration or seed; choose another folder"
            )
        if finished(folder, config):
            row = last_row(folder)
            return TrainResult(folder, int(row["env_steps"]), row["mean_episode_return"], interrupted=False)
        if _newest_checkpoint(folder) is None:  # killed before the first one: nothing is lost
            (folder / CONFIG).unlink()
            return False
        return True

    with joined_process_group(), _locked(folder):
        found = on_main(look)
        if isinstance(found, TrainResult):
            return found
        return resume(folder, quiet=quiet) if found else train(config, folder, seed, quiet=quiet, changes=changes)


def finished(folder: Path, config: TrainConfig) -> bool:
    """Whether a run has done its environment steps, and has written its last checkpoint."""
    row = last_row(folder)
    return row.get("env_steps", 0) >= config.total_env_steps and _newest_checkpoint(folder) == row["iteration"]


def last_row(folder: Path) -> dict[str, float]:
    """The last complete row of a run's progress.csv, NaN where it has no number; empty if there is none.

    Reads the file's two ends only, and may be called while the run goes on.
    """
    try:
        with open(folder / PROGRESS, "rb") as file:
            header = file.readline()
            size = file.seek(0, 2)
            file.seek(max(len(header), size - _TAIL))
            *lines, _unfinished = file.read().decode().split("\n")
    except (OSError, UnicodeDecodeError):
        return {}
    names = next(csv.reader([header.decode()]), [])
    values = lines[-1].split(",") if lines else []
    if len(values) != len(names):
        return {}
    try:
        return {name: float(value) if value else math.nan for name, value in zip(names, values, strict=True)}
    except ValueError:
        return {}


def _newest_checkpoint(folder: Path) -> int | None:
    from anybatch.runs.checkpoint import checkpoints

    found = checkpoints(folder / CHECKPOINTS)
    return int(found[-1].stem.split("-")[1]) if found else None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training the same run; the lock goes with the process."""
    from anybatch.distributed.collectives import on_main

    opened: list[BinaryIO] = []

    def lock() -> None:
        try:
            import fcntl
        except ImportError:  # no such locks on Windows
            return
        folder.mkdir(parents=True, exist_ok=True)
        opened.append(open(folder / _LOCK, "ab"))  # noqa: SIM115 (open while the lock is held)
        try:
            fcntl.flock(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"out is {str(folder)!r}, which another process is training at this moment") from None

    try:
        on_main(lock)
        yield
    finally:
        for file in opened:
            file.close()
