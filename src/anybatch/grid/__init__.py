"""Lists of runs, executed in local processes, on Ray, or as commands for a queue."""

from __future__ import annotations

from anybatch.grid.file import read_grid
from anybatch.grid.runner import GridResult, Job, Outcome, plan, run_grid

__all__ = [
    "GridResult",
    "Job",
    "Outcome",
    "plan",
    "read_grid",
    "run_grid",
]
