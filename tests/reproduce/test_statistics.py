"""The statistics of the paper: hand-worked strata, scipy, the paper's own Z values, and what holds for any data."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats

from anybatch.reproduce import van_elteren
from anybatch.reproduce.statistics import (
    band,
    bonferroni_threshold,
    bootstrap_interval,
    difference_of_differences,
    difference_with_error,
    holm,
    largest_z,
    mean_difference,
    normalized,
    probability_of_improvement,
    student_quantile,
    student_tail,
)

Array = NDArray[np.float64]

# Appendix E: batch sizes default / 4, 16, 64, 256 by ablations (a) to (d)
PAPER_Z = (5.02, -1.53, 4.58, 3.27, 7.31, -1.53, 4.47, 4.04, 6.98, -0.11, 5.02, 5.13, 6.87, 4.47, 4.80, 4.58)


@st.composite
def samples(draw: st.DrawFn, max_strata: int = 4) -> tuple[Array, Array]:
    """a (n, strata) and b (m, strata) of small whole numbers, so that ties are common."""
    strata = draw(st.integers(1, max_strata))
    numbers = st.integers(-4, 4).map(float)
    a, b = (draw(hnp.arrays(float, (draw(st.integers(1, 5)), strata), elements=numbers)) for _ in range(2))
    return a, b


# ---------------------------------------------------------------- van Elteren's test


def test_one_stratum_by_hand() -> None:
    # a = 3 1 4 against b = 2 0: 3 beats both, 1 beats one, 4 beats both, so U = 5; mean 3 * 2 / 2 = 3;
    # variance 3 * 2 * (5 + 1) / 12 = 3; z = (5 - 3) / sqrt(3) = 1.1547
    z, p = van_elteren([[3], [1], [4]], [[2], [0]])
    assert z == pytest.approx(2 / math.sqrt(3)) == pytest.approx(1.1547, abs=1e-4)
    assert p == pytest.approx(0.1241, abs=1e-4)  # a table of the normal distribution at 1.1547


def test_two_strata_by_hand_one_of_them_with_ties() -> None:
    # first stratum as above: U - mean = 2, variance 3
    # a = 1 2 2 against b = 2 1: 1 gets 0 + 1/2, each 2 gets 1/2 + 1, so U = 3.5 and U - mean = 0.5; two 1s and three
    # 2s are tied, sum(t^3 - t) = 6 + 24 = 30; variance 6 / 12 * (6 - 30 / (5 * 4)) = 2.25
    # z = (2 + 0.5) / sqrt(3 + 2.25) = 1.0911
    a, b = [[3, 1], [1, 2], [4, 2]], [[2, 2], [0, 1]]
    assert van_elteren(a, b).z == pytest.approx(2.5 / math.sqrt(5.25)) == pytest.approx(1.0911, abs=1e-4)


def test_a_stratum_of_ties_adds_nothing() -> None:
    a, b = np.array([[3.0], [1.0], [4.0]]), np.array([[2.0], [0.0]])
    assert van_elteren(np.hstack([a, a * 0 + 7]), np.hstack([b, b * 0 + 7])) == van_elteren(a, b)


def test_nothing_but_ties_is_no_evidence() -> None:
    assert van_elteren(np.ones((3, 16)), np.ones((4, 16))) == (0.0, 0.5)


def untied(total: int) -> tuple[Array, Array]:
    """3 against 3 seeds in 16 strata whose U values sum to `total`, from 0 to 144."""
    by_u = {sum(positions) - 3: positions for positions in combinations(range(6), 3)}  # 0 + 1 + 2 = 3 is the least
    each, more = divmod(total, 16)
    a = [by_u[each + (stratum < more)] for stratum in range(16)]
    b = [[rank for rank in range(6) if rank not in positions] for positions in a]
    return np.array(a, dtype=float).T, np.array(b, dtype=float).T


@pytest.mark.parametrize("printed", sorted(set(PAPER_Z)))
def test_z_of_the_paper(printed: float) -> None:
    # 3 against 3 seeds: in a stratum U is a whole number from 0 to 9 with mean 4.5 and variance 3 * 3 * 7 / 12 = 21/4.
    # 16 strata: the sum of U has mean 72 and variance 84, so Z = k / sqrt(84) with whole k from -72 to 72. These are
    # 0.109 apart, so a Z printed with two decimals gives k: 46 -14 42 30 / 67 -14 41 37 / 64 -1 46 47 / 63 41 44 42.
    (k,) = (k for k in range(-72, 73) if round(k / math.sqrt(84), 2) == printed)
    z, p = van_elteren(*untied(72 + k))
    assert z == pytest.approx(k / math.sqrt(84))
    assert round(z, 2) == printed
    assert p == pytest.approx(stats.norm.sf(z))


def test_separated_samples_have_the_largest_z_that_the_paper_could_see() -> None:
    # every U = 9: (16 * 9 - 72) / sqrt(84) = 72 / 9.16515 = 7.8558
    seeds = np.arange(3.0)[:, None]
    noise = np.random.default_rng(0).normal(size=(3, 16))
    for a, b in (untied(144), (noise + 100, noise + seeds)):
        assert van_elteren(a, b).z == pytest.approx(72 / math.sqrt(84)) == pytest.approx(7.8558, abs=1e-4)


@given(samples(max_strata=1))
def test_one_stratum_is_scipys_mann_whitney(pair: tuple[Array, Array]) -> None:
    a, b = pair
    assume(len(np.unique(np.concatenate(pair))) > 1)  # scipy has no answer for nothing but ties
    theirs = stats.mannwhitneyu(a[:, 0], b[:, 0], alternative="greater", method="asymptotic", use_continuity=False)
    assert van_elteren(a, b).p == pytest.approx(theirs.pvalue)


@given(samples())
def test_swapping_the_samples_turns_the_sign(pair: tuple[Array, Array]) -> None:
    a, b = pair
    forth, back = van_elteren(a, b), van_elteren(b, a)
    assert forth.z == -back.z
    assert forth.p + back.p == pytest.approx(1.0)


@given(samples(), st.data())
def test_only_the_order_within_a_stratum_counts(pair: tuple[Array, Array], data: st.DataObject) -> None:
    a, b = (x.copy() for x in pair)
    increasing = st.sampled_from([np.exp, np.arctan, lambda x: x**3, lambda x: 5 * x - 1e3])
    for stratum in range(a.shape[1]):
        transform = data.draw(increasing)
        a[:, stratum], b[:, stratum] = transform(a[:, stratum]), transform(b[:, stratum])
    assert van_elteren(a, b) == van_elteren(*pair)


@given(samples(), st.randoms(use_true_random=False))
def test_the_order_of_seeds_and_strata_does_not_count(pair: tuple[Array, Array], random: object) -> None:
    a, b = pair
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    strata = rng.permutation(a.shape[1])
    assert van_elteren(rng.permutation(a)[:, strata], rng.permutation(b)[:, strata]).z == pytest.approx(
        van_elteren(a, b).z
    )


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=2).map(np.array),
    st.integers(1, 3),
)
def test_over_all_splits_of_tied_data_z_has_mean_0_and_variance_1(pooled: NDArray[np.int64], n: int) -> None:
    assume(any(len(set(stratum)) > 1 for stratum in pooled.tolist()))
    z = []
    for chosen in product(combinations(range(4), n), repeat=len(pooled)):
        a = np.array([stratum[list(picked)] for stratum, picked in zip(pooled, chosen, strict=True)]).T
        b = np.array([np.delete(stratum, picked) for stratum, picked in zip(pooled, chosen, strict=True)]).T
        z.append(van_elteren(a, b).z)
    assert np.mean(z) == pytest.approx(0, abs=1e-9)
    assert np.var(z) == pytest.approx(1)


def test_without_an_effect_z_is_standard_normal() -> None:
    rng = np.random.default_rng(1)
    spread = np.geomspace(0.1, 100, 16)  # strata may be as different as they like
    z = np.array([van_elteren(*(spread * rng.standard_cauchy((2, 3, 16)))).z for _ in range(2000)])
    assert abs(z.mean()) < 0.1
    assert abs(z.std() - 1) < 0.1
    for level in (0.1, 0.05):
        assert np.mean(z > stats.norm.isf(level)) == pytest.approx(level, abs=0.03)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.ones(3), np.ones((3, 1)), "seeds, tasks"),
        (np.ones((0, 2)), np.ones((3, 2)), "at least one of each"),
        (np.ones((3, 2)), np.ones((3, 1)), "same tasks, not 2 and 1"),
        (np.ones((3, 2)), np.full((3, 2), np.nan), "NaN"),
    ],
)
def test_data_that_cannot_be_tested_is_refused(a: Array, b: Array, message: str) -> None:
    for function in (van_elteren, probability_of_improvement):
        with pytest.raises(ValueError, match=message):
            function(a, b)


# ---------------------------------------------------------------- appendix E's threshold and effect sizes


def test_threshold_of_the_paper() -> None:
    assert round(bonferroni_threshold(0.001, 16), 2) == 3.84
    assert stats.norm.sf(bonferroni_threshold(0.001, 16)) == pytest.approx(0.001 / 16)
    assert bonferroni_threshold(0.5, 1) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("level", "hypotheses"), [(0.0, 1), (1.0, 1), (0.05, 0)])
def test_threshold_of_nothing_is_refused(level: float, hypotheses: int) -> None:
    with pytest.raises(ValueError):
        bonferroni_threshold(level, hypotheses)


def test_difference_of_differences_by_hand() -> None:
    # the ablation loses .9 - .2 = .7 and .8 - .3 = .5, the original .9 - .7 = .2 and .8 - .9 = -.1:
    # size .6 - .05 = .55; each .7, .5 beats each .2, -.1: U = 4, mean 2, variance 4 * 5 / 12, z = 2 / sqrt(5 / 3)
    default = [[0.9], [0.8]]
    size, z, p = difference_of_differences(default, [[0.2], [0.3]], default, [[0.7], [0.9]])
    assert size == pytest.approx(0.55)
    assert z == pytest.approx(2 / math.sqrt(5 / 3))
    assert p == pytest.approx(stats.norm.sf(z))


def test_defaults_in_common_do_not_make_the_test_liberal() -> None:
    rng = np.random.default_rng(2)
    z = []
    for _ in range(500):
        default, ablated, small = rng.normal(size=(3, 3, 16))
        z.append(difference_of_differences(default, ablated, default, small).z)
    assert abs(np.mean(z)) < 0.15
    assert np.std(z) < 0.95


def test_differences_of_different_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="same seeds, not 3 and 2"):
        difference_of_differences(np.ones((3, 2)), np.ones((2, 2)), np.ones((3, 2)), np.ones((3, 2)))


# ---------------------------------------------------------------- returns, bands, averages


def test_normalized_returns() -> None:
    returns = [[5.0, 40.0], [7.5, 0.0]]
    np.testing.assert_allclose(normalized(returns, [5, 0], [10, 40]), [[0, 1], [0.5, 0]])
    with pytest.raises(ValueError, match="above"):
        normalized(returns, [5, 0], [10, 0])


def test_band() -> None:
    mean, std, sem = band([[1.0, 4.0], [2.0, 4.0], [3.0, 4.0]])
    np.testing.assert_allclose(mean, [2, 4])
    np.testing.assert_allclose(std, [1, 0])  # squares 1 0 1, sum 2, over 3 - 1
    np.testing.assert_allclose(sem, [1 / math.sqrt(3), 0])


def test_difference_with_error() -> None:
    # means 2 and 5; standard errors sqrt(2) / sqrt(2) = 1 and 0
    mean, error = difference_with_error([[1.0], [3.0]], [[5.0], [5.0]])
    assert (mean.tolist(), error.tolist()) == ([-3.0], [1.0])


def test_band_of_one_seed_has_no_width() -> None:
    mean, std, sem = band([[1.0, 2.0]])
    assert mean.tolist() == [1, 2] and np.isnan(std).all() and np.isnan(sem).all()
    with pytest.raises(ValueError, match="at least one seed"):
        band(np.ones((0, 3)))


# ---------------------------------------------------------------- rliable's measures


def test_probability_of_improvement_by_hand() -> None:
    # first task: 3 > 2, 3 > 1, 1 < 2, 1 = 1: 2.5 of 4; second: everything tied: 1/2
    assert probability_of_improvement([[3, 0], [1, 0]], [[2, 0], [1, 0]]) == (2.5 / 4 + 0.5) / 2


@given(samples())
def test_probability_of_improvement_is_mann_whitneys_u(pair: tuple[Array, Array]) -> None:
    a, b = pair
    expected = np.mean([stats.mannwhitneyu(x, y).statistic for x, y in zip(a.T, b.T, strict=True)]) / len(a) / len(b)
    assert probability_of_improvement(a, b) == pytest.approx(expected)


def test_bootstrap_of_a_mean_has_the_width_of_theory() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(50, 4)) + np.array([0, 10, 20, 30])  # spread between tasks must not count
    low, high = bootstrap_interval(values, np.mean)
    half = 1.96 * math.sqrt(float(values.var(0).sum() / 50)) / 4
    assert high - low == pytest.approx(2 * half, rel=0.1)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.1 * half)


def test_bootstrap_resamples_seeds_within_tasks_and_samples_apart() -> None:
    a, b = np.array([[0.0, 10.0], [1.0, 11.0]]), np.array([[100.0, 200.0]])
    seen = []

    def statistic(x: Array, y: Array) -> float:
        seen.append((*x.ravel(), *y.ravel()))
        return float(x.mean() - y.mean())

    bootstrap_interval((a, b), statistic, repetitions=300)
    expected = {
        (i, j, k, m, 100.0, 200.0) for i, k in product((0, 1), repeat=2) for j, m in product((10, 11), repeat=2)
    }
    assert set(seen) == expected


def test_bootstrap_is_reproducible_and_nested() -> None:
    values = np.random.default_rng(4).normal(size=(3, 16))
    assert bootstrap_interval(values, np.mean, repetitions=200) == bootstrap_interval(values, np.mean, repetitions=200)
    assert bootstrap_interval(values, np.mean, repetitions=200, seed=1) != bootstrap_interval(
        values, np.mean, repetitions=200
    )
    wide, narrow = (bootstrap_interval(values, np.mean, level=level, repetitions=200) for level in (0.99, 0.5))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert bootstrap_interval(values[:1], np.mean, repetitions=20) == pytest.approx((np.mean(values[:1]),) * 2)


@pytest.mark.parametrize(("n", "m", "strata", "by_hand"), [(3, 3, 1, math.sqrt(27 / 7)), (6, 5, 2, math.sqrt(15))])
def test_the_largest_z_is_that_of_separated_samples(n: int, m: int, strata: int, by_hand: float) -> None:
    # sqrt(3 * 1 * 9 / 7) = 1.964; sqrt(3 * 2 * 30 / 12) = sqrt(15)
    high, low = (np.arange(k * strata, dtype=float).reshape(k, strata) for k in (n, m))
    assert largest_z(n, m, strata) == pytest.approx(by_hand)
    assert van_elteren(high + 1000, low).z == pytest.approx(by_hand)


def test_bootstrap_of_nothing_is_refused() -> None:
    for options in ({"level": 1.0}, {"repetitions": 0}):
        with pytest.raises(ValueError):
            bootstrap_interval(np.ones((3, 2)), np.mean, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN"):
        bootstrap_interval(np.array([[np.nan]]), np.mean)


# ---------------------------------------------------------------- Welch's tests, equivalence, Holm's correction


def test_mean_difference_by_hand() -> None:
    a, b = [[1.0, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 4.0], [0.0, 6.0]]
    difference = mean_difference(a, b)
    # means by task 2, 0 and 0, 4: differences 2 and -4, whose mean is -1
    assert difference.size == -1
    # variances 2 (n = 2) and 4 (m = 3): (2/2 + 4/3) / 2^2 = 7/12
    assert difference.error == pytest.approx(math.sqrt(7 / 12))
    # Satterthwaite: (1/4 + 1/3)^2 / ((1/4)^2 / 1 + (1/3)^2 / 2) = (49/144) / (17/144) = 49/17
    assert difference.freedom == pytest.approx(49 / 17)


@given(
    hnp.arrays(float, (5, 1), elements=st.integers(-9, 9).map(float)),
    hnp.arrays(float, (3, 1), elements=st.integers(-9, 9).map(float)),
)
def test_one_task_is_scipys_welch_test(a: Array, b: Array) -> None:
    assume(a.std() + b.std() > 0)
    difference = mean_difference(a, b)
    expected = stats.ttest_ind(a[:, 0], b[:, 0], equal_var=False)
    assert difference.p_different() == pytest.approx(expected.pvalue, rel=1e-6)
    assert difference.interval(0.95) == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-6, abs=1e-6)
    # two one-sided tests: of a - b > -margin and of a - b < margin
    one_sided = (
        stats.ttest_ind(a[:, 0] + shift, b[:, 0], equal_var=False, alternative=side).pvalue
        for shift, side in ((2.0, "greater"), (-2.0, "less"))
    )
    assert difference.p_equivalent(2.0) == pytest.approx(max(one_sided), rel=1e-6)


@given(st.floats(0.01, 3), st.floats(0.01, 0.9))
def test_equivalence_is_an_interval_inside_the_margin(scale: float, margin: float) -> None:
    a, b = np.array([[0.0], [1.0], [2.0], [5.0]]) * scale, np.array([[1.0], [2.0], [2.5]]) * scale
    difference = mean_difference(a, b)
    low, high = difference.interval(0.9)
    assert (difference.p_equivalent(margin) < 0.05) == (-margin < low and high < margin)


def test_constant_samples_and_single_seeds() -> None:
    equal, apart = mean_difference([[1.0], [1.0]], [[1.0], [1.0]]), mean_difference([[1.0], [1.0]], [[0.9], [0.9]])
    assert (equal.p_different(), equal.p_equivalent(0.01)) == (1, 0)
    assert (apart.p_different(), apart.p_equivalent(0.01), apart.p_equivalent(0.2)) == (0, 1, 0)
    single = mean_difference([[1.0]], [[0.0]])
    assert (single.p_different(), single.p_equivalent(9.0)) == (1, 1)
    assert math.isnan(single.interval()[0])


@pytest.mark.parametrize("freedom", [1.0, 1.5, 4.0, 14.0, 300.0, 1e5])
def test_students_distribution(freedom: float) -> None:
    for t in (-2.0, 0.0, 0.3, 2.0, 9.0):
        assert student_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), rel=1e-7)
    for probability in (0.6, 0.95, 0.9995):
        assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-6)


def test_holm_by_hand() -> None:
    # 0.01 * 4 = 0.04; 0.02 * 3 = 0.06; 0.025 * 2 = 0.05, raised to 0.06; 0.9 * 1
    assert holm([0.02, 0.9, 0.01, 0.025]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert holm([0.7, 0.6]) == [1.0, 1.0] and holm([]) == []
