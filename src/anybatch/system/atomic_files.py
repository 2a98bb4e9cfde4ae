"""Files that are replaced completely or not at all, even if the process is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".tmp"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of a file to errors of the operating system, such as a full disk, that have none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` when the block ends without an exception.

    The bytes are written to a hidden file in the same folder and flushed to the disk; then it is renamed to `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        temporary.unlink(missing_ok=True)
        # "x": never through a link that somebody put there
        with naming(path), open(temporary, "xb") as file:
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
    """Replace the content of `path` by `text` in UTF-8, without converting newlines."""
    write_bytes(path, text.encode())


def remove_leftovers(folder: Path) -> None:
    """Delete hidden files of killed writers in `folder`; nothing may be writing there meanwhile."""
    for leftover in Path(folder).glob(f".*{_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the rename to the disk; if a file system cannot, the file is still complete."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
