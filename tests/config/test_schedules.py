"""Schedules: points, functions, and the numbers that follow them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from anybatch.config.schedules import curve, factor, scheduled_numbers, scheduled_policy, tabulate
from anybatch.config.validation import validate
from anybatch.errors import ConfigError
from anybatch.presets import ppo, ppo_ewma
from anybatch.scaling import rescale


@pytest.mark.parametrize(
    ("schedule", "fraction", "expected"),
    [
        ("constant", 0.3, 1.0),
        ("linear", 0.0, 1.0),
        ("linear", 0.3, 1 - 0.3),  # to the last bit
        ("linear", 1.0, 0.0),
        ("0:1 1:0", 0.3, 1 - 0.3),
        ("0:1 0.5:1 1:0.2", 0.75, 0.6),  # halfway from 1 to 0.2
        ("0.25:2, 0.75:4", 0.1, 2.0),  # constant before the first point and after the last
        ("0.25:2, 0.75:4", 0.9, 4.0),
        ("0:1 0.5:1 0.5:0.1 1:0.1", 0.4999, 1.0),  # a jump
        ("0:1 0.5:1 0.5:0.1 1:0.1", 0.5, 0.1),
        ("0.5:3", 0.2, 3.0),
    ],
)
def test_factors(schedule: str, fraction: float, expected: float) -> None:
    assert factor(schedule, fraction) == (expected if schedule in ("linear", "0:1 1:0") else pytest.approx(expected))


@pytest.mark.parametrize(
    "schedule",
    ["", "cosine", "0:1 1", "0:a", "1:0 0:1", "0:1 2:0", "-1:1", "0:-1", "0:nan", "0:inf", "0:1 nan:2 1:3", None, 3],
)
@pytest.mark.parametrize("name", ["optimizer.schedule", "policy.clip_schedule", "policy.entropy_schedule"])
def test_what_is_no_schedule_is_refused(name: str, schedule: object) -> None:
    with pytest.raises(ConfigError, match=name):
        validate(ppo(**{name: schedule}))


@pytest.mark.parametrize(
    ("function", "points"),
    [
        (lambda x: 1.0, 2),
        (lambda x: 1 - x, 2),
        (lambda x: max(0.1, 1 - 2 * x), 3),  # bends at 0.45, which is on no grid, so there are a few more
        (lambda x: (1 + math.cos(math.pi * x)) / 2, 32),
        (lambda x: 0.99 ** (100 * x), 33),
        (lambda x: 1.0 if x < 1 / 3 else 0.1, 4),
    ],
)
def test_a_function_becomes_points_close_to_it(function: Callable[[float], float], points: int) -> None:
    schedule = ppo(schedule=function).optimizer.schedule
    assert schedule == tabulate("optimizer.schedule", function)
    assert points <= len(curve(schedule)) <= points + 60
    for x in [i / 997 for i in range(998)]:  # on no grid
        assert factor(schedule, x) == pytest.approx(function(x), abs=2e-3)
    assert ppo(schedule=schedule).optimizer.schedule == schedule


def test_lines_are_recognised() -> None:
    assert tabulate("", lambda x: 1 - x) == "0:1 1:0"
    assert tabulate("", lambda x: 0.5) == "0:0.5 1:0.5"


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: 1 - x * 128 % 1, 260),  # two points a saw-tooth; 1 at all multiples of 1/128
        (lambda x: (1 - math.cos(2 * math.pi * 32 * x)) / 2, 3000),  # 0 at all multiples of 1/32
        (lambda x: 0.0 if 0.501 <= x < 0.507 else 1.0, 6),  # between two multiples of 1/128
    ],
)
def test_features_between_the_first_fractions_are_found(function: Callable[[float], float], most: int) -> None:
    points = tabulate("", function)
    assert len(curve(points)) <= most
    for x in [i / 997 for i in range(998)]:
        assert factor(points, x) == pytest.approx(function(x), abs=2e-3)


@pytest.mark.parametrize("function", [lambda x: 1 + math.sin(6283 * x), lambda x: hash(x) % 1000])
def test_a_function_that_takes_too_many_points_is_refused(function: Callable[[float], float]) -> None:
    with pytest.raises(ConfigError, match=r"policy.clip_schedule is a function that 4,096 .* cannot approximate"):
        ppo(clip_schedule=function)


def test_an_exception_in_a_function_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.schedule is a function that raises ZeroDivisionError at 0 of"):
        ppo(schedule=lambda x: 1 / x)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 10**400, "much", None])
def test_a_function_must_return_factors(value: object) -> None:
    with pytest.raises(ConfigError, match=r"policy.clip_schedule is a function that returns .* at 0 of the run"):
        ppo(clip_schedule=lambda x: value)


def test_numbers() -> None:
    config = ppo(step_size=1e-3, schedule="0:1 1:0.5", clip=0.2, clip_schedule="linear", entropy_coefficient=0.04)
    # halfway: 1e-3 * 0.75, 0.2 * 0.5
    assert scheduled_numbers(config, 0.5) == pytest.approx({"step_size": 7.5e-4, "clip": 0.1})
    policy = scheduled_policy(config.policy, 0.5)
    assert (policy.clip, policy.entropy_coefficient) == (0.1, 0.04)
    assert scheduled_policy(ppo().policy, 0.5) is not None
    assert list(scheduled_numbers(ppo(), 0.5)) == ["step_size"]
    config = ppo(entropy_coefficient=0.04, entropy_schedule="linear")
    assert scheduled_numbers(config, 0.25)["entropy_coefficient"] == pytest.approx(0.03)


def test_scaling_changes_the_number_and_not_its_schedule() -> None:
    config = ppo_ewma(schedule="0:1 1:0.5", clip_schedule="linear", policy_epochs=1, value_epochs=1)
    scaled, _ = rescale(config, num_envs=16)
    assert scheduled_numbers(scaled, 0.5)["step_size"] == pytest.approx(scheduled_numbers(config, 0.5)["step_size"] / 4)
    assert scaled.policy.clip_schedule == "linear"


def test_compiled_losses_have_constant_numbers() -> None:
    validate(ppo(compile=True, schedule="linear"))
    with pytest.raises(ConfigError, match=r"policy.entropy_schedule is 'linear', but compile"):
        validate(ppo(compile=True, entropy_schedule="linear"))
