"""Tests of equivalence and difference over made-up results: they hold where they should, and fail where they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from anybatch.presets import ppo_ewma
from anybatch.reproduce.claims import claims
from anybatch.reproduce.comparisons import (
    MEAN,
    ablations,
    all_adjustments,
    compare,
    different,
    equivalent,
    next_larger,
    select,
)
from anybatch.reproduce.figures.equivalence import FIGURE, verdicts
from anybatch.reproduce.registry import SUITES
from anybatch.reproduce.results import Curve, Key, Results
from anybatch.reproduce.statistics import Array, time_to
from anybatch.reproduce.suites.suite import Suite

POINTS = 4


def made_up(**heights: float) -> tuple[Suite, Results]:
    """Two tasks with returns from 0 to 1, batches of 64 and 16 environments, 12 seeds.

    Curves rise from 0 to 1 within the first points; ``heights`` shifts those of a variant at the smaller batch, of the
    task "slow" alone. Seeds differ by up to 0.01.
    """
    tasks = ("quick", "slow")
    suite = replace(
        SUITES["ladder", "quick"](),
        labels={"quick": "Quick", "slow": "Slow"},
        ranges=dict.fromkeys(tasks, (0.0, 1.0)),
        invariance={task: ppo_ewma(num_envs=64) for task in tasks},
        divisors=(1, 4),
        ablation_divisors=(4,),
        points=POINTS,
        final_points=1,
    )
    curves: dict[Key, Curve] = {}
    seeds = tuple(range(12))
    spread = np.linspace(-0.005, 0.005, 12)[:, None]
    for variant, divisor in (("all", 1), ("all", 4), ("no-adam-step", 4), ("no-ewma", 1), ("no-ewma", 4)):
        for task in tasks:
            shift = heights.get(variant.replace("-", "_"), 0.0) if (task, divisor) == ("slow", 4) else 0.0
            values: Array = np.array([[0.0, 0.5, 1.0, 1.0]]) + spread + shift
            curves[variant, task, divisor] = Curve(seeds, 100, values, (False,) * 12)
    return suite, Results(curves)


def test_a_comparison_by_hand() -> None:
    suite, results = made_up(all=-0.04)
    compared = compare(suite, results, "all", 4)
    sizes = {(one.measure, one.task): one.difference.size for one in compared}
    # on one of two tasks every point is lower by 0.04: half of that in the mean
    assert sizes == pytest.approx(
        {
            ("area", MEAN): -0.02,
            ("area", "quick"): 0,
            ("area", "slow"): -0.04,
            ("final", MEAN): -0.02,
            ("final", "quick"): 0,
            ("final", "slow"): -0.04,
        },
        abs=1e-12,
    )
    # the spread of 12 seeds: n / (n - 1) * 0.01^2 * (n + 1) / (12 (n - 1)); in the mean, half of that of a task
    variance = 12 / 11 * 0.01**2 * 13 / (12 * 11)
    assert compared[1].difference.error == pytest.approx(np.sqrt(2 * variance / 12))
    assert compared[0].difference.error == pytest.approx(np.sqrt(4 * variance / 12) / 2)


def test_a_lag_of_the_default_batch_alone_is_in_the_first_comparison_with_the_next_larger_alone() -> None:
    suite, results = made_up(all=0.1)  # the smaller batch is ahead by 0.1 on one of two tasks
    again = {("all", task, 16): results["all", task, 4] for task in suite.invariance}  # a third batch like the second
    family = next_larger(replace(suite, divisors=(1, 4, 16)), results | Results(again))
    areas = [(one.divisor, one.difference.size) for one, _ in select(family, family, measure="area")]
    assert areas == [(4, pytest.approx(0.05)), (16, pytest.approx(0.0))]


def test_equivalence_fails_beyond_the_margin_and_without_enough_seeds() -> None:
    suite, results = made_up()
    compared = all_adjustments(suite, results)
    assert all(equivalent(compared)) and not any(different(compared))
    suite, results = made_up(all=-0.1)
    compared = all_adjustments(suite, results)
    # -0.1 on the slow task is -0.05 in the mean
    assert [flag for _, flag in select(compared, equivalent(compared), measure="area")] == [False, True, False]
    assert [word for _, word in select(compared, verdicts(compared), measure="area")] == [
        "different",
        "equivalent",
        "different",
    ]
    few = Results(
        {key: replace(c, seeds=(1,), values=c.values[:1], diverged=(False,)) for key, c in results.curves.items()}
    )
    assert set(verdicts(all_adjustments(suite, few))) == {"undecided"}
    judged = claims(suite, {"invariance": few, "linear-step": Results()})
    assert not any(claim.holds for claim in judged) and "nan" not in judged[0].text


def test_an_ablation_that_learns_faster_is_not_invariant_either() -> None:
    for height in (-0.2, 0.2):
        suite, results = made_up(no_adam_step=height)
        family = ablations(suite, results)
        flags = different(family)
        assert {one.variant for one in family} == {"no-adam-step", "no-ewma"}
        assert {one.task for one, flag in select(family, flags, variant="no-adam-step") if flag} == {MEAN, "slow"}
        assert not any(flag for _, flag in select(family, flags, variant="no-ewma"))


def test_claims_hold_and_fail() -> None:
    suite, results = made_up(no_adam_step=-0.3)
    judged = claims(suite, {"invariance": results, "linear-step": Results()})
    verdict = {claim.text.split(":")[0].split(" (")[0]: claim.holds for claim in judged[:5]}
    assert list(verdict.values()) == [True, True, True, True, False], judged
    assert "(a) step size not adjusted" in judged[3].text and "Slow (lower)" in judged[3].text
    assert "area -0.150" in judged[3].text
    assert "compared with 64 environments without EWMA, in" in judged[4].text
    suite, results = made_up(all=-0.3)
    judged = claims(suite, {"invariance": results, "linear-step": Results()})
    assert [claim.holds for claim in judged[:3]] == [False, False, False]
    assert "tests on: the mean (lower), Slow (lower))" in judged[2].text


def test_tables_and_picture(tmp_path) -> None:
    suite, results = made_up(no_adam_step=-0.3)
    text = "\n".join(FIGURE.summary(suite, results))
    assert "| (a) step size not adjusted, 16 environments |" in text and "equivalent" in text
    (path,) = FIGURE.draw(suite, results, tmp_path)
    assert path.stat().st_size > 10_000


def test_time_to_a_level_by_hand() -> None:
    # from 0.2 after half of training to 0.6 after three quarters: 0.5 is three quarters of the way
    assert time_to([0.0, 0.2, 0.6, 1.0], 0.5) == pytest.approx(0.5 + 0.25 * 0.75)
    assert time_to([0.7, 0.2], 0.5) == 0.5 and np.isnan(time_to([0.1, 0.2], 0.5))
