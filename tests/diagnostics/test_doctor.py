"""The doctor: every check fires on its symptom and is silent without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from anybatch.config.schema import TrainConfig
from anybatch.diagnostics.doctor import LiveDoctor, examine
from anybatch.presets import PRESETS, ppg_ewma, ppo, ppo_ewma
from anybatch.runs.progress import read_progress
from anybatch.scaling import rescale
from anybatch.scaling.findings import Finding
from anybatch.training import train

ROWS = 200


def healthy(**columns: Any) -> dict[str, list[float]]:
    values: dict[str, Any] = {
        "env_steps": [65536.0 * (i + 1) for i in range(ROWS)],
        "clip_fraction": 0.05,
        "advantage_std_used": 1.0,
        "importance_capped": 0.0,
        "effective_sample_size": 0.98,
        "kl_proximal": 0.005,
        "kl_behavior": 0.01,
        "explained_variance": 0.7,
        "entropy": 1.5,
        "noise_scale": 1e6,
        "noise_scale_adam": 2e6,
    }
    return {k: list(v) if isinstance(v, list) else [float(v)] * ROWS for k, v in (values | columns).items()}


def config(**changes: Any) -> TrainConfig:
    return ppo_ewma(**{"policy_epochs": 1, "value_epochs": 1, "total_env_steps": 65536 * ROWS, **changes})


def found(progress: dict[str, list[float]], settings: TrainConfig | None = None) -> dict[str, Finding]:
    findings = examine(progress, settings or config())
    assert all("\n" not in str(finding) for finding in findings)
    assert all(finding.change for finding in findings if finding.severity != "ok")
    return {finding.check: finding for finding in findings if finding.severity != "ok"}


def test_a_healthy_run() -> None:
    assert found(healthy()) == {}
    ok = examine(healthy(), config())
    assert [x.check for x in ok] == ["proximal_age", "noise_scale"]
    assert "65,536 environment steps" in ok[0].seen
    assert "hold up to a batch of 500,000" in ok[1].means


@pytest.mark.parametrize("name", [x for x in healthy() if x != "env_steps"])
def test_numbers_whose_sum_overflows_do_not_end_anything(name: str) -> None:
    examine(healthy(**{name: 1.7e308}), config())


def test_nothing_logged_yet() -> None:
    assert [x.check for x in examine({}, config())] == ["proximal_age"]
    assert found({name: [math.nan] * 5 for name in healthy()}) == {}


@pytest.mark.parametrize(
    ("symptom", "check", "words"),
    [
        ({"clip_fraction": 0.004}, "clip_fraction_low", ["0.40%", "iteration batch", "center_of_mass (8)"]),
        ({"clip_fraction": 0.15}, "clip_fraction_high", ["15.00%", "10%", "1 policy epoch ", "step_size (0.0005)"]),
        ({"importance_capped": 0.02}, "importance_capped", ["2.0%", "cap of 100"]),
        ({"effective_sample_size": 0.3}, "effective_sample_size", ["30%"]),
        ({"kl_proximal": 0.3}, "kl_proximal", ["exact KL[proximal, policy] 0.3"]),
        ({"kl_behavior": 0.8}, "kl_behavior", ["exact KL[behavior, policy] 0.8"]),
        ({"explained_variance": 0.02}, "explained_variance", ["2%", "hardly better"]),
        ({"explained_variance": -0.5}, "explained_variance", ["worse than a constant"]),
        ({"entropy": [1.5] * 100 + [0.01] * 100}, "entropy", ["0.01", "1.5 at the start"]),
        ({"noise_scale_adam": 16384.0}, "noise_scale", ["near the critical", "up to 4,096"]),
        ({"noise_scale_adam": 2000.0}, "noise_scale", ["past the critical", "500 or less"]),
        ({"advantage_std_used": [1.0, 12.0] * 100}, "advantage_std", ["factor of 12", "advantage.span (1)"]),
    ],
)
def test_each_symptom(symptom: dict[str, Any], check: str, words: list[str]) -> None:
    findings = found(healthy(**symptom))
    assert list(findings) == [check]
    for word in words:
        assert word in str(findings[check])


def test_clip_fraction_limits_depend_on_epochs_and_objective() -> None:
    three = config(policy_epochs=3, value_epochs=3)
    assert found(healthy(clip_fraction=0.15), three) == {}
    assert "20% with 3 policy epochs" in str(found(healthy(clip_fraction=0.25), three)["clip_fraction_high"])
    kl = config(objective="kl")
    assert found(healthy(clip_fraction=0.9), kl) == {}
    assert found(healthy(clip_fraction=0.0), kl) == {}
    unlimited = ppo(total_env_steps=65536 * ROWS, clip=math.inf)
    assert "clip_fraction_low" not in found(healthy(clip_fraction=0.0), unlimited)
    plain = ppo(total_env_steps=65536 * ROWS)
    assert "PPO-EWMA" in str(found(healthy(clip_fraction=0.001), plain)["clip_fraction_low"])


def test_a_trend_is_no_oscillation() -> None:
    falling = [100 * 0.95**i for i in range(ROWS)]
    assert found(healthy(advantage_std_used=falling)) == {}
    assert "advantage_std" in found(healthy(advantage_std_used=[1.0] * 190 + [0.0, 1.0] * 5))  # rewards so rare
    assert found(healthy(advantage_std_used=[1.0, 12.0] * 100), config(**{"advantage.normalize": False})) == {}


def test_only_the_last_tenth_counts() -> None:
    assert found(healthy(clip_fraction=[0.9] * 179 + [0.05] * 21)) == {}
    assert "clip_fraction_high" in found(healthy(clip_fraction=[0.05] * 180 + [0.9] * 20))


def test_the_value_function_has_time_to_learn() -> None:
    early = {name: column[:20] for name, column in healthy(explained_variance=0.0).items()}
    assert found(early) == {}


def test_a_density_s_entropy_is_not_judged() -> None:
    assert found(healthy(entropy=[2.0] * 100 + [-3.0] * 100)) == {}


def test_an_old_proximal_policy() -> None:
    finding = found(healthy(), config(total_env_steps=200_000))["proximal_age"]
    assert "33% of a run of 200,000" in finding.means
    assert "proximal_age" not in found(healthy(), ppo(total_env_steps=200_000))


def test_the_age_of_other_proximal_policies_follows_the_iteration() -> None:
    def age(settings: TrainConfig) -> Finding:
        (finding,) = [x for x in examine({}, settings) if x.check == "proximal_age"]
        assert finding.severity == "ok"
        return finding

    assert "up to 65,536 environment steps old" in age(ppo()).seen
    assert "behaviour policy" in age(ppo()).means
    stale = {"rollout.source.kind": "delayed", "rollout.source.delay": 3}
    assert "up to 262,144 environment steps old" in age(ppo(**stale)).seen  # 4 x 65,536
    assert "up to 65,536 environment steps old" in age(ppo(**stale, proximal="recent")).seen


def test_advice_on_importance_weights_knows_whether_the_data_is_stale() -> None:
    fresh = {"rollout.source.kind": "delayed", "rollout.source.delay": 0}
    for settings, advice in ((config(), "step_size"), (config(**fresh), "step_size")):
        assert advice in found(healthy(effective_sample_size=0.3), settings)["effective_sample_size"].change
    stale = config(**{"rollout.source.kind": "asynchronous"})
    assert "less staleness" in found(healthy(effective_sample_size=0.3), stale)["effective_sample_size"].change


def test_gradients_that_undo_each_other_show_the_critical_batch() -> None:
    # 8,192 samples a step; |r| = 1/2 is signal = noise, 1/5 a quarter of that
    hidden = {"noise_scale_adam": math.nan}
    past = found(healthy(**hidden, gradient_correlation=-0.6))["noise_scale"]
    assert past.severity == "error"
    assert "5,461 samples (successive gradients correlate by -0.60)" in past.seen  # 8192 x 0.4 / 0.6
    assert "steps overshoot" in past.change
    near = found(healthy(**hidden, gradient_correlation=-0.3))["noise_scale"]
    assert near.severity == "warning"
    assert found(healthy(**hidden, gradient_correlation=-0.19)) == {}
    assert found(healthy(gradient_correlation=0.19)) == {}
    rising = found(healthy(gradient_correlation=0.3))["noise_scale"]
    assert "overshoot" not in rising.change
    # where both are known, the smaller noise scale counts
    both = found(healthy(noise_scale_adam=2000.0, gradient_correlation=-0.3))["noise_scale"]
    assert "noise scale of Adam's update 2,000 samples" in both.seen


def test_a_noise_scale_that_cannot_be_measured() -> None:
    progress = healthy(noise_scale_adam=[1e9] * 150 + [math.nan] * 50)
    (finding,) = [x for x in examine(progress, config()) if x.check == "noise_scale"]
    assert finding.severity == "ok"
    assert "too large to measure" in finding.seen


def test_gradients_of_0_are_no_estimate() -> None:
    progress = healthy(noise_scale_adam=math.nan, gradient_correlation=0.0)
    assert not [x for x in examine(progress, config()) if x.check == "noise_scale"]


def test_infinite_distances_are_seen() -> None:
    assert {"kl_proximal", "kl_behavior"} <= found(healthy(kl_proximal=math.inf, kl_behavior=math.inf)).keys()
    half = [0.01] * (ROWS - 12) + [math.inf] * 12  # 12 of the last 20 rows
    assert "kl_behavior" in found(healthy(kl_behavior=half))


def test_sgd_looks_at_the_plain_noise_scale() -> None:
    sgd = config(optimizer_kind="sgd")
    assert "noise_scale" in found(healthy(noise_scale=1000.0), sgd)
    assert "noise_scale" not in found(healthy(noise_scale_adam=1000.0), sgd)


def test_worst_comes_first() -> None:
    findings = examine(healthy(noise_scale_adam=1000.0, clip_fraction=0.3), config())
    assert [x.severity for x in findings] == ["error", "warning", "ok"]


def test_live_warnings_come_once_each() -> None:
    live = LiveDoctor(config(), every=5, memory=30)
    row = {name: column[-1] for name, column in healthy(clip_fraction=0.3).items()}
    told = [live.look({**row, "kl_behavior": 0.9 if i > 60 else 0.01}) for i in range(100)]
    assert [x.check for findings in told for x in findings] == ["clip_fraction_high", "kl_behavior"]
    assert next(i for i, findings in enumerate(told) if findings) == 4


def test_a_warning_that_becomes_an_error_is_told_again_and_not_the_other_way_round() -> None:
    live = LiveDoctor(config(), every=5, memory=30)
    row = {name: column[-1] for name, column in healthy().items()}
    scales = [16384.0] * 50 + [2000.0] * 50 + [16384.0] * 50
    told = [x for scale in scales for x in live.look({**row, "noise_scale_adam": scale})]
    assert [(x.check, x.severity) for x in told] == [("noise_scale", "warning"), ("noise_scale", "error")]


def test_live_doctor_remembers_the_start() -> None:
    live = LiveDoctor(config(), every=10, memory=30)
    row = {name: column[-1] for name, column in healthy().items()}
    told = [x for i in range(200) for x in live.look({**row, "entropy": 1.5 if i < 50 else 0.001})]
    assert [x.check for x in told] == ["entropy"]


def test_live_doctor_keeps_the_whole_run_thinly() -> None:
    live = LiveDoctor(config(), every=10, memory=30)
    row = {name: column[-1] for name, column in healthy(clip_fraction=0.001).items()}
    told = [live.look({**row, "mean_episode_return": min(i, 300.0)}) for i in range(500)]
    assert not any(told[11:])  # that returns have risen from 0 counts long after row 30


RISEN = [float(min(i, 100)) for i in range(ROWS)]  # episode returns


@pytest.mark.parametrize(
    "columns",
    [
        # at the highest return there is nothing left to explain, to limit or to explore
        {"mean_episode_return": 500.0, "explained_variance": -2.05, "clip_fraction": 0.001},
        {"mean_episode_return": RISEN, "clip_fraction": 0.001, "entropy": [1.5] * 100 + [0.01] * 100},
        # no reward yet
        {"mean_episode_return": 0.0, "explained_variance": -3.0, "clip_fraction": 0.0, "advantage_std_used": 1e-9},
        # returns with a hundredth of the variance that they had: 1 / (1 - 0) at first, then 0.03 / (1 + 2)
        {"advantage_std": [1.0] * 100 + [0.03**0.5] * 100, "explained_variance": [0.0] * 100 + [-2.0] * 100},
        # one iteration in which the policy hardly acts differently, or the pole falls once
        {"kl_proximal": [0.005] * 190 + [5.0] + [0.005] * 9, "kl_behavior": [0.01] * 190 + [50.0] + [0.01] * 9},
        {"advantage_std_used": [1.0] * 190 + [30.0] + [1.0] * 9},
        {"effective_sample_size": [0.98] * 190 + [0.001] * 5 + [0.98] * 5},
        # clipping did something, and the step size has decayed since
        {"clip_fraction": [0.1] * 100 + [0.001] * 100},
        dict.fromkeys(("clip_fraction", "explained_variance", "advantage_std", "entropy"), math.nan),
        {"mean_episode_return": math.nan, "noise_scale_adam": math.nan, "gradient_correlation": math.nan},
    ],
)
def test_no_warning_in_a_healthy_situation(columns: dict[str, Any]) -> None:
    assert found(healthy(**columns)) == {}


def test_the_same_numbers_are_a_symptom_where_returns_do_not_rise() -> None:
    falling = {"mean_episode_return": [100.0 - 0.1 * i for i in range(ROWS)]}
    assert set(found(healthy(**falling, clip_fraction=0.001))) == {"clip_fraction_low"}
    assert set(found(healthy(**falling, explained_variance=-2.05, advantage_std=1.0))) == {"explained_variance"}
    assert set(found(healthy(**falling, entropy=[1.5] * 100 + [0.01] * 100))) == {"entropy"}


def test_explained_variance_is_of_all_recent_iterations_together() -> None:
    """Half of the iterations: residual variance 0.1, returns 1. The others: residual 0.01, returns 0.001, a share of
    -9. Together 1 - 0.11 / 1.001 = 0.89, where the mean share is -4."""
    columns = {"advantage_std": [0.1**0.5, 0.1] * 100, "explained_variance": [0.9, -9.0] * 100}
    assert found(healthy(**columns)) == {}
    # residuals 0.96 of 1, and 0.01 of 0.001: 1 - 0.97 / 1.001 = 3%
    columns = {"advantage_std": [0.96**0.5, 0.1] * 100, "explained_variance": [0.04, -9.0] * 100}
    assert "explains 3% of" in found(healthy(**columns))["explained_variance"].seen


def test_the_first_iterations_are_not_judged() -> None:
    first = healthy(clip_fraction=0.3, kl_proximal=1.0, noise_scale_adam=100.0, explained_variance=-1.0)
    assert found({name: column[:4] for name, column in first.items()}) == {}
    early = healthy(clip_fraction=0.001, noise_scale_adam=2000.0, explained_variance=-1.0)
    early = {name: column[:36] for name, column in early.items()}  # 18% of the run
    assert found(early) == {}
    assert any("too early" in finding.means for finding in examine(early, config()))
    later = healthy(clip_fraction=0.001, noise_scale_adam=2000.0, explained_variance=-1.0)
    later = {name: column[:80] for name, column in later.items()}  # 40%
    assert set(found(later)) == {
        "clip_fraction_low",
        "noise_scale",
        "explained_variance",
    }


def test_rows_before_the_first_estimate_do_not_mean_that_the_noise_scale_is_large() -> None:
    columns = {
        "noise_scale_adam": [math.nan] * 160 + [2000.0] * 40,
        "gradient_correlation": [math.nan] * 160 + [0.1] * 40,
    }
    assert found(healthy(**columns))["noise_scale"].severity == "error"
    columns = {name: [math.nan] * 190 + column[-10:] for name, column in columns.items()}
    (finding,) = [x for x in examine(healthy(**columns), config()) if x.check == "noise_scale"]
    assert "2,000 samples" in finding.seen  # not "too large to measure"
    assert "too early" in finding.means


def test_a_noise_scale_on_its_way_up_is_the_newest_one() -> None:
    assert found(healthy(noise_scale_adam=[2000.0] * 190 + [1e5] * 10)) == {}
    assert found(healthy(gradient_correlation=[0.3] * 190 + [0.1] * 10)) == {}
    falling = found(healthy(noise_scale_adam=[1e5] * 185 + [2000.0] * 15))["noise_scale"]
    assert falling.severity == "error"


def test_a_value_function_may_be_behind_while_returns_rise_in_the_first_half() -> None:
    behind = healthy(explained_variance=0.02, mean_episode_return=[float(i) for i in range(ROWS)])
    assert found({name: column[:90] for name, column in behind.items()}) == {}
    assert set(found({name: column[:110] for name, column in behind.items()})) == {"explained_variance"}


def test_successive_steps_on_one_trajectory_correlate_without_signal() -> None:
    one = config(num_envs=1, rollout_steps=65536)
    assert found(healthy(gradient_correlation=0.4), one) == {}
    assert found(healthy(gradient_correlation=-0.4), one)["noise_scale"].severity == "warning"


TOTAL = {1: 20_000, 64: 60_000}


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", TOTAL)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name.rpartition("-")[2] not in ("atari", "control")])
def test_no_warning_for_a_healthy_run(preset: str, num_envs: int, tmp_path: Path) -> None:
    phase = {"policy_iterations": 8, "aux_minibatches": 64, "aux_epochs": 3} if preset.startswith("ppg") else {}
    settings = PRESETS[preset](
        "gym:CartPole-v1", num_envs=8, rollout_steps=128, minibatches=16, step_size=7e-4,
        total_env_steps=TOTAL[num_envs], discount=0.99, workers=1,
        model_options={"width": 32}, **{"log.tensorboard": False}, **phase,
    )  # fmt: skip
    settings, _ = rescale(settings, num_envs=num_envs, rollout_steps=128 if num_envs == 1 else 16)
    train(settings, tmp_path / "run", seed=5, quiet=True)
    progress = read_progress(tmp_path / "run" / "progress.csv")
    assert max(progress["mean_episode_return"][1:]) > 50  # a random policy has 22
    assert found(progress, settings) == {}
    live = LiveDoctor(settings)
    rows = (dict(zip(progress, row, strict=True)) for row in zip(*progress.values(), strict=True))
    assert [str(finding) for row in rows for finding in live.look(row)] == []


def test_ppg_is_examined_too() -> None:
    assert found(healthy(), ppg_ewma(total_env_steps=65536 * ROWS)) == {}
