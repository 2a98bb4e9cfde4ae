"""progress.csv: writing a row per iteration, and reading it."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from anybatch.errors import CheckpointError
from anybatch.system import atomic_files as atomic

Row: TypeAlias = dict[str, Any]
"""Number by column (a Python, NumPy or one-element torch number); None and NaN are empty in the CSV."""

_SYNC_SECONDS = 1.0  # a flushed row survives the death of the process at once, the death of the machine after this time


class ProgressLog:
    """progress.csv: a header and one row per iteration, appended and flushed, so that a kill loses no finished row.

    Damaged lines, such as an incomplete last one after a crash, are moved to `progress-damaged.txt` when the file is
    opened. A row with a new column, such as the statistics of an auxiliary phase, rewrites the file atomically with a
    longer header and empty fields in earlier rows. Numbers are written so that they are read back exactly.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        header, rows, damaged = _load(self.path)
        if damaged:
            with open(self._beside("-damaged.txt"), "ab") as file:
                file.writelines(line + b"\n" for line in damaged)
                file.flush()
                os.fsync(file.fileno())
            atomic.write_bytes(self.path, _render(header, rows))
        self._columns = header
        self._file = open(self.path, "ab")  # noqa: SIM115 (open for the whole run)
        self._synced = -math.inf

    def append(self, row: Row) -> None:
        """Append one row and flush it to the operating system."""
        self._append([{column: as_text(value) for column, value in row.items()}])

    write = append

    def truncate_after(self, iteration: int) -> int:
        """Move the rows of later iterations, which a resumed run repeats, to `progress-lost.csv`; return the count."""
        header, rows, _ = _load(self.path)
        if not rows:
            return 0
        if "iteration" not in header:
            raise CheckpointError(f"{self.path} has no column 'iteration', so it is not the progress of a run.")
        index = header.index("iteration")
        early: list[list[str]] = []
        late: list[list[str]] = []
        for row in rows:
            (late if row[index] and float(row[index]) > iteration else early).append(row)
        if late:
            # copy first, then cut: a kill in between repeats rows in the copy and loses none
            lost = ProgressLog(self._beside("-lost.csv"))
            lost._append([dict(zip(header, row, strict=True)) for row in late])
            lost.close()
            self._rewrite(header, early)
        return len(late)

    def close(self) -> None:
        """Sync the file to the disk and close it."""
        if not self._file.closed:
            with atomic.naming(self.path), contextlib.closing(self._file):
                self._file.flush()
                os.fsync(self._file.fileno())

    def _append(self, rows: Sequence[Mapping[str, str]]) -> None:
        new = [column for column in dict.fromkeys(c for row in rows for c in row) if column not in self._columns]
        if new:
            _, old, _ = _load(self.path)
            self._rewrite([*self._columns, *new], [row + [""] * len(new) for row in old])
        lines = b"".join(_line([row.get(column, "") for column in self._columns]) for row in rows)
        with atomic.naming(self.path):
            self._file.write(lines)
            self._file.flush()
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def _rewrite(self, header: list[str], rows: Sequence[Sequence[str]]) -> None:
        self._file.close()
        atomic.write_bytes(self.path, _render(header, rows))
        self._columns = header
        self._file = open(self.path, "ab")  # noqa: SIM115

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.stem + ending)


def set_aside(path: Path) -> None:
    """Move all rows of a progress.csv to `progress-lost.csv`, and remove the file."""
    log = ProgressLog(path)
    log.truncate_after(0)
    log.close()
    path.unlink()


def read_progress(path: Path) -> dict[str, list[float]]:
    """Read the columns of a progress.csv, NaN where a field is empty; safe while the run is writing to it."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, so there is no progress to read.")
    header, rows, _ = _load(path)
    columns = zip(*rows, strict=True) if rows else ((),) * len(header)
    return {
        name: [float(field) if field else math.nan for field in column]
        for name, column in zip(header, columns, strict=True)
    }


def as_text(value: Any) -> str:
    """Format a number so that it is read back exactly; None and NaN are empty."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, int):
        return str(int(value))
    return repr(float(value))


def _line(fields: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode()


def _render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    return b"".join(_line(fields) for fields in ([header] if header else []) + list(rows))


def _load(path: Path) -> tuple[list[str], list[list[str]], list[bytes]]:
    """Read the header, the complete rows, and the damaged lines."""
    header: list[str] = []
    rows: list[list[str]] = []
    damaged: list[bytes] = []
    *lines, unfinished = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for raw in lines:
        fields = _parse(raw)
        if not header and fields and all(fields):
            header = fields
        elif header and len(fields) == len(header) and all(map(_is_number, fields)):
            rows.append(fields)
        else:
            damaged.append(raw)
    if unfinished:
        damaged.append(unfinished)
    return header, rows, damaged


def _parse(raw: bytes) -> list[str]:
    try:
        return next(csv.reader([raw.decode()], strict=True), [])
    except (UnicodeDecodeError, csv.Error):
        return []


def _is_number(field: str) -> bool:
    try:
        float(field or "0")
    except ValueError:
        return False
    return True
