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

from anybatch.errors import AnybatchError, CheckpointError
from anybatch.system.atomic_files import write_bytes

_MAGIC = b"anybatch checkpoint 1\n"
_DIGEST_BYTES = 32
_NAME = re.compile(r"iteration-(\d+)\.ckpt")


def save(folder: Path, iteration: int, state: dict[str, Any], keep: int) -> Path:
    """Write ``state`` as the checkpoint of an iteration and delete all but the newest ``keep``.

    Args:
        folder: the run's checkpoint folder.
        iteration: iterations completed.
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
    for other in present[: max(0, newest + 1 - keep)] + present[newest + 1 :]:  # later ones were found damaged
        other.unlink(missing_ok=True)
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
        text = f"{error.strerror}; this checkpoint was not written, and those before it stay"
        raise OSError(error.errno, text, str(path)) from error


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read one checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or not a checkpoint of anybatch.
    """
    try:
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
        raise CheckpointError(f"{path} holds something that is not a checkpoint of anybatch") from error
    return state


def load_newest(folder: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any], list[str]]:
    """Read the newest checkpoint that is intact.

    Returns:
        Its content, and one sentence for each newer file that was passed over.

    Raises:
        CheckpointError: there is none.
    """
    passed_over: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return load(path, device), passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    raise CheckpointError("; ".join(passed_over) or f"{folder} holds no checkpoint yet")


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
            f"the checkpoints of {str(run_dir)!r} do not fit its config.yaml: was it edited?"
        ) from error
