"""Schedules of the step size, the clipping parameter and the entropy coefficient over a run.

A schedule is the factor of a number against the fraction of the run's environment steps that is done, so that it
follows the batch size and the length of the run. It is text, ``constant``, ``linear`` (from 1 to 0), or points of a
piecewise-linear curve such as ``0:1 0.5:1 1:0.1``, so that a run's config.yaml holds all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from anybatch.config.schema import PolicyConfig, TrainConfig
from anybatch.errors import ConfigError, shown

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""Points (fraction, factor) with rising fractions; two points of the same fraction are a jump."""

SCHEDULES = {
    "step_size": "optimizer.schedule",
    "clip": "policy.clip_schedule",
    "entropy_coefficient": "policy.entropy_schedule",
}
"""Fields that hold a schedule, by the column of progress.csv with the number that follows it."""
CONSTANT = "constant"
_NAMED: dict[str, Curve] = {CONSTANT: ((0.0, 1.0),), "linear": ((0.0, 1.0), (1.0, 0.0))}
_ALLOWED = (
    "constant, linear, or points FRACTION:FACTOR such as '0:1 0.5:1 1:0.1', with rising fractions from 0 to 1 and "
    "factors of at least 0"
)
_SEGMENTS, _HALVINGS, _TOLERANCE, _MOST_POINTS = 32, 24, 1e-3, 4096
_PROBES = sorted(i * (math.sqrt(5) - 1) / 2 % 1 for i in range(4096))  # evenly spread, and in step with no period


@functools.lru_cache
def curve(schedule: str) -> Curve:
    """The points of a schedule.

    Raises:
        ValueError: it is none.
    """
    if schedule in _NAMED:
        return _NAMED[schedule]
    points = []
    for word in re.split(r"[\s,]+", schedule.strip()):
        fraction, _, value = word.partition(":")
        points.append((float(fraction), float(value)))
    fractions = [fraction for fraction, _ in points]
    if fractions != sorted(fractions) or not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions {fractions}")
    if not all(0 <= value < math.inf for _, value in points):
        raise ValueError("factors")
    return tuple(points)


def factor(schedule: str, fraction: float) -> float:
    """Factor when ``fraction`` (0 to 1) of a run's environment steps is done; constant outside the points."""
    points = curve(schedule)
    index = bisect_right(points, fraction, key=lambda point: point[0])
    if index in (0, len(points)):
        return points[min(index, len(points) - 1)][1]
    (left, before), (right, after) = points[index - 1], points[index]
    return before + (after - before) * (fraction - left) / (right - left)


def check(name: str, schedule: Any) -> None:
    """Raise a ConfigError unless the value of a field is a schedule."""
    try:
        curve(schedule)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} is {shown(schedule)}, but must be {_ALLOWED}") from error


def tabulate(name: str, function: Callable[[float], float]) -> str:
    """Points of a function from fraction to factor, so close that lines between them are within 0.1% of its maximum.

    It is evaluated on 32 equal segments, which are halved where a line does not fit, down to 2^-29 of the run at a
    jump, and at 4,096 fractions besides. A feature shorter than 1/4,000 of the run may be missed.

    Raises:
        ConfigError: a value of the function is not a number of at least 0, or it takes more than 4,096 points; ``name``
            is the field.
    """
    value = functools.cache(functools.partial(_checked, name, function))
    grid = [i / _SEGMENTS for i in range(_SEGMENTS + 1)]
    at_grid, highest = max(map(value, grid)), max(map(value, _PROBES))
    tolerance = _TOLERANCE * max(at_grid, highest / 2)  # the half leaves smooth functions at the points they had before

    def fits(left: float, right: float) -> bool:
        slope = (value(right) - value(left)) / (right - left)

        def error(x: float) -> float:
            return abs(value(x) - value(left) - slope * (x - left))

        probes = _PROBES[bisect_left(_PROBES, left) : bisect_left(_PROBES, right)]
        quarters = [left + (right - left) * i / 4 for i in (1, 2, 3)]
        return all(error(x) <= tolerance for x in quarters) and all(error(x) <= 2 * tolerance for x in probes)

    def refined(left: float, right: float, halvings: int) -> Iterator[tuple[float, float]]:
        if not halvings or fits(left, right):
            yield right, value(right)
        else:
            middle = (left + right) / 2
            yield from refined(left, middle, halvings - 1)
            yield from refined(middle, right, halvings - 1)

    points: list[tuple[float, float]] = [(0.0, value(0.0))]
    for point in itertools.chain.from_iterable(refined(*segment, _HALVINGS) for segment in itertools.pairwise(grid)):
        if len(points) > 1 and _between(points[-2], points[-1], point):
            points.pop()
        points.append(point)
        if len(points) > _MOST_POINTS:
            raise ConfigError(
                f"{name} is a function that {_MOST_POINTS:,} points with lines between them cannot approximate; choose "
                "one that changes more slowly"
            )
    return " ".join(f"{x:.12g}:{y:.12g}" for x, y in points)


def _checked(name: str, function: Callable[[float], float], fraction: float) -> float:
    """Value of a schedule's function."""
    try:
        result = function(fraction)
    except Exception as error:
        raise ConfigError(
            f"{name} is a function that raises {type(error).__name__} at {fraction:g} of the run: {error}"
        ) from error
    try:
        number = float(result)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(
            f"{name} is a function that returns {shown(result)} at {fraction:g} of the run, but must return a "
            "factor of at least 0"
        )
    return number


def _between(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether the middle point is on the line through the others."""
    line = first[1] + (last[1] - first[1]) * (middle[0] - first[0]) / (last[0] - first[0])
    return abs(line - middle[1]) <= 1e-12 * max(abs(first[1]), abs(last[1]))


def scheduled_policy(policy: PolicyConfig, fraction: float) -> PolicyConfig:
    """The coefficients when ``fraction`` of the run is done; numbers of stacked runs may be tensors."""
    if policy.clip_schedule == policy.entropy_schedule == CONSTANT:
        return policy
    return dataclasses.replace(
        policy,
        clip=policy.clip * factor(policy.clip_schedule, fraction),
        entropy_coefficient=policy.entropy_coefficient * factor(policy.entropy_schedule, fraction),
    )


def scheduled_numbers(config: TrainConfig, fraction: float) -> dict[str, float]:
    """Columns for the log: the step size, and the coefficients that have a schedule."""
    optimizer, policy = config.optimizer, scheduled_policy(config.policy, fraction)
    columns = {"step_size": optimizer.step_size * factor(optimizer.schedule, fraction)}
    if policy.clip_schedule != CONSTANT:
        columns["clip"] = policy.clip
    if policy.entropy_schedule != CONSTANT:
        columns["entropy_coefficient"] = policy.entropy_coefficient
    return columns
