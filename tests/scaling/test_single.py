"""Rules for single numbers: the paper's table of appendix B, and agreement with the rules of a configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest

from anybatch import scaling
from anybatch.errors import ConfigError
from anybatch.presets import ppg_ewma


def test_values_of_the_paper_at_1_256_of_the_batch() -> None:
    """5e-4 / sqrt(256) = 5e-4 / 16; 0.9^(1/256) and 0.999^(1/256); 8 x 256; 1 x 256; 32 x 256."""
    by: dict[str, Any] = {"divide_batch_by": 256}
    assert scaling.adam_step_size(5e-4, **by) == pytest.approx(3.125e-5, rel=1e-12)
    assert scaling.sgd_step_size(0.256, **by) == pytest.approx(1e-3, rel=1e-12)
    assert scaling.adam_beta(0.9, **by) == pytest.approx(0.9995885, abs=5e-8)
    assert scaling.adam_beta(0.999, **by) == pytest.approx(0.9999961, abs=5e-8)
    assert scaling.center_of_mass(8, **by) == 2048
    assert scaling.advantage_span(1, **by) == 256
    assert scaling.policy_iterations(32, **by) == 8192
    assert scaling.max_lag(2, **by) == 512


def test_limits_that_follow_the_noise_of_gradients() -> None:
    """At 1/16 of the batch noise is sqrt(16) = 4 times as large: 0.5 x 4 = 2 and 1e-5 x 4 = 4e-5; at 4 times, half."""
    assert scaling.max_grad_norm(0.5, divide_batch_by=16) == 2
    assert scaling.adam_eps(1e-5, divide_batch_by=16) == pytest.approx(4e-5, rel=1e-12)
    assert scaling.max_grad_norm(0.5, divide_batch_by=0.25) == 0.25
    with pytest.raises(ConfigError, match=r"max_grad_norm is 0, but must be a finite number above 0"):
        scaling.max_grad_norm(0, divide_batch_by=4)


def test_epochs_are_spread_over_as_many_iterations_as_the_batch_is_smaller() -> None:
    assert scaling.epoch_window(1, divide_batch_by=16) == 16
    assert scaling.epoch_window(4, divide_batch_by=0.5) == 2
    assert scaling.epoch_window(1, divide_batch_by=0.25) == 1  # all at once is the least


def test_an_adaptive_step_size_changes_as_fast() -> None:
    factor = scaling.kl_factor(1.5, divide_batch_by=4)
    assert factor**4 == pytest.approx(1.5)  # in four iterations, which are one of before
    assert scaling.kl_factor(1.2, divide_batch_by=0.5) == pytest.approx(1.44)


@pytest.mark.parametrize(("factor", "c", "expected"), [(1.5, 0.5, 2), (1.5, 1e-4, 2), (3.0, 1 / 16, 3), (3.0, 1, 3)])
def test_an_adaptive_step_size_does_not_jump_across_its_target(factor: float, c: float, expected: float) -> None:
    """1.5^2 = 2.25 and 1.5^10000 are more than 2; a larger factor of the user's stays."""
    assert scaling.kl_factor(factor, divide_batch_by=c) == expected


def test_step_sizes_saturate_at_the_noise_scale() -> None:
    """From 1,000 to 4,000 samples with a noise scale of 1,000: 1 + B_noise/B falls from 2 to 1.25."""
    by: dict[str, Any] = {"divide_batch_by": 0.25, "batch": 1000}
    assert scaling.saturating_step_size(1.0, **by, noise_scale=1000) == pytest.approx((2 / 1.25) ** 0.5)
    assert scaling.saturating_step_size(1.0, **by, noise_scale=1000, adam=False) == pytest.approx(2 / 1.25)
    # far below it the rules of the paper, far beyond it no change
    assert scaling.saturating_step_size(1.0, **by, noise_scale=1e9) == pytest.approx(2, rel=1e-5)
    assert scaling.saturating_step_size(1.0, **by, noise_scale=1e9, adam=False) == pytest.approx(4, rel=1e-5)
    assert scaling.saturating_step_size(1.0, **by, noise_scale=1e-3) == pytest.approx(1, rel=1e-5)
    there = scaling.saturating_step_size(3e-4, **by, noise_scale=2000)
    back = scaling.saturating_step_size(there, divide_batch_by=4, batch=4000, noise_scale=2000)
    assert back == pytest.approx(3e-4, rel=1e-12)
    with pytest.raises(ConfigError, match="noise_scale is 0, but must be a finite number above 0"):
        scaling.saturating_step_size(1.0, **by, noise_scale=0)


@pytest.mark.parametrize("c", [16, 4, 0.5, 0.25])
def test_they_are_the_rules_of_a_configuration(c: float) -> None:
    before = ppg_ewma(span=4.0)
    after, _ = scaling.scale(before, c, adam_betas=True)
    by: dict[str, Any] = {"divide_batch_by": c}
    optimizer, betas = before.optimizer, before.optimizer.adam_betas
    assert after.optimizer.step_size == scaling.adam_step_size(optimizer.step_size, **by)
    assert after.optimizer.adam_betas == tuple(scaling.adam_beta(beta, **by) for beta in betas)
    assert after.policy.center_of_mass == scaling.center_of_mass(before.policy.center_of_mass, **by)
    assert after.advantage.span == scaling.advantage_span(before.advantage.span, **by)
    assert after.aux.policy_iterations == scaling.policy_iterations(before.aux.policy_iterations, **by)


@pytest.mark.parametrize("c", [3, 0.2])
def test_there_and_back(c: float) -> None:
    for rule, value in (
        (scaling.adam_step_size, 3e-4),
        (scaling.sgd_step_size, 0.1),
        (scaling.adam_beta, 0.95),
        (scaling.center_of_mass, 8.0),
        (scaling.advantage_span, 20.0),
        (scaling.max_grad_norm, 0.5),
        (scaling.adam_eps, 1e-5),
    ):
        assert rule(rule(value, divide_batch_by=c), divide_batch_by=1 / c) == pytest.approx(value, rel=1e-12)


def test_limits() -> None:
    assert scaling.advantage_span(2, divide_batch_by=0.25) == 1  # an iteration at least
    assert scaling.policy_iterations(3, divide_batch_by=0.5) == 2  # 1.5 to the nearest even number
    assert scaling.max_lag(0, divide_batch_by=4) == 0  # fresh data stays fresh
    assert scaling.adam_step_size(0.0, divide_batch_by=4) == 0  # nothing is trained, as before
    assert scaling.max_lag(1, divide_batch_by=0.1) == 1  # stale data stays stale
    with pytest.raises(ConfigError, match=r"policy_iterations would be 2 x 0.2 = 0.4"):
        scaling.policy_iterations(2, divide_batch_by=0.2)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("adam_step_size", 1e-3, [-1.0, math.nan, math.inf]),
        ("sgd_step_size", 1e-3, [-1.0, math.inf]),
        ("adam_beta", 0.9, [1.0, -0.1, math.nan]),
        ("center_of_mass", 8.0, [-1.0, math.inf, math.nan]),
        ("advantage_span", 1.0, [0.5, math.inf]),
        ("kl_factor", 1.5, [1, math.inf]),
        ("max_grad_norm", 0.5, [0, math.inf]),
        ("policy_iterations", 4, [0, 1.5]),
        ("max_lag", 1, [-1, 0.5]),
    ],
)
def test_wrong_numbers_are_named(rule: str, good: float, bad: list[float]) -> None:
    call = getattr(scaling, rule)
    for value in (*bad, None, "8"):
        with pytest.raises(ConfigError, match=f"{value}.*but (must|a decay rate must)"):
            call(value, divide_batch_by=2)
    for c in (0, -1, math.nan, math.inf, 1e308, "16"):
        with pytest.raises(ConfigError, match="divide_batch_by is"):
            call(good, divide_batch_by=c)
