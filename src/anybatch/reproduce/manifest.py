"""By which command, with which seeds and versions and on what machine results were made; no names and no paths."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from anybatch._version import __version__
from anybatch.errors import AnybatchError
from anybatch.reproduce.suites.suite import Figure, Suite, work_of
from anybatch.system.atomic_files import write_text

NAME = "manifest.json"
_PACKAGES = ("torch", "numpy", "envpool", "matplotlib")


def machine() -> dict[str, Any]:
    """What a reader needs to judge a timing."""
    return {"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count(), "gpu": _gpu()}


def versions() -> dict[str, str]:
    """Of Python, anybatch and what it computes with."""
    found = {"python": platform.python_version(), "anybatch": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Call:
    """A finished ``anybatch reproduce run``."""

    arguments: Sequence[str]
    trained: int
    """Runs that were not there before."""
    seconds: float
    """Wall-clock time."""
    processor_seconds: float
    """Of this process and those that it started and that have ended."""


def processor_seconds() -> float:
    """Processor time so far of this process and of its children that have ended."""
    return sum(os.times()[:4])


def add_call(folder: Path, call: Call, suite: Suite, figures: Sequence[Figure]) -> dict[str, Any]:
    """Note a call beside its results; returns the whole manifest."""
    known = read_manifest(folder) if (folder / NAME).exists() else {"figures": {}, "calls": []}
    known |= {"suite": suite.name, "about": suite.about, "versions": versions(), "machine": machine()}
    for figure in figures:
        jobs = work_of(suite, [figure]).jobs
        known["figures"][figure.name] = {
            "runs": len(jobs),
            "env_steps": sum(cell.config.total_env_steps for cell, _ in jobs),
            "seeds": sorted({seed for _, seed in jobs}),
        }
    known["calls"].append(
        {
            "command": " ".join(["anybatch", *without_out(call.arguments)]),
            "runs trained": call.trained,
            "seconds": round(call.seconds, 1),
            "processor seconds": round(call.processor_seconds, 1),
        }
    )
    write_text(folder / NAME, json.dumps(known, indent=1) + "\n")
    return known


def without_out(arguments: Sequence[str]) -> list[str]:
    """Arguments without the folder, if it is not relative: a path of this machine says nothing to others."""
    shown = list(arguments)
    for k, argument in enumerate(shown):
        if argument == "--out" and k + 1 < len(shown) and Path(shown[k + 1]).is_absolute():
            shown[k + 1] = "DIR"
        elif argument.startswith("--out=") and Path(argument[6:]).is_absolute():
            shown[k] = "--out=DIR"
    return shown


def read_manifest(folder: Path) -> dict[str, Any]:
    """What :func:`add_call` wrote.

    Raises:
        AnybatchError: there is none, or it is damaged.
    """
    try:
        found: dict[str, Any] = json.loads((folder / NAME).read_text())
        return found
    except (OSError, ValueError) as error:
        raise AnybatchError(f"{folder / NAME} cannot be read: {error}") from error


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
