"""Claims of the paper that a suite's results can support: each with its numbers, and whether it holds."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from anybatch.reproduce.comparisons import (
    DIFFERENCE_LEVEL,
    EQUIVALENCE_LEVEL,
    MEAN,
    MEAN_MARGIN,
    TASK_MARGIN,
    ablations,
    all_adjustments,
    different,
    equivalent,
    measures,
    select,
    tasks_of,
)
from anybatch.reproduce.figures import adam_betas, head_to_head, staleness
from anybatch.reproduce.figures.equivalence import NAMES, signs, verdicts, with_interval
from anybatch.reproduce.figures.tests_table import effect_table
from anybatch.reproduce.finals import difference, final_returns, reachable_z, threshold
from anybatch.reproduce.results import Results, ResultsFolder, read_results
from anybatch.reproduce.statistics import Effect
from anybatch.reproduce.style import LABELS
from anybatch.reproduce.suites.suite import Suite


class Claim(NamedTuple):
    """A statement with its numbers, and whether the results support it."""

    text: str
    holds: bool


def claims(suite: Suite, results: Mapping[str, Results]) -> list[Claim]:
    """All claims that can be judged from the given results by figure."""
    judged: list[Claim] = []
    for figures, if_trained, judge in _CLAIMS:
        if all(name in results for name in figures):
            chosen = [name for name in (*figures, *if_trained) if name in results]
            judged += judge(suite, functools.reduce(operator.or_, (results[name] for name in chosen)))
    return judged


def claims_of(suite: Suite, folder: ResultsFolder) -> list[Claim]:
    """The claims that the tables in a folder support."""
    named = {name for figures, if_trained, _ in _CLAIMS for name in (*figures, *if_trained)}
    tables = {name for name in named if folder.table(name).exists()}
    return claims(suite, {name: read_results(folder.table(name)) for name in tables})


def as_markdown(judged: list[Claim]) -> str:
    """A list with one line per claim."""
    return "\n".join(f"- {'holds' if claim.holds else 'does not hold'}: {claim.text}" for claim in judged) + "\n"


def _equivalence_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    compared, default = all_adjustments(suite, results), suite.batch_label(1)
    mean = [one for one in compared if one.task == MEAN]
    by_task = [one for one in compared if one.task != MEAN]
    flags = equivalent(mean)
    for divisor in suite.divisors[1:]:
        chosen = list(select(mean, flags, divisor=divisor))
        texts = [f"{NAMES[one.measure]} {with_interval(one)}" for one, _ in chosen]
        yield Claim(
            f"with all adjustments, {suite.batch_label(divisor)} and {default} are equivalent in the mean over tasks, "
            f"within ±{MEAN_MARGIN} (difference in {', in '.join(texts)}; p < {EQUIVALENCE_LEVEL} after Holm's "
            f"correction for {len(mean)} tests)",
            all(flag for _, flag in chosen),
        )
    words, few = verdicts(by_task), "" if all(one.difference.decides for one in compared) else "; one seed shows none"
    same = sum("equivalent" in word for word in words)
    apart = list(zip(compared, different(compared), strict=True))
    yield Claim(
        f"and on every task within ±{TASK_MARGIN} (shown for {same} of {len(words)} differences in "
        f"{' and '.join(NAMES[x] for x in measures(suite))}; {words.count('undecided')} are undecided)",
        same == len(words),
    )
    yield Claim(
        f"with all adjustments, no batch size is significantly different from {default} in the mean over tasks or on "
        f"any task (two-sided p < {DIFFERENCE_LEVEL} after Holm's correction for {len(compared)} tests on: "
        f"{signs(suite, apart)}{few})",
        all(one.difference.decides and not flag for one, flag in apart),
    )


def _invariance_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    """Each ablation is not invariant: at some batch it differs from the default one, in either direction."""
    family = ablations(suite, results)
    flags = different(family)
    for variant in dict.fromkeys(one.variant for one in family):
        divisor = suite.ablated[-1]
        chosen = list(select(family, flags, variant=variant, divisor=divisor))
        sizes = [f"{NAMES[one.measure]} {one.difference.size:+.3f}" for one, _ in chosen if one.task == MEAN]
        reference = suite.batch_label(1) + (" without EWMA" if variant == "no-ewma" else "")
        yield Claim(
            f"{LABELS[variant]}: with {suite.batch_label(divisor)} {' and '.join(sizes)} compared with "
            f"{reference}, in the mean over tasks; a significant difference (two-sided p < "
            f"{DIFFERENCE_LEVEL} after Holm's correction for {len(family)} tests) on: {signs(suite, chosen)}",
            any(flag for _, flag in chosen),
        )


def _ablation_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    effects, hypotheses, needed = effect_table(suite, results)
    for variant, by_divisor in effects.items():
        divisor = max(by_divisor, key=lambda c: by_divisor[c].z)
        test, tasks = by_divisor[divisor], tasks_of(suite, variant)
        ends = (final_returns(suite, results, name, divisor, tasks).mean() for name in (variant, "all"))
        ablated, adjusted = (f"{end:.3f}" for end in ends)
        most = reachable_z(results, (variant, tasks[0], divisor), ("all", tasks[0], divisor), tasks)
        yield Claim(
            f"{LABELS[variant]}: with {suite.batch_label(divisor)} the final return is {ablated}, with all adjustments "
            f"{adjusted}; significantly worse (one-tailed p < 0.001; additional loss since {suite.batch_label(1)}: "
            f"{_numbers(test, needed, most)} for {hypotheses} hypotheses)",
            test.z > needed,
        )


def _staleness_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks, delay = staleness.FIGURE.tasks(suite), suite.delays[-1]
    for other in ("recent", "behavior"):
        test = difference(suite, results, ("decoupled", delay), (other, delay), tasks)
        text = f"at a delay of {delay} iterations the decoupled objective is significantly better than {LABELS[other]}"
        most = reachable_z(results, ("decoupled", tasks[0], delay), (other, tasks[0], delay), tasks)
        yield _better(text, test, threshold(2), most)


def _ewma_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    tasks = head_to_head.FIGURE.tasks(suite)
    for ours, baseline in head_to_head.PAIRS:
        test = difference(suite, results, (ours, 1), (baseline, 1), tasks)
        text = f"{LABELS[ours]} is significantly better than {LABELS[baseline]}"
        most = reachable_z(results, (ours, tasks[0], 1), (baseline, tasks[0], 1), tasks)
        yield _better(text, test, threshold(len(head_to_head.PAIRS)), most)


def _better(text: str, test: Effect, needed: float, most: float) -> Claim:
    return Claim(f"{text} (p < 0.001; {_numbers(test, needed, most)})", test.z > needed)


def _betas_claims(suite: Suite, results: Results) -> Iterator[Claim]:
    smallest, needed = suite.divisors[-1], threshold(len(adam_betas.VARIANTS), two_tailed=True)
    tasks = adam_betas.FIGURE.tasks(suite)
    for variant in adam_betas.VARIANTS:
        test = difference(suite, results, (variant, smallest), ("all", smallest), tasks)
        text = f"{LABELS[variant]}: no significant difference with {suite.batch_label(smallest)}"
        most = reachable_z(results, (variant, tasks[0], smallest), ("all", tasks[0], smallest), tasks)
        holds = abs(test.z) <= needed < most  # with too few seeds any results would do
        yield Claim(f"{text} (two-tailed p ≥ 0.001; {_numbers(test, needed, most)})", holds)


def _numbers(test: Effect, needed: float, most: float) -> str:
    few = "" if most > needed else f" (at most {most:.2f} with so few seeds)"
    return f"{test.size:+.3f}, Z = {test.z:.2f}, needed {needed:.2f}{few}"


_CLAIMS: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[Suite, Results], Iterator[Claim]]], ...] = (
    (("invariance",), (), _equivalence_claims),
    (("invariance",), ("linear-step",), _invariance_claims),
    (("invariance", "linear-step"), (), _ablation_claims),
    (("staleness",), (), _staleness_claims),
    (("head-to-head",), (), _ewma_claims),
    (("invariance", "adam-betas"), (), _betas_claims),
)
"""Figures whose results are needed, those whose results are judged too if they are there, and the judging function."""
