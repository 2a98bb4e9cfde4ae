"""The folder of one run: train into it, resume it, or find that it is finished."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError, DivergenceError
from anybatch.runs.files import CHECKPOINTS, CONFIG, DIVERGED, PROGRESS
from anybatch.scaling.changes import Change
from anybatch.system.atomic_files import write_text

if TYPE_CHECKING:
    from anybatch.training import TrainResult

_TAIL_BYTES = 1 << 14
_PATIENCE = 15.0
"""Seconds in which a run ends whose grid was killed, and which the same grid starts again."""


def train_or_resume(
    config: TrainConfig,
    folder: Path,
    seed: int,
    *,
    quiet: bool = False,
    changes: Sequence[Change] = (),
    init_from: Path | None = None,
) -> TrainResult:
    """Train a run, resume it from its newest checkpoint, or return the result if it is finished.

    After a divergence the folder contains the error, until the run is started again; see :func:`has_diverged`.

    Raises:
        ConfigError: the folder holds a run of another configuration, seed or start, or another process is training it.
        CheckpointError: none of the checkpoints is intact.
        EnvError, DivergenceError: as for :func:`anybatch.training.train`.
    """
    from anybatch.distributed.collectives import joined_process_group, on_main
    from anybatch.runs.folder import began_from, read_config
    from anybatch.runs.owned import checked_folder, owned
    from anybatch.runs.progress import set_aside
    from anybatch.training import TrainResult, resume, train

    folder = checked_folder("out", folder)

    def previous_result() -> TrainResult | None:
        """The result of a finished run."""
        if not (folder / CONFIG).exists():
            return None
        if read_config(folder) != (config, seed):
            raise ConfigError(
                f"out is {str(folder)!r}, which contains a run of another configuration or seed; choose another folder"
            )
        before, now = (x and x.expanduser().resolve() for x in (began_from(folder), init_from))
        if before != now:
            there, here = ("from scratch" if x is None else f"from {str(x)!r}" for x in (before, now))
            raise ConfigError(
                f"out is {str(folder)!r}, which contains a run that began {there}, but this run begins {here}; choose "
                "another folder"
            )
        if finished(folder, config):
            row = last_row(folder)
            return TrainResult(folder, int(row["env_steps"]), row["mean_episode_return"], interrupted=False)
        if _newest_checkpoint(folder) is None:  # killed before the first checkpoint: train from the start
            (folder / CONFIG).unlink()
            set_aside(folder / PROGRESS)
        return None

    with joined_process_group(), owned(folder, patience=_PATIENCE):
        result = on_main(previous_result)
        if result is not None:
            return result
        with _divergence_recorded(folder):
            if on_main((folder / CONFIG).exists):
                return resume(folder, quiet=quiet, trust_code=True)  # the configuration is that of the caller
            return train(config, folder, seed, quiet=quiet, changes=changes, init_from=init_from)


def finished(folder: Path, config: TrainConfig) -> bool:
    """Whether a run has completed its environment steps and written its last checkpoint."""
    row = last_row(folder)
    return row.get("env_steps", 0) >= config.total_env_steps and _newest_checkpoint(folder) == row["iteration"]


@contextlib.contextmanager
def _divergence_recorded(folder: Path) -> Iterator[None]:
    from anybatch.distributed.collectives import is_main

    try:
        yield
    except DivergenceError as error:
        if is_main():
            with contextlib.suppress(OSError):  # a full disk must not hide the divergence
                write_text(folder / DIVERGED, f"{error}\n")
        raise


def has_diverged(folder: Path) -> bool:
    """Whether the last start of a run ended with a divergence."""
    return (folder / DIVERGED).exists()


def ended(folder: Path, config: TrainConfig) -> bool:
    """Whether a run is finished, or its evaluations have reached ``eval.stop_at``, with its last checkpoint written."""
    row, goal = last_row(folder), config.eval.stop_at
    reached = goal is not None and row.get("eval_return", math.nan) >= goal
    return finished(folder, config) or (reached and _newest_checkpoint(folder) == row["iteration"])


def last_row(folder: Path) -> dict[str, float]:
    """Last complete row of progress.csv, NaN where a field is empty; an empty dictionary if there is none.

    Reads only the header and the end of the file. Safe while the run is writing to it.
    """
    try:
        with open(folder / PROGRESS, "rb") as file:
            header = file.readline()
            size = file.seek(0, 2)
            file.seek(max(len(header), size - _TAIL_BYTES))
            *lines, _incomplete = file.read().decode().split("\n")
        names, values = next(csv.reader([header.decode()])), lines[-1].split(",")
        return {name: float(value) if value else math.nan for name, value in zip(names, values, strict=True)}
    except (OSError, ValueError, IndexError, StopIteration):  # ValueError: no UTF-8, no number, or fields are missing
        return {}


def _newest_checkpoint(folder: Path) -> int | None:
    """Iteration of the newest checkpoint."""
    from anybatch.runs.checkpoint import checkpoints

    paths = checkpoints(folder / CHECKPOINTS)
    return int(paths[-1].stem.split("-")[1]) if paths else None
