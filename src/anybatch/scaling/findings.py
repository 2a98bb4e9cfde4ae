"""Result of a check, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of advice: an observation, its meaning, and what to change."""

    check: str
    """Name of the check; live warnings appear once per name and run."""
    severity: Literal["ok", "warning", "error"]
    """Severity: ok, warning or error."""
    seen: str
    """Observation, with numbers."""
    means: str
    """Meaning of the observation."""
    change: str
    """Advice; empty if all is well."""

    def __str__(self) -> str:
        advice = f"; {self.change}" if self.change else ""
        return f"{self.severity}: {self.seen}: {self.means}{advice}"
