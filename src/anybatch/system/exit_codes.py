"""Exit codes of the command ``anybatch``."""

from __future__ import annotations

DONE = 0
FAILED = 1
BAD_INPUT = 2
"""A setting, argument, file or folder is wrong; the same command fails again."""
INTERRUPTED = 130
"""A run was asked to stop, and can be resumed."""
