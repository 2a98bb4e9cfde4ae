"""The command ``anybatch``."""

from __future__ import annotations

from anybatch.cli.main import main

__all__ = ["main"]
