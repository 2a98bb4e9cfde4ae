"""The scaling rules: exact values, the two factors apart, ablations, values set by hand, and validity."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anybatch import scaling
from anybatch.config import fields
from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError, ScalingWarning
from anybatch.presets import ppg, ppg_ewma, ppo, ppo_ewma
from anybatch.scaling.changes import BY_HAND, Change
from anybatch.scaling.conditions import gae_horizon, gae_share_cut, validity
from anybatch.scaling.rules import proximal_age, staleness
from anybatch.scaling.tuned_at import TunedAt


def after(changes: list[Change]) -> dict[str, Any]:
    return {change.field: change.after for change in changes}


def aux_samples(config: TrainConfig) -> float:
    return config.iteration_batch * config.aux.policy_iterations / config.aux.minibatches_per_epoch / config.workers


# ---------------------------------------------------------------- scale


def test_the_smallest_batch_of_the_paper() -> None:
    config, changes = scaling.scale(ppg_ewma(), 256, adam_betas=True)
    assert config.env.num_envs == 1
    assert config.workers == 1
    assert config.optimizer.step_size == pytest.approx(3.125e-5, rel=1e-12)
    assert config.optimizer.adam_betas == pytest.approx((0.9995885, 0.9999961), abs=5e-8)
    assert config.policy.center_of_mass == 2048
    assert config.advantage.span == 256
    assert config.aux.policy_iterations == 8192
    assert config.aux.minibatches_per_epoch == 2048
    assert config.aux.step_size == pytest.approx(2.5e-4)
    assert config.optimization_batch == 32
    # all but T, the number of minibatches, the age of the data, and the rules beyond the paper
    assert {change.field for change in changes} == {*scaling.FIELDS[:1], *scaling.FIELDS[3:11]}
    validate(config)


@pytest.mark.parametrize(
    ("c", "workers", "aux_minibatches", "aux_step_size"),
    [
        (1, 4, 512, 5e-4),
        (2, 2, 1024, 5e-4 / 2**0.5),
        (4, 1, 2048, 2.5e-4),
        (16, 1, 2048, 2.5e-4),
        (256, 1, 2048, 2.5e-4),
    ],
)
def test_workers_go_first_and_the_auxiliary_phase_follows_them_alone(
    c: int, workers: int, aux_minibatches: int, aux_step_size: float
) -> None:
    config, _ = scaling.scale(ppg_ewma(), c)
    assert config.workers == workers
    assert config.aux.minibatches_per_epoch == aux_minibatches
    assert config.aux.step_size == pytest.approx(aux_step_size)
    assert aux_samples(config) == 1024  # per worker and gradient step
    assert config.iteration_batch * config.aux.policy_iterations == 32 * 65536
    validate(config)


def test_what_does_not_change() -> None:
    before = ppg_ewma()
    config, changes = scaling.scale(before, 16)
    restored = override(config, {change.field: change.before for change in changes})
    assert restored == override(before, {"aux.minibatches": 512})
    assert config.optimizer.adam_betas == before.optimizer.adam_betas  # "omitted in most of our experiments"


def test_no_change_gives_an_empty_list() -> None:
    assert scaling.scale(ppg_ewma(), 1) == (ppg_ewma(), [])
    assert scaling.rescale(ppg_ewma()) == (ppg_ewma(), [])
    assert scaling.rescale(ppg_ewma(), num_envs=256) == (ppg_ewma(), [])


def test_rules_without_a_subject_are_left_out() -> None:
    assert set(after(scaling.scale(ppo(), 4)[1])) == {
        "env.num_envs",
        "optimizer.step_size",
        "advantage.span",
    }  # nor the workers, which only the auxiliary phase depends on
    assert scaling.scale(ppo(), 4)[0].workers == 4
    assert after(scaling.scale(ppo(), 4, workers=2)[1])["workers"] == 2
    config = ppo_ewma(**{"advantage.normalize": False})
    assert "advantage.span" not in after(scaling.scale(config, 4)[1])
    assert "policy.center_of_mass" in after(scaling.scale(config, 4)[1])
    assert "policy.center_of_mass" not in after(scaling.scale(ppg(), 4)[1])


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, (5e-4 / 4, 128, 16, 512, (0.9, 0.999))),
        ({"adam_step": "linear"}, (5e-4 / 16, 128, 16, 512, (0.9, 0.999))),
        ({"adam_step": "none"}, (5e-4, 128, 16, 512, (0.9, 0.999))),
        ({"adam_betas": True}, (5e-4 / 4, 128, 16, 512, (0.9 ** (1 / 16), 0.999 ** (1 / 16)))),
        ({"adam_betas": "beta2"}, (5e-4 / 4, 128, 16, 512, (0.9, 0.999 ** (1 / 16)))),
        ({"ewma": False}, (5e-4 / 4, 8, 16, 512, (0.9, 0.999))),
        ({"advantage_norm": False}, (5e-4 / 4, 128, 1, 512, (0.9, 0.999))),
        ({"policy_iterations": False}, (5e-4 / 4, 128, 16, 32, (0.9, 0.999))),
    ],
)
def test_ablations_are_arguments(rules: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config, _ = scaling.scale(ppg_ewma(), 16, **rules)
    assert config.optimizer.step_size == pytest.approx(expected[0])
    assert config.policy.center_of_mass == expected[1]
    assert config.advantage.span == expected[2]
    assert config.aux.policy_iterations == expected[3]
    assert config.optimizer.adam_betas == pytest.approx(expected[4])
    assert aux_samples(config) == 1024


def test_auxiliary_minibatches_follow_n_pi_unless_a_rule_says_how_many() -> None:
    assert ppg_ewma(policy_iterations=4).aux.minibatches_per_epoch == 64
    assert ppg_ewma(policy_iterations=4, aux_minibatches=7).aux.minibatches_per_epoch == 7
    # 4 times fewer samples an iteration and as many workers: N_pi x 4, but the minibatches stay as they are
    config, changes = scaling.rescale(ppg_ewma(), num_envs=64, minibatches=2, workers=4)
    assert "aux.minibatches" not in after(changes)
    assert (config.aux.policy_iterations, config.aux.minibatches_per_epoch) == (128, 512)
    by_hand: dict[str, Any] = {"aux.policy_iterations": 32}
    config, _ = scaling.rescale(ppg_ewma(), num_envs=64, workers=4, overrides=by_hand)
    assert aux_samples(config) == 1024


def test_the_auxiliary_rule_can_be_switched_off() -> None:
    config, changes = scaling.scale(ppg_ewma(), 16, auxiliary=False)
    assert (config.aux.minibatches, config.aux.step_size) == (512, 5e-4)
    assert set(after(scaling.scale(ppg_ewma(), 16)[1])) - set(after(changes)) == {"aux.minibatches", "aux.step_size"}
    validate(config)


def test_without_the_rule_for_phases_the_auxiliary_minibatches_shrink_with_the_phase() -> None:
    config, _ = scaling.scale(ppg_ewma(), 256, policy_iterations=False)
    assert config.aux.policy_iterations == 32
    assert config.aux.minibatches_per_epoch == 8  # 8,192 samples in pieces of 1,024


@pytest.mark.parametrize(("step", "divisor"), [("sqrt", 16), ("linear", 16), ("none", 1)])
def test_sgd_is_linear(step: Any, divisor: float) -> None:
    config, _ = scaling.scale(
        ppo_ewma(optimizer_kind="sgd", **{"optimizer.step_size": 0.1}), 16, adam_step=step, adam_betas=True
    )
    assert config.optimizer.step_size == pytest.approx(0.1 / divisor)
    assert config.optimizer.adam_betas == (0.9, 0.999)


def test_limits_of_gradients_follow_the_batch_if_asked() -> None:
    clipped = ppo_ewma(max_grad_norm=0.5, adam_eps=1e-5)
    left, changes = scaling.scale(clipped, 16, adam_eps="none")
    assert (left.optimizer.max_grad_norm, left.optimizer.adam_eps) == (0.5, 1e-5)
    assert {"max_grad_norm", "adam_eps"} <= set(checks(left, clipped))
    followed, changes = scaling.scale(clipped, 16, max_grad_norm="sqrt")
    assert followed.optimizer.max_grad_norm == 2  # 0.5 x sqrt(16)
    assert followed.optimizer.adam_eps == pytest.approx(4e-5)
    rules = {change.field: change.rule for change in changes}
    assert rules["optimizer.max_grad_norm"] == rules["optimizer.adam_eps"] == "x sqrt(16)"
    assert not {"max_grad_norm", "adam_eps"} & set(checks(followed, clipped))
    assert "max_grad_norm" in checks(followed)  # alone it does not tell where it comes from
    assert scaling.scale(followed, 1 / 16, max_grad_norm="sqrt")[0] == clipped


def test_epochs_are_spread_if_asked() -> None:
    config = ppo_ewma(policy_epochs=3, value_epochs=3)
    assert scaling.scale(config, 16)[0].optimizer.epoch_window == 1
    small, changes = scaling.scale(config, 16, epochs="spread")
    (row,) = [x for x in changes if x.field == "optimizer.epoch_window"]
    assert (row.before, row.after, row.rule) == (1, 16, "x 16")
    assert "21,845 environment steps apart" in row.why  # 65,536 / 3
    for epochs in ("spread", "at-once"):  # passes that are spread already stay so
        assert scaling.scale(small, 1 / 16, epochs=epochs)[0] == config
        assert scaling.scale(small, 4, epochs=epochs)[0].optimizer.epoch_window == 64
    once, _ = scaling.scale(ppo_ewma(policy_epochs=1, value_epochs=1), 16, epochs="spread")
    assert once.optimizer.epoch_window == 1  # there is one pass
    # with fewer minibatches the iteration batch, and so the span, stays
    assert scaling.rescale(config, minibatches=2, epochs="spread")[0].optimizer.epoch_window == 1


@pytest.mark.parametrize(
    ("proximal", "epochs", "divisor"),
    [("ewma", "at-once", 1), ("behavior", "at-once", 16), ("behavior", "spread", 1), ("recent", "spread", 16)],
)
def test_kl_divergences_from_a_policy_of_the_iteration_shrink_with_it(
    proximal: str, epochs: Any, divisor: float
) -> None:
    config = ppo_ewma(proximal=proximal, kl_target=0.016, kl_stop=0.032, policy_epochs=3, value_epochs=3)
    small, _ = scaling.scale(config, 16, epochs=epochs)
    assert small.optimizer.kl_target == pytest.approx(0.016 / divisor)
    assert small.optimizer.kl_stop == pytest.approx(0.032 / divisor)
    assert small.optimizer.kl_factor == pytest.approx(1.5 ** (1 / 16))
    # an enlarged iteration is as many times longer, since passes cannot be closer than at once
    large, _ = scaling.scale(config, 1 / 4, epochs=epochs)
    assert large.optimizer.kl_stop == pytest.approx(0.032 * (1 if proximal == "ewma" else 4))
    left, _ = scaling.scale(config, 16, epochs=epochs, adaptive_step=False)
    assert (left.optimizer.kl_target, left.optimizer.kl_stop, left.optimizer.kl_factor) == (0.016, 0.032, 1.5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_grad_norm": None}, "optimizer.max_grad_norm"),
        ({"max_grad_norm": math.inf}, "optimizer.max_grad_norm"),
        ({"optimizer.kind": "sgd", "optimizer.adam_eps": 1e-5}, "optimizer.adam_eps"),
        ({"optimizer.adam_eps": 1e-8}, "optimizer.adam_eps"),
    ],
)
def test_limits_of_gradients_that_are_not_used_stay(changes: dict[str, Any], field: str) -> None:
    _, made = scaling.scale(ppo_ewma(**changes), 16, max_grad_norm="sqrt")
    assert field not in {change.field for change in made}


def test_a_measured_noise_scale_limits_the_step_size() -> None:
    config = ppo_ewma(policy_epochs=1, value_epochs=1, step_size=1e-3)  # 8,192 samples a gradient step
    large, changes = scaling.scale(config, 1 / 4, noise_scale=8192)
    assert large.optimizer.step_size == pytest.approx(1e-3 * (2 / 1.25) ** 0.5)
    (row,) = [x for x in changes if x.field == "optimizer.step_size"]
    assert row.rule == "x 1.26491"
    assert "32,768 at a noise scale of 8,192" in row.why
    assert scaling.scale(large, 4, noise_scale=8192)[0].optimizer.step_size == pytest.approx(1e-3)
    assert scaling.scale(config, 1 / 4, noise_scale=8192, adam_step="none")[0].optimizer.step_size == 1e-3
    linear, _ = scaling.scale(config, 1 / 4, noise_scale=8192, adam_step="linear")
    assert linear.optimizer.step_size == pytest.approx(1e-3 * 2 / 1.25)
    sgd = ppo_ewma(optimizer_kind="sgd", **{"optimizer.step_size": 0.1})
    assert scaling.scale(sgd, 1 / 4, noise_scale=8192)[0].optimizer.step_size == pytest.approx(0.1 * 2 / 1.25)


def test_enlarging() -> None:
    config, _ = scaling.scale(ppg_ewma(), 1 / 4)
    assert config.env.num_envs == 1024
    assert config.workers == 16
    assert config.optimizer.step_size == pytest.approx(1e-3)
    assert config.policy.center_of_mass == 2
    assert config.aux.policy_iterations == 8
    assert config.advantage.span == 1  # 0.25 does not exist
    (finding,) = validity(config, ppg_ewma())
    assert finding.check == "advantage_samples"
    assert "262,144 samples instead of 65,536" in str(finding)


def test_one_worker_stays_one_worker() -> None:
    assert scaling.scale(ppg_ewma(workers=1), 1 / 4)[0].workers == 1
    assert scaling.scale(ppg_ewma(workers=1), 1 / 4, workers=8)[0].workers == 8


@pytest.mark.parametrize(
    ("c", "words"),
    [
        (0, ["divide_batch_by is 0", "above 0"]),
        (-2, ["divide_batch_by is -2"]),
        (math.nan, ["divide_batch_by is nan"]),
        (math.inf, ["divide_batch_by is inf"]),
        (3, ["85.3333", "rescale to env.num_envs 85"]),
        (512, ["only 256 environments: the divisor can be at most 256", "fewer rollout.steps"]),
        (1 / 128, ["aux.policy_iterations", "at least 1", "2,097,152 samples"]),
    ],
)
def test_impossible_batches_are_refused_with_advice(c: float, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        scaling.scale(ppg_ewma(), c)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# ---------------------------------------------------------------- rescale


def test_environments_alone_are_what_scale_does() -> None:
    assert scaling.rescale(ppg_ewma(), num_envs=16) == scaling.scale(ppg_ewma(), 16)


def test_minibatches_alone_change_the_optimisation_batch_alone() -> None:
    config, changes = scaling.rescale(ppg_ewma(), minibatches=32)
    assert after(changes) == {
        "optimizer.minibatches": 32,
        "optimizer.step_size": pytest.approx(2.5e-4),
        "policy.center_of_mass": 32,
    }
    assert proximal_age(config) == proximal_age(ppg_ewma()) == 65536


def test_environments_and_minibatches_together_change_the_iteration_batch_alone() -> None:
    _, changes = scaling.rescale(ppg_ewma(), num_envs=64, minibatches=2, workers=4)
    assert after(changes) == {
        "env.num_envs": 64,
        "optimizer.minibatches": 2,
        "advantage.span": 4,
        "aux.policy_iterations": 128,
    }


def test_rollout_steps_change_both() -> None:
    config, changes = scaling.rescale(ppg_ewma(), rollout_steps=64)
    assert after(changes) == {
        "rollout.steps": 64,
        "optimizer.step_size": pytest.approx(2.5e-4),
        "policy.center_of_mass": 32,
        "advantage.span": 4,
        "aux.policy_iterations": 128,
    }
    (finding,) = validity(config, ppg_ewma())
    assert finding.check == "bootstrapping"


def test_longer_rollouts_make_up_for_fewer_environments() -> None:
    _, changes = scaling.rescale(ppg_ewma(), num_envs=64, rollout_steps=1024, workers=4)
    assert after(changes) == {"env.num_envs": 64, "rollout.steps": 1024}


def test_workers_alone_change_the_auxiliary_phase_alone() -> None:
    config, changes = scaling.rescale(ppg_ewma(), workers=1)
    assert after(changes) == {"workers": 1, "aux.minibatches": 2048, "aux.step_size": pytest.approx(2.5e-4)}
    assert aux_samples(config) == 1024


def test_fixed_minibatch_keeps_the_inner_loop() -> None:
    config, changes = scaling.rescale(ppo_ewma(), num_envs=1024, rule="fixed-minibatch")
    assert after(changes) == {"env.num_envs": 1024, "optimizer.minibatches": 32}
    assert config.optimization_batch == 8192
    assert proximal_age(config) == proximal_age(ppo_ewma())
    fewer, changes = scaling.rescale(ppo_ewma(), num_envs=64, rule="fixed-minibatch")
    assert fewer.optimizer.minibatches == 2
    assert fewer.optimizer.step_size == 5e-4
    assert fewer.advantage.span == 4


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"num_envs": 0}, ["env.num_envs is 0", "at least 1"]),
        ({"rollout_steps": -1}, ["rollout.steps is -1"]),
        ({"minibatches": 0}, ["optimizer.minibatches is 0"]),
        ({"workers": 0}, ["workers is 0"]),
        ({"overrides": {"step_size": "fast"}}, ["optimizer.step_size is 'fast'", "a number"]),
        ({"num_envs": 64, "noise_scale": "big", "adam_step": "none"}, ["noise_scale is 'big'", "above 0"]),
        ({"num_envs": 1, "rollout_steps": 4}, ["cannot divide 1 environments of 4 steps"]),  # half a sample each
        ({"num_envs": 80, "rule": "fixed-minibatch"}, ["fixed-minibatch keeps 8192 samples", "2.5"]),
        ({"num_envs": 64, "minibatches": 4, "rule": "fixed-minibatch"}, ["leave minibatches out"]),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        scaling.rescale(ppg_ewma(), **numbers)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("num_envs", [100, 85, 7, 48, 131, 192, 1000])
def test_odd_numbers_of_environments_give_a_valid_configuration_near_the_rule(num_envs: int) -> None:
    before = ppg_ewma()
    config, changes = scaling.rescale(before, num_envs=num_envs)
    validate(config)
    c = 256 / num_envs
    assert config.aux.policy_iterations == round(32 * c)
    assert aux_samples(config) == pytest.approx(1024, rel=0.25)
    assert num_envs % config.workers == 0
    (why,) = [change.why for change in changes if change.field == "aux.policy_iterations"]
    assert ("the rule gives" in why) == (not (32 * c).is_integer())


def test_values_set_by_hand_win_and_are_shown() -> None:
    overrides: dict[str, Any] = {"optimizer.step_size": 1e-3, "aux.policy_iterations": 64}
    config, changes = scaling.rescale(ppg_ewma(), num_envs=16, overrides=overrides)
    assert config.optimizer.step_size == 1e-3
    assert config.aux.policy_iterations == 64
    assert config.policy.center_of_mass == 128
    assert aux_samples(config) == 1024  # of the phase that will be run
    by_name = {change.field: change for change in changes}
    assert by_name["optimizer.step_size"].rule == BY_HAND
    assert "the rule gives 0.000125" in by_name["optimizer.step_size"].why
    assert by_name["policy.center_of_mass"].rule == "x 16"


def test_rules_see_the_other_values_set_by_hand() -> None:
    config = ppo_ewma(num_envs=64, rollout_steps=32)  # 256 samples a gradient step, E = 3
    by_hand = {
        "optimizer.kind": "sgd",
        "optimizer.schedule": "linear",
        "advantage.normalize": False,
        "policy_epochs": 1,
    }
    scaled, changes = scaling.rescale(config, num_envs=16, overrides=by_hand)
    rows = {change.field: change for change in changes}
    assert scaled.optimizer.step_size == config.optimizer.step_size / 4  # SGD's rule
    assert "advantage.span" not in rows
    assert rows["policy.center_of_mass"].why == "the proximal policy stays 2,048 environment steps old"  # 8 * 256
    text = scaling.table(changes)
    assert "constant" in text and "linear" in text and "sgd" in text
    assert rows["optimizer.kind"].before == "adam" and rows["optimizer.kind"].rule == BY_HAND
    for name in ("num_envs", "rollout_steps", "minibatches", "workers"):
        with pytest.raises(ConfigError, match=rf"which makes up the batch: pass {name}= to rescale"):
            scaling.rescale(config, num_envs=16, overrides={name: 8})


def test_fractions_are_numbers_and_truth_values_are_not() -> None:
    assert scaling.scale(ppo_ewma(), Fraction(4))[0] == scaling.scale(ppo_ewma(), 4)[0]
    with pytest.raises(ConfigError, match=r"256 / 3.5 = 73.1429 is not a whole number"):
        scaling.scale(ppo_ewma(), Fraction(7, 2))
    with pytest.raises(ConfigError, match="divide_batch_by is True"):
        scaling.scale(ppo_ewma(), True)
    assert type(scaling.sgd_step_size(3e-4, divide_batch_by=np.float32(4))) is float


def test_numbers_of_numpy_are_numbers() -> None:
    size: Any = {name: np.int64(4) for name in ("num_envs", "rollout_steps", "minibatches", "workers")}
    config, _ = scaling.rescale(ppg_ewma(), **size, overrides={"step_size": np.float64(1e-4), "clip": "0.1"})
    assert validate(config).optimizer.step_size == 1e-4 and config.policy.clip == 0.1
    assert TunedAt(**size).numbers() == dict.fromkeys(scaling.FIELDS[:4], 4)
    assert {type(x) for x in TunedAt(**size).numbers().values()} == {int}
    for workers in (True, 2.0, "2"):
        with pytest.raises(ConfigError, match=r"workers is .*, but must be an integer of at least 1"):
            scaling.scale(ppo_ewma(), 4, workers=workers)  # type: ignore[arg-type]


def test_a_kl_target_set_by_hand_has_the_factor_of_its_batch() -> None:
    config, changes = scaling.rescale(ppo_ewma(), num_envs=64, overrides={"kl_target": 0.01})
    assert config.optimizer.kl_factor == pytest.approx(1.5 ** (1 / 4))
    larger, changes = scaling.rescale(config, num_envs=1024)  # 1.5^(1/4 * 16) = 5.06
    (row,) = [x for x in changes if x.field == "optimizer.kl_factor"]
    assert (row.rule, larger.optimizer.kl_factor) == ("^ 16", 2) and row.why.startswith("at most 2: more would jump")
    off, _ = scaling.rescale(config, num_envs=1024, overrides={"kl_target": None})
    assert off.optimizer.kl_factor == config.optimizer.kl_factor


def test_a_value_set_by_hand_where_no_rule_speaks_is_shown_too() -> None:
    overrides = {"optimizer.adam_betas": (0.5, 0.9)}
    config, changes = scaling.rescale(ppg_ewma(), num_envs=16, overrides=overrides)
    assert config.optimizer.adam_betas == (0.5, 0.9)
    assert changes[-1].rule == BY_HAND


@pytest.mark.parametrize("field", ["optimizer.kl_target", "optimizer.kl_stop", "optimizer.max_grad_norm"])
def test_an_option_that_is_switched_on_or_off_by_hand_is_shown(field: str) -> None:
    off, on = ppg_ewma(**{field: None}), ppg_ewma(**{field: 0.25})
    _, changes = scaling.rescale(off, num_envs=16, overrides={field: 0.25})
    (line,) = [line.split() for line in scaling.table(changes).splitlines() if line.startswith(field)]
    assert line[:3] == [field, "none", "0.25"]
    _, changes = scaling.rescale(on, num_envs=16, overrides={field: None})
    (line,) = [line.split() for line in scaling.table(changes).splitlines() if line.startswith(field)]
    assert line[:3] == [field, "0.25", "none"]


def test_table() -> None:
    _, changes = scaling.scale(ppg_ewma(), 256, adam_betas=True)
    lines = scaling.table(changes).splitlines()
    assert lines[0].split() == ["field", "before", "after", "rule", "why"]
    assert len(lines) == 1 + len(changes)
    start = lines[0].index("rule")
    assert all(line[start - 2 : start] == "  " and line[start] != " " for line in lines)
    assert "0.9995885, 0.9999961" in scaling.table(changes)
    assert "3.125e-05" in scaling.table(changes)
    assert "65,536 environment steps" in scaling.table(changes)
    assert "nothing changes" in scaling.table([])


def test_clipping_changes_in_the_direction_of_the_batch() -> None:
    config = ppo_ewma(max_grad_norm=0.5)
    for envs, words in ((64, "noisier, larger gradients"), (1024, "less noisy, smaller gradients")):
        findings = validity(scaling.rescale(config, num_envs=envs)[0], config)
        assert [words in x.means for x in findings if x.check == "max_grad_norm"] == [True]


def test_changes_are_plain_data() -> None:
    _, (change, *_) = scaling.scale(ppg_ewma(), 4)
    assert dataclasses.asdict(change)["field"] == "env.num_envs"
    with pytest.raises(dataclasses.FrozenInstanceError):
        change.after = 3  # type: ignore[misc]


# ---------------------------------------------------------------- validity


def checks(config: TrainConfig, reference: TrainConfig | None = None) -> list[str]:
    return [finding.check for finding in validity(config, reference)]


def test_the_paper_s_own_experiment_is_valid() -> None:
    for c in (1, 4, 16, 64, 256):
        assert checks(scaling.scale(ppg_ewma(), c)[0], ppg_ewma()) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"policy_epochs": 3}, "policy_epochs"),
        ({"policy.proximal": "behavior"}, "proximal"),
        ({"center_of_mass": 0.25}, "center_of_mass"),
        ({"max_grad_norm": 0.5}, "max_grad_norm"),
        ({"rollout.steps": 16}, "gae_horizon"),
        ({"architecture": "shared", "value_epochs": 2}, "shared_epochs"),
        ({"total_env_steps": 1_000_000}, "phase"),
        ({"total_env_steps": 600_000, "policy_iterations": 1}, "proximal_age"),
    ],
)
def test_each_condition(changes: dict[str, Any], check: str) -> None:
    findings = validity(ppg_ewma(**changes))
    (finding,) = [x for x in findings if x.check == check]
    assert finding.change
    assert "\n" not in str(finding)
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "dual", "value_epochs": 2},
        {"architecture": "detach", "value_epochs": 2},  # no value gradient reaches the encoder
        {"architecture": "shared", "value_epochs": 1},
    ],
)
def test_value_epochs_matter_only_where_they_move_the_policy(changes: dict[str, Any]) -> None:
    assert "shared_epochs" not in checks(ppg_ewma(**changes))


def test_rounded_phases_are_reported() -> None:
    config, _ = scaling.rescale(ppg_ewma(), num_envs=6000)
    assert config.aux.policy_iterations == 1  # the rule gives 1.37
    assert "phase_batch" in checks(config, ppg_ewma())
    assert "phase_batch" not in checks(scaling.rescale(ppg_ewma(), num_envs=100)[0], ppg_ewma())  # 82 for 81.92


# ---------------------------------------------------------------- staleness

DELAYED = {"rollout.source.kind": "delayed", "rollout.source.delay": 3}


@pytest.mark.parametrize(("kind", "field"), [("delayed", "delay"), ("asynchronous", "max_lag")])
def test_the_age_of_the_data_is_kept(kind: str, field: str) -> None:
    config = ppg_ewma(**{"rollout.source.kind": kind, f"rollout.source.{field}": 3})
    small, changes = scaling.scale(config, 16)
    assert fields.get(small, f"rollout.source.{field}") == 48
    # 3 x 65,536 = 48 x 4,096
    assert staleness(small) == staleness(config) == 196_608
    (row,) = [x for x in changes if x.field.startswith("rollout.source")]
    assert (row.field, row.before, row.after, row.rule) == (f"rollout.source.{field}", 3, 48, "x 16")
    assert "196,608 environment steps old" in row.why and ("at most" in row.why) == (kind == "asynchronous")
    assert scaling.scale(small, 1 / 16, workers=4)[0] == override(config, {"aux.minibatches": 512})
    assert "staleness" not in checks(small, config)


def test_a_delay_is_rounded_to_whole_iterations() -> None:
    config = ppg_ewma(**DELAYED)
    # 3 iterations of 256 environments are 7.68 of 100: 8 are 204,800 steps, 4% more than 196,608
    changes = scaling.rescale(config, num_envs=100)[1]
    (row,) = [x for x in changes if x.field == "rollout.source.delay"]
    assert row.after == 8
    assert row.why == "the rule gives 7.68; data is 204,800 steps old instead of 196,608"
    # of 64 environments they are exactly 12
    (row,) = [x for x in scaling.rescale(config, num_envs=64)[1] if x.field == "rollout.source.delay"]
    assert row.after == 12 and "data stays" in row.why


def test_stale_data_stays_stale() -> None:
    config = ppg_ewma(**(DELAYED | {"rollout.source.delay": 1}))
    larger, _ = scaling.scale(config, 1 / 4)
    assert larger.rollout.source.delay == 1  # the rule gives 0.25
    (finding,) = [x for x in validity(larger, config) if x.check == "staleness"]
    assert "262,144 environment steps old instead of 65,536" in finding.seen


def test_fresh_data_stays_fresh() -> None:
    for changes in ({}, {"rollout.source.kind": "delayed"}, {"rollout.source.kind": "asynchronous", "max_lag": 0}):
        config, rows = scaling.scale(ppg_ewma(**changes), 16)
        assert config.rollout.source == ppg_ewma(**changes).rollout.source
        assert not [x for x in rows if x.field.startswith("rollout.source")]
    stale, _ = scaling.rescale(ppo_ewma(), num_envs=64, overrides={"rollout.source.kind": "asynchronous"})
    assert stale.rollout.source.max_lag == ppo_ewma().rollout.source.max_lag  # of the new run; there is no age to keep


@pytest.mark.parametrize(("c", "words"), [(16, "12,288 environment steps old instead of 196,608"), (0.5, "393,216")])
def test_staleness_that_is_not_kept_is_reported_in_both_directions(c: float, words: str) -> None:
    config = ppg_ewma(**DELAYED)
    scaled, changes = scaling.scale(config, c, staleness=False)
    assert scaled.rollout.source.delay == 3
    assert not [x for x in changes if x.field.startswith("rollout.source")]
    (finding,) = [x for x in validity(scaled, config) if x.check == "staleness"]
    assert words in finding.seen
    assert "staleness" not in checks(scaling.rescale(config, minibatches=32)[0], config)


# ---------------------------------------------------------------- auxiliary minibatches that do not divide


def test_a_rounded_auxiliary_minibatch_is_compensated_by_its_step_size() -> None:
    config, changes = scaling.rescale(ppg_ewma(), num_envs=179)
    # N_pi = 46 for 45.78; 46 x 179 x 256 samples are 2,058.5 minibatches of 1,024. 8,234 trajectories (2 x 23 x 179) of
    # 256 steps divide into 1,472 minibatches of 1,432 samples (23 x 64), or 2,864 (179 x 16), but no number between
    assert (config.workers, config.aux.policy_iterations, config.aux.minibatches) == (1, 46, 1472)
    assert aux_samples(config) == 1432
    # a step of the reference has 4 x 1,024 samples over all workers: 4,096 / 1,432 times as many
    assert config.aux.step_size == pytest.approx(5e-4 / (4096 / 1432) ** 0.5, rel=1e-12)
    (why,) = [x.why for x in changes if x.field == "aux.step_size"]
    assert "2.86034 times fewer samples per auxiliary gradient step" in why
    linear, _ = scaling.rescale(ppg_ewma(), num_envs=179, adam_step="linear")
    assert linear.aux.step_size == pytest.approx(5e-4 / (4096 / 1432), rel=1e-12)


@pytest.mark.parametrize("num_envs", range(1, 513, 17))
def test_auxiliary_step_size_follows_the_samples_of_a_step(num_envs: int) -> None:
    before = ppg_ewma()
    config, _ = scaling.rescale(before, num_envs=num_envs)
    ratio = aux_samples(config) * config.workers / (aux_samples(before) * before.workers)
    assert config.aux.step_size == pytest.approx(before.aux.step_size * ratio**0.5)


# ---------------------------------------------------------------- warnings


def test_unmet_conditions_are_warnings_in_python() -> None:
    with pytest.warns(ScalingWarning) as caught:
        scaling.scale(ppo(), 4)
    assert [str(x.message).split(":")[0] for x in caught] == ["3 policy epochs", "policy.proximal behavior"]
    assert {x.filename for x in caught} == {__file__}  # the line that called scale
    with pytest.warns(ScalingWarning, match="advantage mean and std over 262,144 samples instead of 65,536") as caught:
        scaling.rescale(ppg_ewma(), num_envs=1024)
    assert {x.filename for x in caught} == {__file__}


def test_no_warning_where_the_conditions_hold() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaling.scale(ppg_ewma(), 16)
        scaling.rescale(ppo())  # nothing changes
        scaling.warn_about(ppg_ewma())


def test_a_configuration_can_be_warned_about_alone() -> None:
    with pytest.warns(ScalingWarning, match="3 policy epochs: .* retune the step size") as caught:
        scaling.warn_about(ppo_ewma())
    assert [x.filename for x in caught] == [__file__]
    with pytest.warns(ScalingWarning, match="instead of 2,097,152"):
        scaling.warn_about(ppg_ewma(policy_iterations=16), ppg_ewma())


def test_gae_horizon() -> None:
    config = ppg_ewma()
    assert gae_horizon(config) == pytest.approx(1 / (1 - 0.999 * 0.95))
    decay = 0.999 * 0.95
    direct = sum(decay**t for t in range(1, 257)) / 256
    assert gae_share_cut(config) == pytest.approx(direct)
    assert gae_horizon(override(config, {"discount": 1.0, "gae_lambda": 1.0})) == math.inf
    assert gae_share_cut(override(config, {"discount": 1.0, "gae_lambda": 1.0})) == 1


@pytest.mark.parametrize("c", [1e-9, 1e-300])
def test_a_factor_for_more_environments_than_exist_is_refused_at_once(c: float) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"divide_batch_by is .* are more than 4,194,304"):
        scaling.scale(ppo_ewma("gym:CartPole-v1"), c)
    with pytest.raises(ConfigError, match=r"env.num_envs is 256000000000"):
        scaling.rescale(ppo_ewma("gym:CartPole-v1"), num_envs=256 * 10**9)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"adam_step": "squareroot"}, "adam_step is 'squareroot', but must be one of sqrt, linear, none"),
        ({"adam_betas": "beta1"}, "adam_betas is 'beta1', but must be one of True, False, keep, both, beta2"),
        ({"epochs": "spred"}, "epochs is 'spred'"),
        ({"max_grad_norm": "Sqrt"}, "max_grad_norm is 'Sqrt'"),
        ({"adam_eps": True}, "adam_eps is True"),
        ({"ewma": "no"}, "ewma is 'no', but must be one of True, False"),
        ({"rule": "fixed_minibatch"}, "rule is 'fixed_minibatch', but must be one of paper, fixed-minibatch"),
        ({"num_envs": 64.5}, "env.num_envs is 64.5, but must be an integer"),
        ({"num_envs": True}, "env.num_envs is True, but must be an integer"),
        ({"overrides": {"optimizer.stepsize": 1.0}}, "stepsize is not a field"),
    ],
)
def test_an_option_that_is_no_choice_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        scaling.rescale(ppo_ewma(), **{"num_envs": 64, **options})


def test_overrides_have_the_short_names_too() -> None:
    short, full = ({name: 1e-3} for name in ("step_size", "optimizer.step_size"))
    assert scaling.rescale(ppo_ewma(), 64, overrides=short) == scaling.rescale(ppo_ewma(), 64, overrides=full)


def test_words_of_the_command_line_mean_the_same_in_python() -> None:
    for words, value in (("keep", False), ("both", True)):
        assert scaling.scale(ppo_ewma(), 4, adam_betas=words) == scaling.scale(ppo_ewma(), 4, adam_betas=value)
    assert scaling.scale(ppo_ewma(), 4, adam_betas="keep")[0].optimizer.adam_betas == (0.9, 0.999)


def test_an_interpolated_proximal_policy_keeps_its_age() -> None:
    config = ppo(interpolated=True, **{"rollout.source.kind": "delayed", "delay": 8})
    small, _ = scaling.scale(config, 4)
    # centre of mass 8 of 8 iterations x 24 steps, then 32 of 32 x 24: the share stays 1/24
    assert (small.policy.center_of_mass, small.rollout.source.delay) == (32, 32)
    assert "proximal" not in {finding.check for finding in scaling.validity(small, config)}


def test_a_divergence_from_data_as_old_as_before_stays() -> None:
    limits = {"kl_target": 0.02, "kl_stop": 0.03}
    stale = ppo(allow_stale_coupled=True, **limits, **{"rollout.source.kind": "delayed", "delay": 8})
    small, _ = scaling.scale(stale, 4)
    assert (small.optimizer.kl_target, small.optimizer.kl_stop) == (0.02, 0.03)
    # a single pass of the policy is over fresh data, however many the value function makes
    once = ppo(policy_epochs=1, value_epochs=3, kl_target=0.02)
    assert scaling.scale(once, 4, epochs="spread")[0].optimizer.kl_target == 0.005


def test_gradients_hardly_change_beyond_the_noise_scale() -> None:
    config = ppo_ewma(max_grad_norm=0.5, adam_eps=1e-5)
    batch = config.optimization_batch
    # E|g|^2 = |G|^2 (1 + B_noise/B): at B = B_noise it grows from 2 to 5, and so the norm by sqrt(2.5)
    near, _ = scaling.scale(config, 4, noise_scale=float(batch), max_grad_norm="sqrt")
    assert near.optimizer.max_grad_norm == pytest.approx(0.5 * 2.5**0.5)
    assert near.optimizer.adam_eps == pytest.approx(1e-5 * 2.5**0.5)
    assert not {"max_grad_norm", "adam_eps"} & {finding.check for finding in scaling.validity(near, config)}
    # (8192 + 4) / (8192 + 1)
    beyond, _ = scaling.scale(config, 4, noise_scale=1.0, max_grad_norm="sqrt")
    assert beyond.optimizer.adam_eps == pytest.approx(1e-5 * (8196 / 8193) ** 0.5)


def test_a_step_size_of_0_stays() -> None:
    assert scaling.scale(ppo_ewma(step_size=0.0), 4)[0].optimizer.step_size == 0
