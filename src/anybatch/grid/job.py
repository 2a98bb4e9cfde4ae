"""Jobs of a grid and their outcomes."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from anybatch._version import __version__
from anybatch.config.io import to_dict
from anybatch.config.schema import TrainConfig
from anybatch.runs.trust import code_named
from anybatch.scaling.findings import Finding
from anybatch.system.exit_codes import DONE, FAILED, INTERRUPTED

JOB, LOG = "job.yaml", "log.txt"
"""Files that a grid adds to a run folder: the configuration, and the output of the run."""

Status: TypeAlias = Literal["waiting", "running", "done", "failed", "diverged", "interrupted"]
"""State of a job."""

UNSUCCESSFUL: tuple[Status, ...] = ("failed", "diverged")
"""States of jobs that ended without a result."""


@dataclass(frozen=True)
class Job:
    """One run of a grid."""

    config: TrainConfig
    seed: int = 0
    """Seed of the run."""
    name: str = ""
    """Name in tables. The run and its folder depend on the configuration and the seed only."""
    findings: tuple[Finding, ...] = ()
    """Conditions of batch size-invariance that are not met, if the configuration is scaled."""

    @property
    def folder_name(self) -> str:
        """Name of the run folder: environment and seed, then a hash of configuration, seed and anybatch's version."""
        content = json.dumps([__version__, self.seed, to_dict(self.config)], sort_keys=True)
        env = re.sub(r"[^A-Za-z0-9.]+", "-", self.config.env.id.split(":")[-1]).strip("-")
        return f"{env}-seed{self.seed}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    @property
    def label(self) -> str:
        """Text that identifies the job in tables."""
        return f"{self.name} seed {self.seed}" if self.name else self.folder_name


@dataclass
class Outcome:
    """A job with its run folder and its state."""

    job: Job
    folder: Path
    """Run folder; ``log.txt`` in it holds the output of the run."""
    status: Status = "waiting"
    """State of the job."""
    starts: int = 0
    """Number of times that this call started the job; 0 if it was done before."""
    error: str = ""
    """Reason of the last failure: last printed line and exit code."""

    @property
    def command(self) -> list[str]:
        """Arguments of ``anybatch`` that train the run, resume it, or return at once if it is done."""
        file = str(self.folder / JOB)
        # the grid has been given this code; the user's key may be missing on another machine
        trust = ["--trust-code"] if code_named(self.job.config) else []
        return ["train", file, "--seed", str(self.job.seed), "--out", str(self.folder), "--go-on", "--quiet", *trust]


@dataclass(frozen=True)
class GridResult:
    """Outcomes of a grid."""

    outcomes: list[Outcome] = field(default_factory=list)
    """One per distinct job, in the order of the list."""

    @property
    def exit_code(self) -> int:
        """0 if all jobs are done, 1 if some failed or diverged, 130 if some were interrupted."""
        statuses = {outcome.status for outcome in self.outcomes}
        return FAILED if statuses.intersection(UNSUCCESSFUL) else INTERRUPTED if statuses - {"done"} else DONE
