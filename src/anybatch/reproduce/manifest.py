"""manifest.json of a results folder: commands, seeds, versions and machine, without names of users and paths."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from anybatch._version import __version__
from anybatch.errors import AnybatchError, ConfigError
from anybatch.reproduce.suites.suite import Figure, Suite, required_runs
from anybatch.system.atomic_files import write_text

NAME = "manifest.json"
"""File name of the manifest."""

_PACKAGES = ("torch", "numpy", "envpool", "matplotlib")
_SCHEMA: dict[Any, Any] = {  # dictionaries with the key ... take any names
    "suite": str,
    "about": str,
    "versions": {...: str},
    "machine": {"system": str, "architecture": str, "cores": int | None, "gpu": str},
    "figures": {...: {"runs": int, "env_steps": int, "seeds": [int]}},
    "calls": [{"command": str, "runs trained": int, "seconds": int | float, "processor seconds": int | float}],
}


def machine() -> dict[str, Any]:
    """Description of this machine, to judge timings by."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count(), "gpu": gpu}


def versions() -> dict[str, str]:
    """Versions of Python, anybatch and the packages that it computes with."""
    installed = {"python": platform.python_version(), "anybatch": __version__}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def check_suite(folder: Path, suite: str) -> None:
    """Raise ConfigError if a results folder has the results of another suite."""
    if (folder / NAME).exists() and (name := read_manifest(folder)["suite"]) != suite:
        raise ConfigError(f"suite is {suite}, but {folder} has results of the suite {name}")


def add_command(
    folder: Path, suite: Suite, figures: Sequence[Figure], arguments: Sequence[str], trained: int, seconds: float
) -> None:
    """Add a finished command of this process to the manifest of a results folder.

    ``arguments`` are its words after ``anybatch``, ``trained`` is the number of runs that had no result before, and
    ``seconds`` the wall-clock time.
    """
    manifest = read_manifest(folder) if (folder / NAME).exists() else {"figures": {}, "calls": []}
    manifest |= {"suite": suite.name, "about": suite.about}
    if trained or not manifest["calls"]:  # a call that only draws does not change what trained the runs
        manifest |= {"versions": versions(), "machine": machine()}
    for figure in figures:
        runs = required_runs(suite, [figure])
        manifest["figures"][figure.name] = {
            "runs": len(runs),
            "env_steps": sum(group.config.total_env_steps for group, _ in runs),
            "seeds": sorted({seed for _, seed in runs}),
        }
    manifest["calls"].append(
        {
            "command": " ".join(["anybatch", *without_folder(arguments)]),
            "runs trained": trained,
            "seconds": round(seconds, 1),
            "processor seconds": round(sum(os.times()[:4]), 1),  # also of finished children
        }
    )
    write_text(folder / NAME, json.dumps(manifest, indent=1) + "\n")


def without_folder(arguments: Sequence[str]) -> list[str]:
    """Replace an absolute folder of ``--out`` by DIR: a path of this machine means nothing to others."""
    shown = list(arguments)
    for k, argument in enumerate(shown):
        if argument == "--out" and k + 1 < len(shown) and Path(shown[k + 1]).is_absolute():
            shown[k + 1] = "DIR"
        elif argument.startswith("--out=") and Path(argument[6:]).is_absolute():
            shown[k] = "--out=DIR"
    return shown


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        AnybatchError: there is none, or an entry is missing or of the wrong type.
    """
    path = folder / NAME
    try:
        manifest: dict[str, Any] = json.loads(read_regular_file(path))
        _check(manifest, _SCHEMA, "")
    except (OSError, ValueError, RecursionError) as error:
        raise AnybatchError(f"{path} is not a manifest of anybatch reproduce run: {error}") from error
    return manifest


def _check(value: Any, schema: Any, where: str) -> None:
    """Raise a ValueError unless a value from JSON has the types of the schema."""
    kind = type(schema) if isinstance(schema, (dict, list)) else schema
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where[:100] or 'its content'} must be of type {getattr(kind, '__name__', kind)}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, schema[0], f"{where}.{index}")
    elif isinstance(value, dict):
        for name in value if ... in schema else schema:
            _check(value.get(name), schema.get(..., schema.get(name)), f"{where}.{name}".lstrip("."))


def read_regular_file(path: Path) -> bytes:
    """Read a regular file; a link in a folder of somebody else, a pipe or a device is refused.

    Raises:
        AnybatchError: it is not a regular file.
        OSError: it cannot be read.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise AnybatchError(f"{path} is a link or not a regular file, so it is not read")
    return path.read_bytes()
