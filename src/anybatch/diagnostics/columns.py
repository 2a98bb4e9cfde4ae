"""Recent values, trends and oscillations of the columns of progress.csv, for the doctor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from anybatch.config.schema import TrainConfig

Progress = Mapping[str, Sequence[float]]
"""Columns of progress.csv by name, oldest row first."""
EARLY = 0.2
"""Fraction of a run that counts as its beginning."""

_FEWEST_ROWS, _SHARE_OF_RUN = 20, 0.1
_LITTLE_SPREAD = 0.25


def mean(values: Sequence[float]) -> float:
    """Mean of finite numbers; infinite where the sum overflows."""
    try:
        return fmean(values)
    except OverflowError:
        return math.inf


def last_rows(column: Sequence[float]) -> Sequence[float]:
    """Last tenth of a column, at least 20 rows."""
    return column[-max(_FEWEST_ROWS, round(_SHARE_OF_RUN * len(column))) :]


def finite_values(progress: Progress, name: str) -> list[float]:
    """Finite values of a column; none if there is no such column."""
    return [x for x in progress.get(name, ()) if math.isfinite(x)]


def recent_values(progress: Progress, name: str) -> list[float]:
    """Finite values in the last rows of a column."""
    return [x for x in last_rows(progress.get(name, ())) if math.isfinite(x)]


def recent_mean(progress: Progress, name: str) -> float | None:
    """Mean of the recent values; None without any."""
    values = recent_values(progress, name)
    return mean(values) if values else None


def recent_median(progress: Progress, name: str) -> float | None:
    """Median of the recent values, infinite ones included; None without any."""
    values = [x for x in last_rows(progress.get(name, ())) if not math.isnan(x)]
    return median(values) if values else None


def is_early(progress: Progress, config: TrainConfig, share: float = EARLY, *, missing: bool = False) -> bool:
    """Whether less than ``share`` of the run is done; ``missing`` if the log does not say."""
    steps = progress.get("env_steps", ())
    return steps[-1] < share * config.total_env_steps if steps else missing


def returns_are_constant(progress: Progress) -> bool:
    """Whether all recent episodes had the same return: the highest one, or no reward has been found yet."""
    returns = recent_values(progress, "mean_episode_return")
    return len(returns) > 1 and max(returns) == min(returns)


def has_learned(progress: Progress) -> bool:
    """Whether episode returns have risen from the start of the run, by more than half of their range."""
    returns, recent = finite_values(progress, "mean_episode_return"), recent_values(progress, "mean_episode_return")
    return bool(recent) and mean(recent) - returns[0] > 0.5 * (max(returns) - min(returns))


def swings(values: Sequence[float], factor: float) -> int:
    """Number of turns at which values rise and fall by ``factor`` or more: 2 for one exception among equal values."""
    count = direction = 0
    lowest = highest = max(values[0], 1e-12)
    for value in values:
        value = max(value, 1e-12)
        lowest, highest = min(lowest, value), max(highest, value)
        if direction <= 0 and value >= factor * lowest:
            count, direction, highest = count + 1, 1, value
        elif direction >= 0 and value * factor <= highest:
            count, direction, lowest = count + 1, -1, value
    return count


def oscillation(values: Sequence[float]) -> float:
    """Factor by which values go both up and down, in either order; 1 for a trend in one direction."""
    rise = fall = 1.0
    lowest = highest = max(values[0], 1e-12)
    for value in values:
        value = max(value, 1e-12)
        lowest, highest = min(lowest, value), max(highest, value)
        rise, fall = max(rise, value / lowest), max(fall, highest / value)
    return min(rise, fall)


def explained_share(progress: Progress) -> float | None:
    """Share of the returns' variance within iterations that the value function explains, over all recent iterations.

    1 - sum var(residual) / sum var(return), where the residual is the advantage. The mean of the iterations' shares
    would depend most on those whose returns hardly vary: a few steps of one environment, or a policy at the highest
    return. None if there is no estimate, or the returns vary much less than they did.
    """
    shares = progress.get("explained_variance", ())
    stds = progress.get("advantage_std", ())
    if not stds:
        return recent_median(progress, "explained_variance")
    residuals = [std * std for std in stds]
    returns = [x / (1 - share) if share < 1 else math.nan for x, share in zip(residuals, shares, strict=False)]
    known = [(x, y) for x, y in zip(last_rows(residuals), last_rows(returns), strict=False) if math.isfinite(y)]
    if not known:
        return None
    residual, spread = (mean(column) for column in zip(*known, strict=True))
    whole, size = [x for x in returns if math.isfinite(x)], len(known)
    most = max(mean(whole[i : i + size]) for i in range(0, len(whole), size))
    return 1 - residual / spread if spread > _LITTLE_SPREAD**2 * most else None
