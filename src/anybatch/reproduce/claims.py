"""What a suite's results show of the paper, each claim with the number that it rests on, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anybatch.reproduce.figures import adam_betas, head_to_head, tests_table
from anybatch.reproduce.figures.invariance import batch_label
from anybatch.reproduce.finals import direct, final, gap
from anybatch.reproduce.results import Results, read_results
from anybatch.reproduce.run import Place
from anybatch.reproduce.statistics import bonferroni_threshold, van_elteren
from anybatch.reproduce.style import PLAIN
from anybatch.reproduce.suites.suite import Suite

GAP_OF_A_TASK, GAP_IN_THE_MEAN = 0.05, 0.02
"""How far apart the largest and the smallest batch may end."""
_TWO_TAILED = 0.001 / 2


class Claim(NamedTuple):
    """A statement, with its numbers, and whether the results bear it out."""

    text: str
    holds: bool


def claims(suite: Suite, results: Mapping[str, Results]) -> list[Claim]:
    """All claims that can be judged from the figures at hand.

    Args:
        suite: that the results belong to.
        results: a figure's own results by its name; figures that are missing make no claims.
    """
    found: list[Claim] = []
    if "invariance" in results:
        found += _gaps(suite, results["invariance"])
    if "invariance" in results and "linear-step" in results:
        found += _told_apart(suite, results["invariance"].joined(results["linear-step"]))
    if "staleness" in results:
        found += _staleness(suite, results["staleness"])
    if "head-to-head" in results:
        found += _ewma(suite, results["head-to-head"])
    if "invariance" in results and "adam-betas" in results:
        found += _betas(suite, results["invariance"].joined(results["adam-betas"]))
    return found


def claims_of(suite: Suite, place: Place) -> list[Claim]:
    """The claims that the tables in a folder of results bear on."""
    names = ("invariance", "linear-step", "staleness", "head-to-head", "adam-betas")
    return claims(suite, {name: read_results(place.table(name)) for name in names if place.table(name).exists()})


def write_claims(suite: Suite, place: Place) -> Path:
    """Write ``claims.md`` beside the tables."""
    path = place.folder / "claims.md"
    path.write_text(as_markdown(claims_of(suite, place)))
    return path


def as_markdown(found: list[Claim]) -> str:
    """A list, a line for each claim."""
    return "\n".join(f"- {'holds' if claim.holds else 'does not hold'}: {claim.text}" for claim in found) + "\n"


def _gaps(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks = tuple(suite.invariance)
    by_task, mean, _ = gap(suite, results, "all", tasks)
    worst = int(np.abs(by_task).argmax())
    ends = f"default and {batch_label(suite.divisors[-1])}"
    yield Claim(
        f"with all adjustments the final returns at {ends} differ by at most {GAP_OF_A_TASK} on every task (most: "
        f"{by_task[worst]:+.3f} on {suite.labels[tasks[worst]]})",
        bool(np.abs(by_task).max() <= GAP_OF_A_TASK),
    )
    yield Claim(f"and by at most {GAP_IN_THE_MEAN} in the mean ({mean:+.3f})", abs(mean) <= GAP_IN_THE_MEAN)


def _told_apart(suite: Suite, results: Results) -> Iterator[Claim]:
    effects, threshold, hypotheses = tests_table.table(suite, results)
    for variant in dict.fromkeys(variant for variant, _ in effects):
        divisor = max(suite.divisors[1:], key=lambda c: effects[variant, c].z)
        size, z, _ = effects[variant, divisor]
        yield Claim(
            f"{PLAIN[variant]} is told apart from all adjustments at 0.1% (most at {batch_label(divisor)}: effect "
            f"{size:+.3f}, Z = {z:.2f}, needed {threshold:.2f} for {hypotheses} hypotheses)",
            z > threshold,
        )


def _staleness(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks, largest = tuple(suite.staleness), suite.delays[-1]
    threshold = bonferroni_threshold(0.001, 2)
    for other, words in (("recent", "π_recent as the old policy"), ("behavior", "π_behav as the old policy")):
        size, z, _ = direct(suite, results, ("decoupled", largest), (other, largest), tasks)
        yield Claim(
            f"at a delay of {largest} iterations the decoupled objective ends above {words} at 0.1% ({size:+.3f}, "
            f"Z = {z:.2f}, needed {threshold:.2f})",
            z > threshold,
        )


def _ewma(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks = tuple(next(iter(suite.algorithms.values())))
    threshold = bonferroni_threshold(0.001, len(head_to_head.PAIRS))
    for ours, baseline in head_to_head.PAIRS:
        size, z, _ = direct(suite, results, (ours, 1), (baseline, 1), tasks)
        yield Claim(
            f"{PLAIN[ours]} ends above {PLAIN[baseline]} at 0.1% ({size:+.3f}, Z = {z:.2f}, needed {threshold:.2f})",
            z > threshold,
        )


def _betas(suite: Suite, results: Results) -> Iterator[Claim]:
    smallest = suite.divisors[-1]
    threshold = bonferroni_threshold(_TWO_TAILED, len(adam_betas.VARIANTS))
    plain = final(suite, results, "all", smallest, suite.betas)
    for variant in adam_betas.VARIANTS:
        values = final(suite, results, variant, smallest, suite.betas)
        z = van_elteren(values, plain).z
        yield Claim(
            f"{PLAIN[variant]} changes nothing at {batch_label(smallest)} that can be told apart at 0.1%, two-tailed "
            f"({values.mean() - plain.mean():+.3f}, Z = {z:.2f}, needed {threshold:.2f})",
            abs(z) <= threshold,
        )
