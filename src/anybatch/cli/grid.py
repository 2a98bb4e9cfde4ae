"""``anybatch grid``: train a list of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from anybatch.grid.grid_file import read_grid
from anybatch.presets import PRESETS


@dataclass(frozen=True)
class GridArguments:
    """Train every run of a list; what is done is skipped, what was interrupted goes on.

    A file names a base (preset or config.yaml), fields to set, variants, fields to vary, and seeds.
    """

    files: tyro.conf.Positional[tuple[Path, ...]]
    """YAML files, see docs/scaling-out.md."""
    out: Path = Path("runs/grid")
    """Holds one run folder a run, named by its content; for Ray on several machines, on a shared file system."""
    launcher: Literal["local", "ray", "print"] = "local"
    """Processes here, tasks of a Ray cluster, or only print one command a line (for xargs, Slurm, ...)."""
    processes: int | None = None
    """Most runs at once; by default one a core, or what the Ray cluster has room for."""
    restarts: int = 2
    """How often a run that fails or is killed is started again from its newest checkpoint."""
    address: str | None = None
    """The Ray cluster (launcher ray); by default RAY_ADDRESS, or Ray on this machine."""
    quiet: bool = False
    """Show no progress."""


def grid_command(arguments: list[str]) -> int:
    """``anybatch grid FILE...``; returns the exit code."""
    asked = tyro.cli(GridArguments, args=arguments, prog="anybatch grid")
    from anybatch.grid.runner import run_grid

    jobs = [job for path in asked.files for job in read_grid(path, PRESETS)]
    result = run_grid(
        jobs,
        asked.out,
        launcher=asked.launcher,
        processes=asked.processes,
        restarts=asked.restarts,
        address=asked.address,
        quiet=asked.quiet,
    )
    return 0 if asked.launcher == "print" else result.exit_code
