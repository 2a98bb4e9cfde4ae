"""One environment with the phase length of PPG-EWMA adjusted and not, from results/laptop-phase-length.

    python benchmarks/phase_length.py

Both groups have one environment, so an episode counts at the same time in both, and their curves can be compared from
the beginning.
"""

from __future__ import annotations

import math
from pathlib import Path

from anybatch.reproduce.finals import ablation_effect, normalized_curves
from anybatch.reproduce.results import read_results
from anybatch.reproduce.statistics import mean_difference, van_elteren
from anybatch.reproduce.suites.laptop import laptop
from anybatch.reproduce.tables import interval, markdown, p_value

STORED = Path(__file__).parents[1] / "results" / "laptop-phase-length" / "invariance.csv.gz"
FAILED = 0.9


def main() -> None:
    suite, results = laptop(), read_results(STORED)
    adjusted, constant = (
        normalized_curves(suite, results, (variant, "catch-ppg", suite.divisors[-1]))
        for variant in ("all", "no-policy-iterations")
    )
    parts = {"first quarter of the run": slice(suite.points // 4), "final": slice(-suite.final_points, None)}
    rows = []
    for label, part in parts.items():
        a, b = (curves[:, part].mean(1, keepdims=True) for curves in (constant, adjusted))
        gap, z = mean_difference(a, b), van_elteren(a, b).z
        p = p_value(math.erfc(abs(z) / math.sqrt(2)))
        bounds = interval(*gap.interval(0.95))
        rows.append([label, f"{b.mean():.3f}", f"{a.mean():.3f}", f"{gap.size:+.3f}", bounds, f"{z:.2f}", p])
    print(markdown(["return", "adjusted", "not adjusted", "difference", "95% interval", "Z", "two-sided p"], rows))
    failed, kept = ((curves[:, -suite.final_points :].mean(1) < FAILED).sum() for curves in (constant, adjusted))
    print(
        f"\nRuns that end below {FAILED}: {kept} of {len(adjusted)} adjusted, {failed} of {len(constant)} not adjusted."
    )
    effect = ablation_effect(suite, results, "no-policy-iterations", suite.divisors[-1], ["catch-ppg"])
    print(f"Additional loss since 64 environments: {effect.size:+.3f}, Z = {effect.z:.2f}.")


if __name__ == "__main__":
    main()
