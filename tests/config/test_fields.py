"""Dotted access, and the hints for names that are not ours."""

from __future__ import annotations

import dataclasses

import pytest

from anybatch.config import fields
from anybatch.config.frameworks.tables import FRAMEWORKS
from anybatch.config.io import from_dict, to_dict
from anybatch.config.schema import SourceConfig, TrainConfig
from anybatch.errors import ConfigError
from anybatch.presets import ppo


def test_get_and_replace() -> None:
    config = TrainConfig()
    assert fields.get(config, "rollout.source") == SourceConfig()
    changed = fields.replace(config, "rollout.source.delay", 3)
    assert fields.get(changed, "rollout.source.delay") == 3
    assert fields.replace(changed, "rollout.source.delay", 0) == config
    with pytest.raises(TypeError):
        fields.replace(config, "rollout.source.dealy", 3)


def test_types_name_every_field_and_section() -> None:
    types = fields.types()
    assert types["rollout"] is type(TrainConfig().rollout)
    assert types["rollout.source.delay"] is int
    assert list(types).index("rollout") < list(types).index("rollout.steps")
    assert set(types) - set(fields.names()) == {name for name, x in types.items() if dataclasses.is_dataclass(x)}


def test_a_dictionary_without_some_fields() -> None:
    values = to_dict(TrainConfig(), without=["rollout.source.delay", "log", "workers"])
    assert "delay" not in values["rollout"]["source"] and "max_lag" in values["rollout"]["source"]
    assert "log" not in values and "workers" not in values
    assert from_dict(values) == TrainConfig()


@pytest.mark.parametrize("full", fields.names())
def test_a_short_name_means_a_field_only_if_no_other_field_ends_in_it(full: str) -> None:
    short = full.rpartition(".")[2]
    others = [x for x in fields.names() if x != full and x.endswith((f".{short}", f"_{short}"))]
    if short in fields.names():
        assert fields.resolve(short) == short  # the full name of a field without a section
    elif short in fields.SHORT:
        assert others and fields.resolve(short) == fields.SHORT[short] in [full, *others]
    elif others:
        with pytest.raises(ConfigError, match=f"{short} is ambiguous") as error:
            fields.resolve(short)
        assert all(name in str(error.value) for name in [full, *others])
    else:
        assert fields.resolve(short) == full


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("n_epochs", "Stable-Baselines3 is optimizer.policy_epochs and optimizer.value_epochs"),
        (
            "batch_size",
            "Stable-Baselines3, TorchRL is optimizer.minibatches = env.num_envs * rollout.steps / batch_size",
        ),
        ("ent_coef", "Stable-Baselines3, CleanRL is policy.entropy_coefficient"),
        ("clip_range", "Stable-Baselines3 is policy.clip"),
        ("lr", "RLlib, TorchRL is optimizer.step_size"),
        ("learning_rate", "rsl_rl is optimizer.step_size"),
        ("gamma", "is advantage.discount"),
        ("num_steps", "CleanRL is rollout.steps"),
        ("n_steps", "Stable-Baselines3 is rollout.steps"),
        ("update_epochs", "CleanRL is optimizer.policy_epochs and"),
        ("num_minibatches", "CleanRL is optimizer.minibatches"),
        ("num_sgd_iter", "RLlib is optimizer.policy_epochs and"),
        ("sgd_minibatch_size", "env.num_envs * rollout.steps / sgd_minibatch_size"),
        ("num_learning_epochs", "rsl_rl is optimizer.policy_epochs and"),
        ("kl_coef", "TRL is policy.kl_coefficient (of the KL to the proximal policy"),
        ("lambda_", "RLlib is advantage.gae_lambda"),
        ("vf_coef", "Stable-Baselines3 is optimizer.value_coefficient; the vf_coef of CleanRL, TRL is twice"),
        ("target_kl", "Stable-Baselines3 is optimizer.kl_stop / 1.5; the target_kl of CleanRL is optimizer.kl_stop"),
        ("seed", "the seed of Stable-Baselines3, CleanRL is the argument seed of train"),
        ("num_envs_per_env_runner", "RLlib is env.num_envs / num_env_runners"),
        ("empirical_normalization", "rsl_rl is observation.normalize"),
        ("init_noise_std", "rsl_rl is exp(model.gaussian.log_std)"),
        ("per_device_train_batch_size", "TRL is optimizer.minibatches = "),
        ("use_sde", "not available here"),
        ("clip_rang", "clip_rang is not a field of the configuration"),
    ],
)
def test_names_of_other_frameworks_are_answered_with_ours(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ppo(**{name: 1})
    text = str(error.value)
    assert text.startswith(f"{name} is not a field of the configuration")
    assert words in text and "\n" not in text and "did you mean" not in text
    with pytest.raises(ConfigError) as error:
        from_dict({"optimizer": {name: 1}})
    assert words.replace("clip_rang is", "optimizer.clip_rang is") in str(error.value)


def test_a_number_is_no_name() -> None:
    with pytest.raises(ConfigError, match=r"^1 is not a field"):
        fields.flat({1: 2})  # type: ignore[dict-item]


def test_names_that_we_share_are_fields() -> None:
    for name in ("gae_lambda", "num_envs", "max_grad_norm", "center_of_mass", "schedule"):
        assert fields.resolve(name) in fields.names()


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=list(FRAMEWORKS))
def test_tables_name_fields_that_exist(framework: object) -> None:
    table = next(x for x in FRAMEWORKS.values() if x is framework)
    for row in sum(table.calls.values(), table.known):
        assert not row.field or row.field in fields.names()
        assert row.value or row.field or row in table.known
