"""Checkpoints: one file each, written atomically, verified by a digest, loaded without unpickling code."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from anybatch.errors import AnybatchError, CheckpointError, ConfigError
from anybatch.system.atomic_files import write_bytes

_MAGIC = b"anybatch checkpoint 1\n"
_DIGEST_BYTES = 32
_NAME = re.compile(r"iteration-(\d+)\.ckpt")


def save(folder: Path, iteration: int, state: dict[str, Any], keep: int) -> Path:
    """Write ``state`` as the checkpoint of an iteration and delete all but the newest ``keep``.

    Checkpoints of later iterations, which a resumed run has passed over, get the ending ``.damaged``.

    Args:
        folder: the run's checkpoint folder.
        iteration: iterations completed, without one that is still open.
        state: tensors and plain values, nested in dictionaries and lists.
        keep: checkpoints that stay, at least 1.

    Returns:
        The file's path.

    Raises:
        OSError: it cannot be written, on a full disk say.
    """
    path = folder / f"iteration-{iteration:09d}.ckpt"
    write(path, state)
    present = checkpoints(folder)
    newest = present.index(path)
    for other in present[: max(0, newest + 1 - keep)]:
        other.unlink(missing_ok=True)
    for other in present[newest + 1 :]:  # found damaged; perhaps somebody can still use them
        other.replace(f"{other}.damaged")
    return path


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a file that :func:`load` reads.

    Raises:
        OSError: it cannot be written, on a full disk say.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    try:
        write_bytes(path, b"".join((_MAGIC, hashlib.sha256(payload).digest(), payload)))
    except OSError as error:
        text = f"{error.strerror}; this checkpoint was not written; the earlier ones are unchanged"
        raise OSError(error.errno, text, str(path)) from error


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read one checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or not a checkpoint of anybatch; its cause is an OSError if the file
            could not be read.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe might never end
            raise CheckpointError(f"{path} cannot be read: it is not a file")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not content.startswith(_MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of this version of anybatch")
    start = len(_MAGIC) + _DIGEST_BYTES
    digest, payload = content[len(_MAGIC) : start], content[start:]
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(f"{path} is damaged: its content does not match its digest")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
    except Exception as error:  # the unpickler raises nearly anything for bytes that torch.save did not write
        raise CheckpointError(f"the content of {path} is not a checkpoint of anybatch") from error
    return state


def check_newest(folder: Path) -> None:
    """Read the first checkpoint of a run, so that one that could not be loaded again is noticed at once.

    Raises:
        ConfigError: the state of an encoder or a callback has a type that loading, which runs no code, refuses; the
            checkpoint is deleted.
    """
    path = checkpoints(folder)[-1]
    try:
        load(path)
    except CheckpointError as error:
        if error.__cause__ is None or isinstance(error.__cause__, OSError):
            raise
        path.unlink()
        found = re.search(r"GLOBAL (\S+)", str(error.__cause__))
        kind = f"objects of {found[1]}" if found else "something"
        raise ConfigError(
            f"checkpoints of this run could not be loaded again, because its state contains {kind} in addition to "
            "tensors and plain values: look at get_extra_state() of the encoder, and state_dict() of the callbacks"
        ) from error


def load_newest(folder: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any], list[str]]:
    """Read the newest checkpoint that is intact.

    Returns:
        Its content, and one sentence for each newer file that was passed over.

    Raises:
        CheckpointError: there is none, or a newer one could not be read, which is no proof of damage.
    """
    passed_over: list[str] = []
    tried: set[Path] = set()
    while left := [path for path in checkpoints(folder) if path not in tried]:
        tried.add(left[-1])
        try:
            return load(left[-1], device), passed_over
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # the run in progress has deleted it after a newer one
                continue
            if isinstance(error.__cause__, OSError):
                raise CheckpointError(f"{error}; try again, or remove the file") from error
            passed_over.append(str(error))
    raise CheckpointError("; ".join(passed_over) or f"{folder} contains no checkpoint yet")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("iteration-*.ckpt"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


@contextlib.contextmanager
def must_fit(run_dir: Path | str) -> Iterator[None]:
    """Raise CheckpointError where the content of a run's checkpoint does not fit the objects that take it over."""
    try:
        yield
    except AnybatchError:
        raise
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoints of {str(run_dir)!r} do not match its config.yaml; it may have been edited"
        ) from error
