"""``anybatch grid``: train a list of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from anybatch.errors import ConfigError


def main(
    files: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...", help_behavior_hint="")],
    /,
    out: Path = Path("runs/grid"),
    launcher: Literal["local", "ray", "print"] = "local",
    processes: int | None = None,
    restarts: int = 2,
    address: str | None = None,
    trust_code: bool = False,
    quiet: bool = False,
) -> int:
    """Train every run of a list; finished runs are skipped, interrupted ones resumed.

    A file is YAML with these entries, all optional except base:
    - base: a preset, or the path of a config.yaml
    - set: values by field; variants: names, each with values by field
    - vary: lists of values by field, or divide_batch_by, in all combinations
    - seeds: a number of seeds, or a list
    - tuned_at: batch of the tuning, such as {num_envs: 256}

    Example: {base: ppo, set: {env.id: gym:CartPole-v1}, vary: {clip: [0.1, 0.2]}}

    Args:
        files: Files that list the runs.
        out: Parent of the run folders, which are named by their content; on a shared disk for Ray on several machines.
        launcher: Processes on this machine, tasks of a Ray cluster, or print one command per line (xargs, Slurm, ...).
        processes: Maximum number of runs at once; by default one per core, or as many as the Ray cluster can hold.
        restarts: Number of times that a failed or killed run is restarted from its newest checkpoint.
        address: Address of the Ray cluster (launcher ray); by default RAY_ADDRESS, or Ray on this machine.
        trust_code: Import the Python code (import.path:function) named in the files.
        quiet: Show no progress.
    """
    from anybatch.grid.grid_file import assumption, check_environment, read_grid
    from anybatch.grid.runner import run_grid
    from anybatch.presets import PRESETS

    if not files:
        raise ConfigError("anybatch grid needs a file that lists the runs")
    jobs = [job for path in files for job in read_grid(path, PRESETS, trust_code=trust_code)]
    for path in files:
        check_environment(path, PRESETS)
    for sentence in filter(None, map(assumption, files)):
        print(sentence, file=sys.stderr)
    for line in dict.fromkeys(str(finding) for job in jobs for finding in job.findings):
        print(line, file=sys.stderr)
    result = run_grid(
        jobs, out, launcher=launcher, processes=processes, restarts=restarts, address=address, quiet=quiet
    )
    return 0 if launcher == "print" else result.exit_code
