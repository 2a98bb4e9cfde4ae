"""Files that are replaced whole or not at all, whatever moment the process is killed at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".tmp"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which takes the place of `path` when the block ends without an exception.

    The bytes go to a hidden file in the same folder, are forced to the disk, and are then renamed over `path`; until
    the rename `path` is untouched, after it the whole new content is there.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in UTF-8, newlines as they are."""
    write_bytes(path, text.encode())


def remove_leftovers(folder: Path) -> None:
    """Delete the hidden files that writers killed half-way left in `folder`; call it while nobody writes there."""
    for leftover in Path(folder).glob(f".*{_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Force the rename itself to the disk; not every file system can, and the file is whole either way."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
