"""Hyperparameters and the batch that they come from."""

from __future__ import annotations

import pytest

from anybatch.config.fields import flat
from anybatch.config.io import override
from anybatch.errors import ConfigError
from anybatch.presets import ppg_ewma, ppo, ppo_ewma
from anybatch.scaling import from_ppo, rescale, scale
from anybatch.scaling.changes import apply_changes
from anybatch.scaling.options import Adjustments
from anybatch.scaling.tuned_at import TunedAt, carry, divide


def test_it_is_rescale_of_the_configuration_at_that_batch() -> None:
    base = ppg_ewma()
    given = {"env.num_envs": 16, "optimizer.step_size": 3e-4, "optimizer.minibatches": 4}
    config = override(base, given)
    carried = carry(base, config, given, TunedAt(num_envs=64, minibatches=2))
    tuned = override(config, {"env.num_envs": 64, "optimizer.minibatches": 2})
    assert carried.tuned == tuned
    assert (carried.config, carried.changes) == rescale(tuned, num_envs=16, minibatches=4)


def test_the_preset_s_batch_is_where_it_was_tuned() -> None:
    """--tuned-at with the preset's own batch gives what a preset without any numbers of the user's gives."""
    base = ppo_ewma()
    config = override(base, {"num_envs": 16})
    plain = carry(base, config, {"env.num_envs"})
    stated = carry(base, config, {"env.num_envs"}, TunedAt(num_envs=256))
    assert (plain.config, plain.changes) == (stated.config, stated.changes) == rescale(base, num_envs=16)
    assert plain.notes == stated.notes == []


def test_the_age_of_the_data_follows_only_a_stale_base() -> None:
    fresh, stale = ppg_ewma(), override(ppg_ewma(), {"rollout.source": {"kind": "delayed", "delay": 2}})
    asynchronous = override(fresh, {"rollout.source.kind": "asynchronous", "env.num_envs": 64})
    assert carry(fresh, asynchronous, []).config.rollout.source.max_lag == 1
    assert carry(fresh, asynchronous, [], TunedAt(num_envs=256)).config.rollout.source.max_lag == 4
    smaller = override(stale, {"env.num_envs": 64})
    assert carry(stale, smaller, []).config.rollout.source.delay == 8
    assert carry(stale, smaller, [], options=Adjustments(staleness=False)).config.rollout.source.delay == 2
    by_hand = override(smaller, {"rollout.source.delay": 3})
    assert carry(stale, by_hand, ["rollout.source.delay"]).config.rollout.source.delay == 3


def test_no_limit_is_an_answer_too() -> None:
    base = ppo_ewma(max_grad_norm=0.5)
    config = override(base, {"num_envs": 16, "max_grad_norm": None})
    options = Adjustments(max_grad_norm="sqrt")
    assert (
        carry(base, config, {"env.num_envs", "optimizer.max_grad_norm"}, options=options).config
        == (rescale(override(base, {"max_grad_norm": None}), num_envs=16)[0])
    )
    # 0.5 x sqrt(256 / 16) without the user's answer
    assert carry(base, override(base, {"num_envs": 16}), {"env.num_envs"}, options=options).config.optimizer == (
        rescale(base, num_envs=16, overrides={"optimizer.max_grad_norm": 2.0})[0].optimizer
    )


def test_divide() -> None:
    base = ppo_ewma()
    config = override(base, {"step_size": 3e-4, "steps": 128})
    given = ["optimizer.step_size", "rollout.steps"]
    tuned = override(config, {"num_envs": 32})
    carried = divide(base, config, given, 4, TunedAt(num_envs=32))
    assert (carried.config, carried.changes) == scale(tuned, 4)
    with pytest.raises(ConfigError, match=r"rollout.steps 128 already sets the batch .* use tuned_at.rollout_steps"):
        divide(base, config, given, 4)


@pytest.mark.parametrize(
    ("changes", "tuned_at", "words"),
    [
        ({"minibatches": 16}, TunedAt(minibatches=4), "optimizer.minibatches 16 .* omit divide_batch_by"),
        ({"steps": 64}, TunedAt(num_envs=8, rollout_steps=128), "rollout.steps 64 .* omit divide_batch_by"),
        ({"num_envs": 64}, TunedAt(num_envs=64), "env.num_envs 64 .* omit divide_batch_by"),
        ({"num_envs": 64}, TunedAt(minibatches=4), "env.num_envs 64 .* use tuned_at.num_envs"),
    ],
)
def test_divide_refuses_a_second_batch(changes: dict[str, int], tuned_at: TunedAt, words: str) -> None:
    base, given = ppo_ewma(), flat(changes)
    with pytest.raises(ConfigError, match=words):
        divide(base, override(base, changes), given, 4, tuned_at)


def test_divide_keeps_minibatches_that_both_name() -> None:
    base = ppo_ewma()
    config = override(base, {"minibatches": 16})
    carried = divide(base, config, ["optimizer.minibatches"], 4, TunedAt(minibatches=16))
    assert carried.config == scale(config, 4)[0]


def test_an_automatic_number_is_no_number_by_hand() -> None:
    base = ppg_ewma()
    config = override(base, {"num_envs": 16, "aux.minibatches": None})
    assert carry(base, config, {"env.num_envs", "aux.minibatches"}).notes == []
    assert divide(base, base, {"aux.minibatches"}, 16).notes == []


@pytest.mark.parametrize("tuned_at", [TunedAt(), TunedAt(num_envs=64)])
def test_minibatches_of_a_fixed_size_are_computed(tuned_at: TunedAt) -> None:
    base, options = ppo_ewma(), Adjustments(rule="fixed-minibatch")
    carried = carry(base, override(base, {"num_envs": 512}), ["env.num_envs"], tuned_at, options)
    assert carried.config.optimizer.minibatches == 8 * 512 // (tuned_at.num_envs or 256)


def test_a_number_of_the_batch_that_is_given_is_no_number_to_compute() -> None:
    base = ppg_ewma()
    # by the rule one of 4 workers would remain; the user has 4, which is also the preset's number
    config = override(base, {"num_envs": 64, "workers": 4})
    scaled = carry(base, config, {"env.num_envs", "workers"}).config
    assert (scaled.workers, scaled.aux.minibatches_per_epoch, scaled.aux.step_size) == (4, 512, 5e-4)
    assert carry(base, base, {"workers"}).changes == []
    for minibatches in (4, 8):  # 8 is the preset's
        config = override(base, {"num_envs": 64, "minibatches": minibatches})
        given = {"env.num_envs", "optimizer.minibatches"}
        with pytest.raises(ConfigError, match="leave minibatches out"):
            carry(base, config, given, options=Adjustments(rule="fixed-minibatch"))


def test_ppo_is_converted_at_the_batch_where_it_was_tuned() -> None:
    base = ppo()
    config = override(base, {"num_envs": 16, "minibatches": 16})
    carried = carry(base, config, {"env.num_envs", "optimizer.minibatches"}, ppo=True)
    assert carried.config == rescale(from_ppo(base), num_envs=16, minibatches=16)[0]
    unchanged = carry(base, base, (), ppo=True)
    assert unchanged.config == from_ppo(base)


def test_the_conversion_from_ppo_is_among_the_changes() -> None:
    """16 gradient steps: (15 + sqrt(255)) / 2 = 15.4844, and 4 times that with 2 of 8 environments."""
    base = ppo("gym:CartPole-v1", num_envs=8, rollout_steps=128, minibatches=4, policy_epochs=4, value_epochs=4)
    small = override(base, {"num_envs": 2})
    carried = [
        carry(base, base, (), ppo=True),
        carry(base, small, {"env.num_envs"}, ppo=True),
        divide(base, base, (), 4, ppo=True),
        carry(base, small, {"env.num_envs"}, options=Adjustments(ewma=False), ppo=True),
    ]
    for result, after, rule in zip(
        carried, (15.4844, 61.9374, 61.9374, 15.4844), ("from PPO", *2 * ["from PPO, x 4"], "from PPO"), strict=True
    ):
        proximal, center = result.changes[:2]
        assert (proximal.field, proximal.before, proximal.after) == ("policy.proximal", "behavior", "ewma")
        assert (center.field, center.before, center.rule) == ("policy.center_of_mass", 8.0, rule)
        assert center.after == result.config.policy.center_of_mass == pytest.approx(after, abs=1e-4)
        assert len({change.field for change in result.changes}) == len(result.changes)
        assert apply_changes(base, result.changes) == result.config


def test_a_run_of_one_gradient_step_may_come_from_a_ppo_of_several() -> None:
    base = ppo("gym:CartPole-v1", num_envs=8, rollout_steps=128, minibatches=4, policy_epochs=1, value_epochs=1)
    run = override(base, {"minibatches": 1})
    carried = carry(base, run, {"optimizer.minibatches"}, TunedAt(minibatches=4), ppo=True)
    tuned = from_ppo(base).policy.center_of_mass  # of 4 gradient steps
    assert carried.config.policy.center_of_mass == pytest.approx(tuned / 4)


def test_numbers_without_end_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tuned_at.num_envs is 1000.*, but can be at most 4,194,304"):
        TunedAt(num_envs=10**400).numbers()
