"""What a check has found, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of advice: what was seen, what it means, what to change."""

    check: str
    """Name of the check; live warnings appear once per name and run."""
    severity: Literal["ok", "warning", "error"]
    """How bad it is: ok, warning or error."""
    seen: str
    """What was seen, with numbers."""
    means: str
    """What it means."""
    change: str
    """What to change; empty where all is well."""

    def __str__(self) -> str:
        advice = f"; {self.change}" if self.change else ""
        return f"{self.severity}: {self.seen}: {self.means}{advice}"
