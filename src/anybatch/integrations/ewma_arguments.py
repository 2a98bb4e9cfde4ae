"""Checks of the arguments that the PPO-EWMA classes of other libraries share."""

from __future__ import annotations

from anybatch.config.validation import check_number
from anybatch.errors import ConfigError


def check_ewma_arguments(center_of_mass: float | None, advantage_span: float, max_importance_ratio: float) -> None:
    """Raise a ConfigError for an argument that is out of range; a ``center_of_mass`` of None means no average."""
    if center_of_mass is not None:
        check_number("center_of_mass", center_of_mass, of="gradient steps", at_least=0)
    if center_of_mass == 0:
        raise ConfigError(
            "center_of_mass is 0, so the proximal policy would be the policy itself and limit nothing; set a number "
            "above 0, or None"
        )
    check_number("advantage_span", advantage_span, of="iterations", at_least=1)
    if not max_importance_ratio >= 1:
        raise ConfigError(f"max_importance_ratio is {max_importance_ratio}, but must be at least 1")
