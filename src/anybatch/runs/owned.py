"""Sole ownership of a run folder while a process writes to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from anybatch.distributed.collectives import on_main
from anybatch.errors import ConfigError, shown
from anybatch.runs.files import WANDB

_LOCK = "lock"


@contextlib.contextmanager
def owned(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes from writing to a run folder, which is made if it is missing.

    The operating system frees the lock when the process ends, however it ends. A block inside another one of the same
    thread does nothing.

    Args:
        folder: the run folder.
        patience: seconds to wait for another process that is training there.

    Raises:
        ConfigError: another process is training there, the folder cannot be written, or it contains symbolic links,
            pipes or devices.
    """
    lock = FileLock(folder / _LOCK, blocking=False, is_singleton=True)

    def acquire() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder)
            lock.acquire(timeout=patience, blocking=patience > 0)
        except Timeout:
            raise ConfigError(f"another process is currently training in {str(folder)!r}") from None
        except OSError as error:
            raise ConfigError(f"{str(folder)!r} cannot be written: {error.strerror or error}") from error

    try:
        on_main(acquire)
        yield
    finally:
        if lock.lock_counter == 1:  # held by this block, and not by one around it
            _remove_if_empty(folder)
        lock.release()


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder in which nothing has been written but the lock: the next run takes its name."""
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [_LOCK]:
            (folder / _LOCK).unlink()
            folder.rmdir()


def checked_folder(name: str, path: str | Path) -> Path:
    """The path of a folder of runs, with the home folder for ``~``; ``name`` is for the error.

    Raises:
        ConfigError: it is not a path, or in the home folder of nobody, or an empty text, such as that of an unset
            variable, which would be the current folder.
    """
    given: Any = path
    if not isinstance(given, str | os.PathLike) or not str(path):
        hint = "; its run_dir is one" if hasattr(given, "run_dir") else ""
        raise ConfigError(f"{name} is {shown(given)}, but must be a folder{hint}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name} is {shown(str(path))}, but there is no such user") from error


def refuse_links(folder: Path) -> None:
    """Raise ConfigError for a symbolic link in a run folder, which would redirect writing, a pipe or a device.

    Weights & Biases has links of its own in its folder, to which nothing else is written.
    """
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink():
                raise ConfigError(
                    f"{str(path)!r} is a symbolic link, but anybatch does not write to run folders that contain links"
                )
            if path.exists() and not (path.is_file() or path.is_dir()):  # reading it might never end
                raise ConfigError(
                    f"{str(path)!r} is a pipe or device, but a run folder must contain only files and folders"
                )
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name != WANDB]
