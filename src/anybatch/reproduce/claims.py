"""Claims of the paper that a suite's results can support: each with its numbers, and whether it holds."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from anybatch.reproduce.figures import adam_betas, head_to_head, staleness
from anybatch.reproduce.figures.tests_table import effect_table
from anybatch.reproduce.finals import batch_gap, difference, threshold
from anybatch.reproduce.results import Results, ResultsFolder, read_results
from anybatch.reproduce.statistics import Effect
from anybatch.reproduce.style import LABELS
from anybatch.reproduce.suites.ladder import ladder_tasks
from anybatch.reproduce.suites.suite import Suite

MAX_TASK_GAP, MAX_MEAN_GAP = 0.05, 0.02
"""Largest difference in final return between the largest and the smallest batch."""


class Claim(NamedTuple):
    """A statement with its numbers, and whether the results support it."""

    text: str
    holds: bool


def claims(suite: Suite, results: Mapping[str, Results]) -> list[Claim]:
    """All claims that can be judged from the given results by figure."""
    judged: list[Claim] = []
    for figures, judge in _CLAIMS:
        if all(name in results for name in figures):
            judged += judge(suite, functools.reduce(operator.or_, (results[name] for name in figures)))
    return judged


def claims_of(suite: Suite, folder: ResultsFolder) -> list[Claim]:
    """The claims that the tables in a folder support."""
    tables = {name for figures, _ in _CLAIMS for name in figures if folder.table(name).exists()}
    return claims(suite, {name: read_results(folder.table(name)) for name in tables})


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
    effects, hypotheses, needed = effect_table(suite, results)
    for variant, by_divisor in effects.items():
        divisor = max(by_divisor, key=lambda c: by_divisor[c].z)
        test = by_divisor[divisor]
        yield Claim(
            f"{LABELS[variant]}: significantly worse than all adjustments (p < 0.001; effect with "
            f"{suite.batch_label(divisor)}: {_numbers(test, needed)} for {hypotheses} hypotheses)",
            test.z > needed,
        )


def _staleness_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks, delay = staleness.FIGURE.tasks(suite), suite.delays[-1]
    for other in ("recent", "behavior"):
        test = difference(suite, results, ("decoupled", delay), (other, delay), tasks)
        text = f"at a delay of {delay} iterations the decoupled objective is significantly better than {LABELS[other]}"
        yield _better(text, test, threshold(2))


def _ewma_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    for ours, baseline in head_to_head.PAIRS:
        test = difference(suite, results, (ours, 1), (baseline, 1), head_to_head.FIGURE.tasks(suite))
        text = f"{LABELS[ours]} is significantly better than {LABELS[baseline]}"
        yield _better(text, test, threshold(len(head_to_head.PAIRS)))


def _better(text: str, test: Effect, needed: float) -> Claim:
    return Claim(f"{text} (p < 0.001; {_numbers(test, needed)})", test.z > needed)


def _betas_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    smallest, needed = suite.divisors[-1], threshold(len(adam_betas.VARIANTS), two_tailed=True)
    for variant in adam_betas.VARIANTS:
        test = difference(suite, results, (variant, smallest), ("all", smallest), adam_betas.FIGURE.tasks(suite))
        text = f"{LABELS[variant]}: no significant difference with {suite.batch_label(smallest)}"
        yield Claim(f"{text} (two-tailed p ≥ 0.001; {_numbers(test, needed)})", abs(test.z) <= needed)


def _numbers(test: Effect, needed: float) -> str:
    return f"{test.size:+.3f}, Z = {test.z:.2f}, needed {needed:.2f}"


_CLAIMS: tuple[tuple[tuple[str, ...], Callable[[Suite, Results], Iterator[Claim]]], ...] = (
    (("invariance",), _gap_claims),
    (("invariance", "linear-step"), _ablation_claims),
    (("staleness",), _staleness_claims),
    (("head-to-head",), _ewma_claims),
    (("invariance", "adam-betas"), _betas_claims),
)
"""Figures whose results are needed, and the function that judges the claims about them."""
