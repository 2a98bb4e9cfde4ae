"""Grids: many runs from a list, in local processes, on Ray, or as shell commands for a queue."""

from anybatch.grid.grid_file import read_grid
from anybatch.grid.job import GridResult, Job, Outcome
from anybatch.grid.runner import plan, run_grid

__all__ = ["GridResult", "Job", "Outcome", "plan", "read_grid", "run_grid"]
