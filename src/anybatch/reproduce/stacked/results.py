"""A file for each finished run, named by a hash of its settings: a line that describes the run, then rows as CSV."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import zlib
from pathlib import Path

import numpy as np

from anybatch.config.io import from_dict, to_dict
from anybatch.config.schema import TrainConfig
from anybatch.errors import CheckpointError
from anybatch.reproduce.evaluations import Evaluations
from anybatch.reproduce.results import write_rows
from anybatch.reproduce.stacked.shapes import run_identity
from anybatch.reproduce.stacked.stack import RunResult

_DIGITS = 7


def result_path(folder: Path, config: TrainConfig, seed: int, evaluations: Evaluations | None = None) -> Path:
    """Path of a run's result, whose name is a hash of the seed and of all settings that affect the outcome."""
    text = f"{seed} {run_identity(config)}"
    if evaluations is not None:
        text += f" {evaluations.points} {evaluations.episodes}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Path(folder) / f"{digest[:20]}.csv.gz"


def write_result(folder: Path, result: RunResult, evaluations: Evaluations | None = None) -> Path:
    """Write a run's result atomically; equal results give equal bytes.

    The file is a gzipped CSV after a line ``# {"seed": ..., "diverged": ..., "config": ...}``; empty fields are NaN.
    """
    path = result_path(folder, result.config, result.seed, evaluations)
    about = {"seed": result.seed, "diverged": result.diverged, "config": to_dict(result.config)}
    rows = ([_format(x) for x in row] for row in zip(*result.columns.values(), strict=True))
    write_rows(path, [result.columns, *rows], f"# {json.dumps(about)}\n")
    return path


def read_result(path: Path) -> RunResult:
    """Read what :func:`write_result` wrote.

    Raises:
        CheckpointError: the file is damaged, or of another kind.
    """
    try:
        first, header, *lines = gzip.decompress(Path(path).read_bytes()).decode().splitlines()
        about = json.loads(first.removeprefix("# "))
        rows = [[float(field or "nan") for field in line] for line in csv.reader(lines)]
        values = np.array(rows).reshape(len(rows), len(header.split(","))).T
        columns = dict(zip(header.split(","), values, strict=True))
        return RunResult(from_dict(about["config"]), int(about["seed"]), columns, bool(about["diverged"]))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(path)!r} is not the result of a run: {error}") from error


def _format(value: float) -> str:
    if math.isnan(value):
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else f"{value:.{_DIGITS}g}"
