"""Claims of the paper that a suite's results can support: each with its numbers, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from anybatch.reproduce.figures.adam_betas import VARIANTS, betas_tasks
from anybatch.reproduce.figures.head_to_head import PAIRS, algorithm_tasks
from anybatch.reproduce.figures.staleness import staleness_tasks
from anybatch.reproduce.figures.tests_table import effect_table
from anybatch.reproduce.finals import batch_gap, difference, threshold
from anybatch.reproduce.results import Results, ResultsFolder, read_results
from anybatch.reproduce.style import LABELS
from anybatch.reproduce.suites.ladder import ladder_tasks
from anybatch.reproduce.suites.suite import Suite

MAX_TASK_GAP, MAX_MEAN_GAP = 0.05, 0.02
"""Largest difference in final return between the largest and the smallest batch."""

_TABLES = ("invariance", "linear-step", "staleness", "head-to-head", "adam-betas")


class Claim(NamedTuple):
    """A statement with its numbers, and whether the results support it."""

    text: str
    holds: bool


def claims(suite: Suite, results: Mapping[str, Results]) -> list[Claim]:
    """All claims that can be judged from the given tables.

    Args:
        suite: suite of the results.
        results: results by figure; missing figures make no claims.
    """
    judged: list[Claim] = []
    if "invariance" in results:
        judged += _gap_claims(suite, results["invariance"])
    if "invariance" in results and "linear-step" in results:
        judged += _ablation_claims(suite, results["invariance"] | results["linear-step"])
    if "staleness" in results:
        judged += _staleness_claims(suite, results["staleness"])
    if "head-to-head" in results:
        judged += _ewma_claims(suite, results["head-to-head"])
    if "invariance" in results and "adam-betas" in results:
        judged += _betas_claims(suite, results["invariance"] | results["adam-betas"])
    return judged


def claims_of(suite: Suite, folder: ResultsFolder) -> list[Claim]:
    """The claims that the tables in a folder support."""
    return claims(suite, {name: read_results(folder.table(name)) for name in _TABLES if folder.table(name).exists()})


def as_markdown(judged: list[Claim]) -> str:
    """A list with one line per claim."""
    return "\n".join(f"- {'holds' if claim.holds else 'does not hold'}: {claim.text}" for claim in judged) + "\n"


def _gap_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks = ladder_tasks(suite)
    by_task, mean, _ = batch_gap(suite, results, "all", tasks)
    worst = int(np.abs(by_task).argmax())
    default, smallest = (suite.batch_label(c) for c in (1, suite.divisors[-1]))
    yield Claim(
        f"with all adjustments, the final returns with {default} and with {smallest} differ by at most {MAX_TASK_GAP} "
        f"on every task (largest difference: {by_task[worst]:+.3f} on {suite.labels[tasks[worst]]})",
        bool(np.abs(by_task).max() <= MAX_TASK_GAP),
    )
    yield Claim(f"and by at most {MAX_MEAN_GAP} on average ({mean:+.3f})", abs(mean) <= MAX_MEAN_GAP)


def _ablation_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    effects, needed, hypotheses = effect_table(suite, results)
    for variant, by_divisor in effects.items():
        divisor = max(by_divisor, key=lambda c: by_divisor[c].z)
        size, z, _ = by_divisor[divisor]
        yield Claim(
            f"{LABELS[variant]}: significantly worse than all adjustments (p < 0.001; with "
            f"{suite.batch_label(divisor)} effect {_test(size, z, needed)} for {hypotheses} hypotheses)",
            z > needed,
        )


def _staleness_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks, largest = staleness_tasks(suite), suite.delays[-1]
    for other in ("recent", "behavior"):
        size, z, _ = difference(suite, results, ("decoupled", largest), (other, largest), tasks)
        yield Claim(
            f"at a delay of {largest} iterations the decoupled objective is significantly better than "
            f"{LABELS[other]} (p < 0.001; {_test(size, z, threshold(2))})",
            z > threshold(2),
        )


def _ewma_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    needed = threshold(len(PAIRS))
    for ours, baseline in PAIRS:
        size, z, _ = difference(suite, results, (ours, 1), (baseline, 1), algorithm_tasks(suite))
        yield Claim(
            f"{LABELS[ours]} is significantly better than {LABELS[baseline]} (p < 0.001; {_test(size, z, needed)})",
            z > needed,
        )


def _betas_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    smallest, needed = suite.divisors[-1], threshold(len(VARIANTS), two_tailed=True)
    for variant in VARIANTS:
        size, z, _ = difference(suite, results, (variant, smallest), ("all", smallest), betas_tasks(suite))
        yield Claim(
            f"{LABELS[variant]}: no significant difference with {suite.batch_label(smallest)} (two-tailed p ≥ 0.001; "
            f"{_test(size, z, needed)})",
            abs(z) <= needed,
        )


def _test(size: float, z: float, needed: float) -> str:
    return f"{size:+.3f}, Z = {z:.2f}, needed {needed:.2f}"
