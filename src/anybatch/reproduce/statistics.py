"""Statistics of the paper: normalised returns, bands, and the hypothesis tests of appendix E.

Results are arrays (seeds, tasks). The tasks, 16 games in the paper, are the strata of the tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]


class ZTest(NamedTuple):
    """A one-tailed test with the normal distribution."""

    z: float
    p: float


class Effect(NamedTuple):
    """An effect size with its one-tailed test: a cell of appendix E's table."""

    size: float
    z: float
    p: float


@dataclass(frozen=True)
class MeanDifference:
    """Difference between two means, averaged over tasks, with Welch's t-tests of it."""

    size: float
    error: float
    """Standard error; NaN with a single seed, which decides nothing."""
    freedom: float
    """Degrees of freedom."""

    @property
    def decides(self) -> bool:
        """Whether there are seeds enough for tests."""
        return not math.isnan(self.error)

    def interval(self, level: float = 0.9) -> tuple[float, float]:
        """Confidence interval; that of 90% is inside a margin if and only if :meth:`p_equivalent` is below 5%."""
        half = student_quantile((1 + level) / 2, self.freedom) * self.error if self.error else self.error
        return self.size - half, self.size + half

    def p_different(self) -> float:
        """Two-sided p under the hypothesis that the means are equal."""
        return min(1.0, 2 * self._tail(abs(self.size)))

    def p_equivalent(self, margin: float) -> float:
        """The larger p of two one-sided tests, under the hypothesis that the difference is at least ``margin``."""
        return self._tail(margin - abs(self.size))

    def _tail(self, distance: float) -> float:
        if math.isnan(self.error):
            return 1.0
        if self.error == 0:
            return 0.0 if distance > 0 else 1.0
        return student_tail(distance / self.error, self.freedom)


class Band(NamedTuple):
    """Mean over seeds, with the standard deviation (figures 1, 2, 4) and the standard error (figures 3, 4 right)."""

    mean: Array
    std: Array
    sem: Array


def van_elteren(a: ArrayLike, b: ArrayLike) -> ZTest:
    """Test whether ``a`` tends to be larger than ``b``: the one-tailed van Elteren test of appendix E.

    This is the stratified Mann-Whitney test. In each stratum U counts the pairs with a > b, ties as 1/2. Under the null
    hypothesis that a and b are exchangeable in every stratum, U has mean ``n m / 2`` and, for N = n + m values with
    groups of t ties, variance ``n m / 12 * (N + 1 - sum(t^3 - t) / (N (N - 1)))``. Van Elteren weights a stratum by
    ``1 / (N + 1)``; every stratum has the same N here, so ``z = sum(U - n m / 2) / sqrt(sum(var))``, without a
    continuity correction. If all values are tied in every stratum, z is 0 and p is 1/2.

    Args:
        a: (n seeds, strata).
        b: (m seeds, strata).

    Returns:
        z, and the probability of at least this z under the null hypothesis.

    Raises:
        ValueError: not two dimensions, no seeds, different strata, or NaN.
    """
    a, b = _pair(a, b)
    pooled = np.concatenate([a, b])
    total = len(pooled)
    tied_with = (pooled[:, None] == pooled).sum(0)  # (N, strata): size t of the group of ties of each value
    ties = (tied_with**2 - 1).sum(0)  # t values per group with t^2 - 1 each: t^3 - t
    pairs = len(a) * len(b)
    variance = float((pairs / 12 * (total + 1 - ties / (total * (total - 1)))).sum())
    if (tied_with == total).all():
        return ZTest(0.0, 0.5)
    z = float((_wins(a, b) - pairs / 2).sum()) / math.sqrt(variance)
    return ZTest(z, 0.5 * math.erfc(z / math.sqrt(2)))


def largest_z(n: int, m: int, strata: int) -> float:
    """The z of :func:`van_elteren` if all of n values are above all of m others, without ties, in every stratum.

    U is n m, so that ``z = strata n m / 2 / sqrt(strata n m (N + 1) / 12)`` with N = n + m.
    """
    return math.sqrt(3 * strata * n * m / (n + m + 1))


def bonferroni_threshold(level: float, hypotheses: int) -> float:
    """The z above which a one-tailed test is significant at ``level`` after Bonferroni's correction (appendix E).

    3.84 for the paper's 0.1% and 16 hypotheses.

    Raises:
        ValueError: a level outside (0, 1) or fewer than one hypothesis.
    """
    if not 0 < level < 1:
        raise ValueError(f"The significance level must be between 0 and 1, not {level}.")
    if hypotheses < 1:
        raise ValueError(f"The number of hypotheses must be at least 1, not {hypotheses}.")
    return -NormalDist().inv_cdf(level / hypotheses)


def mean_difference(a: ArrayLike, b: ArrayLike) -> MeanDifference:
    """Mean over tasks of mean(a) - mean(b), with Welch's standard error and Satterthwaite's degrees of freedom.

    Tasks are fixed and seeds random: the variance is the sum over tasks and samples of ``s^2 / n``, divided by the
    square of the number of tasks.

    Args:
        a: (n seeds, tasks).
        b: (m seeds, tasks).

    Raises:
        ValueError: shapes that do not fit, or NaN.
    """
    a, b = _pair(a, b)
    size = float((a.mean(0) - b.mean(0)).mean())
    if min(len(a), len(b)) < 2:
        return MeanDifference(size, math.nan, math.nan)
    variances = np.stack([x.var(0, ddof=1) / len(x) for x in (a, b)]) / a.shape[1] ** 2
    total = float(variances.sum())
    if total == 0:
        return MeanDifference(size, 0.0, float(len(a) + len(b) - 2))
    shares = variances**2 / np.array([[len(a) - 1], [len(b) - 1]])
    return MeanDifference(size, math.sqrt(total), total**2 / float(shares.sum()))


def student_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's distribution.

    With ``t = sqrt(freedom) tan(angle)`` its density is that of an angle, proportional to ``cos(angle)^(freedom - 1)``,
    which is integrated numerically; the relative error is below 1e-6.
    """
    if t < 0:
        return 1.0 - student_tail(-t, freedom)
    start = math.atan(t / math.sqrt(freedom))
    end = min(math.pi / 2, start + 12 / math.sqrt(freedom))  # beyond it there is less than rounding errors
    nodes, weights = _gauss_legendre()
    angles = (end + start + (end - start) * nodes) / 2
    integral = float((weights * np.cos(angles) ** (freedom - 1)).sum()) * (end - start) / 2
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return integral * math.exp(log_norm)


def student_quantile(probability: float, freedom: float) -> float:
    """The t that Student's distribution is below with a ``probability`` from 0.5 to just below 1, by bisection."""
    if math.isnan(freedom):
        return math.nan
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > 1 - probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > 1 - probability else (low, middle)
    return (low + high) / 2


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: p-values such that those below a level are significant with that error rate of the family.

    The smallest of k is multiplied by k, the next by k - 1 and so on; none is below one that was smaller before.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def difference_of_differences(
    ablation_default: ArrayLike, ablation_small: ArrayLike, default: ArrayLike, small: ArrayLike
) -> Effect:
    """Additional loss of an ablation at a small batch, compared with the original: a cell of appendix E's table.

    The loss of a seed is its final normalised return at the default batch size less that at the small one; the order of
    seeds is arbitrary. The arguments are such returns (seeds, tasks); the result is the mean difference of the losses,
    positive if the ablation loses more, with its van Elteren test. Ablations (a) to (c) change nothing at the default
    batch size: pass the same runs as both defaults. The two samples of losses are then correlated, which makes the test
    conservative.

    Raises:
        ValueError: shapes that do not fit, or NaN.
    """
    losses = []
    for at_default, at_small in ((ablation_default, ablation_small), (default, small)):
        at_default, at_small = _pair(at_default, at_small)
        if len(at_default) != len(at_small):
            raise ValueError(f"Both batch sizes need the same seeds, not {len(at_default)} and {len(at_small)}.")
        losses.append(at_default - at_small)
    test = van_elteren(*losses)
    return Effect(float(losses[0].mean() - losses[1].mean()), test.z, test.p)


def normalized(returns: ArrayLike, low: ArrayLike, high: ArrayLike) -> Array:
    """Normalised returns ``(R - low) / (high - low)`` (section 5.2); the arguments are broadcast.

    Raises:
        ValueError: a range whose high is not above its low.
    """
    low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    if not (high > low).all():
        raise ValueError("The return that counts as 1 must be above the return that counts as 0.")
    return np.asarray((np.asarray(returns, dtype=np.float64) - low) / (high - low))


def time_to(curve: ArrayLike, level: float) -> float:
    """Fraction of training after which a curve first reaches ``level``, interpolated; NaN if it never does.

    Point k of the K points (K,) is the value after k/K of training, from k = 1; before the first it is constant.
    """
    values = np.asarray(curve, dtype=np.float64)
    reached = np.flatnonzero(values >= level)
    if len(reached) == 0:
        return math.nan
    k = int(reached[0])
    if k == 0:
        return 1 / len(values)
    before, after = float(values[k - 1]), float(values[k])
    return (k + (level - before) / (after - before)) / len(values)


def band(values: ArrayLike) -> Band:
    """Mean, standard deviation (with n - 1) and standard error over seeds, as in the paper's figures.

    Average over tasks first, so that the band shows the variation of a whole repetition of the experiment.

    From values (seeds, ...) to arrays (...); deviation and error of a single seed are NaN.

    Raises:
        ValueError: no seeds.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim == 0 or len(values) == 0:
        raise ValueError("A band needs values of at least one seed.")
    mean = np.asarray(values.mean(0))
    if len(values) == 1:
        return Band(mean, np.full_like(mean, math.nan), np.full_like(mean, math.nan))
    std = np.asarray(values.std(0, ddof=1))
    return Band(mean, std, std / math.sqrt(len(values)))


def difference_with_error(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """Difference between the means over seeds of ``a`` and ``b``, (seeds, tasks), and its standard error, by task."""
    first, second = band(a), band(b)
    return first.mean - second.mean, np.hypot(first.sem, second.sem)


def probability_of_improvement(a: ArrayLike, b: ArrayLike) -> float:
    """Mean over tasks of P(a > b) + P(a = b) / 2 for a, b (seeds, tasks) (Agarwal et al., 2021)."""
    a, b = _pair(a, b)
    return float(_wins(a, b).mean()) / (len(a) * len(b))


def bootstrap_interval(
    values: ArrayLike | tuple[ArrayLike, ...],
    statistic: Callable[..., float],
    *,
    level: float = 0.95,
    repetitions: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Stratified percentile bootstrap: seeds are drawn with replacement within each task (Agarwal et al., 2021).

    With n seeds the interval is too narrow by a factor of about ``sqrt((n - 1) / n)``, 0.8 for three, 0 for one.

    ``values`` are (seeds, tasks), or a tuple of such arrays, which are resampled independently; ``statistic`` is a
    function of them, and ``level`` the probability mass inside the interval.

    Raises:
        ValueError: not two dimensions, no seeds, NaN, a level outside (0, 1) or fewer than one repetition.
    """
    if not 0 < level < 1:
        raise ValueError(f"The level must be between 0 and 1, not {level}.")
    if repetitions < 1:
        raise ValueError(f"The number of repetitions must be at least 1, not {repetitions}.")
    samples = [_seeds_by_tasks(sample) for sample in (values if isinstance(values, tuple) else (values,))]
    rng = np.random.default_rng(seed)
    results = np.empty(repetitions)
    for repetition in range(repetitions):
        drawn = (np.take_along_axis(x, rng.integers(len(x), size=x.shape), axis=0) for x in samples)
        results[repetition] = statistic(*drawn)
    low, high = np.quantile(results, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@functools.cache
def _gauss_legendre() -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(200)


def _seeds_by_tasks(values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"Results must be an array (seeds, tasks) with at least one of each, not {array.shape}.")
    if np.isnan(array).any():
        raise ValueError(f"Results must not be NaN, and {np.isnan(array).sum()} of {array.size} are.")
    return array


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    a, b = _seeds_by_tasks(a), _seeds_by_tasks(b)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"Both results must have the same tasks, not {a.shape[1]} and {b.shape[1]}.")
    return a, b


def _wins(a: Array, b: Array) -> Array:
    """Mann-Whitney's U by task: pairs with a > b, ties as 1/2."""
    first, second = a[:, None], b[None, :]
    return np.asarray(((first > second) + 0.5 * (first == second)).sum((0, 1)))
