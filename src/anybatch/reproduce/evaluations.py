"""When the policies of a run are evaluated; without PyTorch, because suites are listed without it."""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.config.validation import check_integer


@dataclass(frozen=True)
class Evaluations:
    """Points of training at which policies are evaluated, and episodes for each."""

    points: int
    """Evaluations in equal intervals of environment steps, the last one at the end; one more precedes training."""
    episodes: int
    """Episodes of each evaluation."""

    def __post_init__(self) -> None:
        for name, number in (("points", self.points), ("episodes", self.episodes)):
            check_integer(f"evaluations.{name}", number, at_least=1)
