"""Configurations: round trips, changes by name, the paper's tables, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from anybatch.config import fields
from anybatch.config.io import from_dict, override, read_config_file, to_dict, to_yaml
from anybatch.config.schema import EnvConfig, OptimizerConfig, PolicyConfig, TrainConfig
from anybatch.config.validation import _RANGES, validate
from anybatch.errors import AnybatchError, ConfigError
from anybatch.presets import PRESETS, ppg, ppg_ewma, ppo, ppo_ewma

ENV = "gym:CartPole-v1"


def sentence(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_round_trip(preset: str) -> None:
    config = PRESETS[preset](ENV, **{"env.options": {"a": 1, "b": 0.5, "c": "x", "d": True}, "policy.clip": math.inf})
    values = yaml.safe_load(to_yaml(config, seed=3))
    assert next(iter(values)) == "seed"
    assert values.pop("seed") == 3
    assert from_dict(values) == config
    assert from_dict(to_dict(config)) == config


def test_yaml_has_every_field() -> None:
    values = yaml.safe_load(to_yaml(TrainConfig()))
    for name in fields.names():
        inner = values
        for part in name.split("."):
            inner = inner[part]  # KeyError if it is missing


def test_missing_fields_take_their_defaults() -> None:
    assert from_dict({}) == TrainConfig()
    assert from_dict({"rollout": {"steps": 7}}).rollout.steps == 7
    assert from_dict({"rollout": {"steps": 7}}).optimizer == OptimizerConfig()


def test_plain_numbers_are_taken_for_what_they_mean() -> None:
    config = from_dict({"optimizer": {"adam_betas": [0.8, 0], "step_size": 1, "adam_eps": "1e-5", "minibatches": 4.0}})
    assert config.optimizer.adam_betas == (0.8, 0.0)
    assert config.optimizer.step_size == 1.0
    assert type(config.optimizer.step_size) is float
    assert config.optimizer.adam_eps == 1e-5  # YAML 1.1 reads 1e-5 as text
    assert config.optimizer.minibatches == 4
    assert type(config.optimizer.minibatches) is int
    options = override(TrainConfig(), {"env.options": {"a": 1, "b": True, "c": "1"}}).env.options
    assert [type(x) for x in options.values()] == [int, bool, str]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"optimiser": {}}, ["optimiser", "optimizer"]),
        ({"optimizer": {"stepsize": 1.0}}, ["optimizer.stepsize", "optimizer.step_size"]),
        ({"rollout": {"source": {"dlay": 1}}}, ["rollout.source.dlay", "rollout.source.delay"]),
        ({"env": {"num_envs": "many"}}, ["env.num_envs", "'many'", "integer"]),
        ({"env": {"num_envs": 2.5}}, ["env.num_envs", "2.5", "integer"]),
        ({"env": {"num_envs": True}}, ["env.num_envs", "True", "integer"]),
        ({"env": {"num_envs": None}}, ["env.num_envs", "None", "integer"]),
        ({"optimizer": {"step_size": "fast"}}, ["optimizer.step_size", "'fast'", "number"]),
        ({"optimizer": {"step_size": False}}, ["optimizer.step_size", "False", "number"]),
        ({"optimizer": {"max_grad_norm": "x"}}, ["optimizer.max_grad_norm", "'x'", "none"]),
        ({"optimizer": {"adam_betas": [0.9]}}, ["optimizer.adam_betas", "[0.9]", "2 values"]),
        ({"optimizer": {"adam_betas": [0.9, "x"]}}, ["optimizer.adam_betas", "'x'"]),
        ({"reward": {"normalize": 1}}, ["reward.normalize", "1", "true or false"]),
        ({"policy": {"objective": "clipped"}}, ["policy.objective", "'clipped'", "clip, kl"]),
        ({"precision": "fp16"}, ["precision", "'fp16'", "auto, fp32, bf16"]),
        ({"device": 0}, ["device", "0", "text"]),
        ({"env": {"options": [1]}}, ["env.options", "[1]"]),
        ({"env": {"options": {"a": [1]}}}, ["env.options.a", "[1]"]),
        ({"env": None}, ["env", "section"]),
        ([1], ["configuration", "section"]),
    ],
)
def test_bad_values_give_one_sentence_that_names_the_field(values: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(values)
    for part in parts:
        assert part in sentence(error)


# ---------------------------------------------------------------- changes by name


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("num_envs", "env.num_envs", 3),
        ("env.num_envs", "env.num_envs", 3),
        ("env_num_envs", "env.num_envs", 3),
        ("eval_num_envs", "eval.num_envs", 3),
        ("every", "eval.every", 3),
        ("total_env_steps", "total_env_steps", 3),
        ("steps", "rollout.steps", 3),
        ("rollout_source_delay", "rollout.source.delay", 3),
        ("delay", "rollout.source.delay", 3),
        ("source.delay", "rollout.source.delay", 3),
        ("step_size", "optimizer.step_size", 0.5),  # aux has one too: the other is meant
        ("minibatches", "optimizer.minibatches", 3),
        ("aux_step_size", "aux.step_size", 0.5),
        ("aux.minibatches", "aux.minibatches", 3),
        ("aux_epochs", "aux.epochs", 3),
        ("discount", "advantage.discount", 0.5),  # not reward.return_discount
        ("policy_iterations", "aux.policy_iterations", 3),
        ("policy_epochs", "optimizer.policy_epochs", 3),
        ("policy_clip", "policy.clip", 0.5),
        ("center_of_mass", "policy.center_of_mass", 2.0),
    ],
)
def test_change_by_name(name: str, path: str, value: Any) -> None:
    start = TrainConfig()
    changed = override(start, {name: value})
    assert fields.get(changed, path) == value
    different = [leaf for leaf in fields.names() if fields.get(changed, leaf) != fields.get(start, leaf)]
    assert different == [path]
    assert start == TrainConfig()


def test_every_full_name_is_its_own_field() -> None:
    names = list(fields.types())
    assert len({name.replace(".", "_") for name in names}) == len(names)
    for name in fields.names():
        for spelling in (name, name.replace(".", "_")):
            assert override(TrainConfig(), {spelling: fields.get(TrainConfig(), name)}) == TrainConfig()


def test_change_a_section() -> None:
    start = TrainConfig()
    changed = override(start, {"optimizer": {"step_size": 1.0, "minibatches": 2}, "rollout": {"source": {"delay": 4}}})
    assert changed.optimizer == dataclasses.replace(start.optimizer, step_size=1.0, minibatches=2)
    assert changed.rollout.source.delay == 4
    assert changed.rollout.steps == start.rollout.steps
    assert override(start, {"optimizer": OptimizerConfig(minibatches=2)}).optimizer.minibatches == 2
    assert override(start, {"optimizer": {}}) == start


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"normalize": False}, ["normalize is ambiguous", "reward.normalize", "advantage.normalize"]),
        ({"kind": "sgd"}, ["kind is ambiguous", "rollout.source.kind", "optimizer.kind"]),
        ({"options": {}}, ["options is ambiguous", "env.options", "model.options"]),
        (
            {"epochs": 3},
            ["epochs is ambiguous: it may be aux.epochs, optimizer.policy_epochs or optimizer.value_epochs"],
        ),
        ({"optimizer": {"stepsize": 1.0}}, ["optimizer.stepsize is not a field", "did you mean optimizer.step_size?"]),
        ({"step_siz": 1.0}, ["step_siz is not a field", "step_size"]),
        ({"optimizer": {"foo": 1}}, ["optimizer.foo is not a field"]),
        ({"num_envs": "x"}, ["env.num_envs", "'x'"]),
        ({"objective": "ppo"}, ["policy.objective", "'ppo'", "clip, kl"]),
        ({"optimizer": 3}, ["optimizer", "3"]),
    ],
)
def test_bad_changes(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        override(TrainConfig(), changes)
    for part in parts:
        assert part in sentence(error)


def test_the_example_of_the_presets_works() -> None:
    config = ppo_ewma("procgen:coinrun-hard", num_envs=64, clip=0.1)
    assert (config.env.id, config.env.num_envs, config.policy.clip) == ("procgen:coinrun-hard", 64, 0.1)


# ---------------------------------------------------------------- the paper's tables

SHARED_DEFAULTS = {  # appendix B, table 1
    "workers": 4,
    "env.num_envs": 4 * 64,  # workers * parallel environments per worker
    "rollout.steps": 256,
    "optimizer.minibatches": 8,
    "optimizer.kind": "adam",
    "optimizer.step_size": 5e-4,
    "optimizer.value_coefficient": 0.5,
    "policy.entropy_coefficient": 0.01,
    "advantage.discount": 0.999,
    "advantage.gae_lambda": 0.95,
    "reward.normalize": True,
    "advantage.normalize": True,
    "total_env_steps": 100_000_000,
    # what the table leaves to Adam, and design.md section 4 to the published code
    "optimizer.adam_betas": (0.9, 0.999),
    "optimizer.adam_eps": 1e-8,
    "optimizer.schedule": "constant",
    "optimizer.max_grad_norm": None,
    "optimizer.epoch_window": 1.0,
    "optimizer.kl_target": None,
    "optimizer.kl_factor": 1.5,
    "optimizer.kl_stop": None,
    "optimizer.follow_ess": False,
    "policy.interpolated": False,
    "policy.second_moment": None,
    "reward.return_discount": 0.99,
    "reward.bound": 10.0,
    "advantage.span": 1.0,
    "policy.importance": "behavior",
    "policy.max_importance_ratio": 100.0,
    "rollout.source.kind": "synchronous",
    "rollout.source.delay": 0,
    "env.id": "procgen:starpilot-hard",
}
PPO = {  # table 2 and the clipping parameter of table 1
    "optimizer.policy_epochs": 3,
    "optimizer.value_epochs": 3,
    "policy.objective": "clip",
    "policy.clip": 0.2,
    "aux.enabled": False,
    "model.architecture": "shared",
}
PPG = {  # table 3
    "aux.enabled": True,
    "aux.policy_iterations": 32,
    "optimizer.policy_epochs": 1,
    "optimizer.value_epochs": 1,
    "aux.epochs": 6,
    "aux.minibatches_per_epoch": 16 * 32,
    "aux.clone_coefficient": 1.0,
    "aux.step_size": 5e-4,
    "policy.objective": "kl",
    "policy.kl_coefficient": 1.0,
    "model.architecture": "dual",
}
COUPLED = {"policy.proximal": "behavior"}
EWMA = {"policy.proximal": "ewma", "policy.center_of_mass": 8.0}  # table 4: beta = 8/9 = .889


@pytest.mark.parametrize(
    ("preset", "tables"),
    [
        (ppo, [SHARED_DEFAULTS, PPO, COUPLED]),
        (ppo_ewma, [SHARED_DEFAULTS, PPO, EWMA]),
        (ppg, [SHARED_DEFAULTS, PPG, COUPLED]),
        (ppg_ewma, [SHARED_DEFAULTS, PPG, EWMA]),
    ],
)
def test_presets_hold_the_papers_tables(preset: Callable[..., TrainConfig], tables: list[dict[str, Any]]) -> None:
    config = preset()
    for table in tables:
        for name, value in table.items():
            assert fields.get(config, name) == value, name
    # every other field of these sections is named above
    named = {name for table in (*tables, EWMA, {"policy.kl_coefficient": 0, "policy.clip": 0}) for name in table}
    beside = {
        "policy.clip_schedule",
        "policy.entropy_schedule",
        "optimizer.shuffle",
        "policy.kl_estimator",
        "policy.allow_stale_coupled",
        "optimizer.sgd_momentum",
    }
    sections = ("optimizer.", "policy.", "advantage.", "reward.")
    assert {name for name in fields.names() if name.startswith(sections)} <= named | beside
    assert validate(config) is config
    com = config.policy.center_of_mass
    assert round(com / (1 + com), 3) == 0.889
    assert config.iteration_batch == 65_536
    assert config.optimization_batch == 8_192


def test_presets_take_environment_and_changes() -> None:
    config = ppg_ewma(ENV, num_envs=2, center_of_mass=3.0, aux_epochs=1)
    assert (config.env.id, config.env.num_envs, config.policy.center_of_mass, config.aux.epochs) == (ENV, 2, 3.0, 1)
    kinds = ("", "-control", "-mujoco", "-atari")
    assert set(PRESETS) == {"ppg", "ppg-ewma", *(f"{name}{kind}" for name in ("ppo", "ppo-ewma") for kind in kinds)}
    with pytest.raises(ConfigError, match="num_env is not a field"):
        ppo(ENV, num_env=3)


# ---------------------------------------------------------------- validation

BAD: dict[str, list[Any]] = {
    "total_env_steps": [0, -5],
    "workers": [0],
    "micro_batch": [0, -1],
    "checkpoint_seconds": [-1.0, math.nan],
    "keep_checkpoints": [0],
    "env.num_envs": [0, -3],
    "env.threads": [-1],
    "env.frame_stack": [0, 1001, 10**30],
    "rollout.steps": [0],
    "rollout.source.delay": [-1],
    "rollout.source.max_lag": [-1],
    "rollout.source.ray_workers": [-1],
    "env.step_timeout": [0.0, -1.0, math.nan],
    "observation.clip": [0.0, -1.0, math.nan],
    "model.recurrent_width": [0],
    "model.policy_gain": [-0.1, math.nan, math.inf],
    "model.value_gain": [-0.1, math.nan, math.inf],
    "model.gaussian.log_std": [math.nan, math.inf, -20.1, 100.0],
    "reward.return_discount": [-0.1, 1.0, 1.5, math.nan],
    "reward.bound": [0.0, -1.0, math.nan],
    "advantage.discount": [-0.5, 1.01, math.nan, math.inf],
    "advantage.gae_lambda": [-0.5, 1.01, math.nan, math.inf],
    "advantage.span": [0.99, 0.0, -1.0, math.nan, math.inf],
    "policy.clip": [-0.1, math.nan],
    "policy.kl_coefficient": [-1.0, math.nan, math.inf],
    "policy.center_of_mass": [-0.1, math.nan, math.inf],
    "policy.max_importance_ratio": [0.0, 0.99, -1.0, math.nan],
    "policy.entropy_coefficient": [math.nan, math.inf],
    "optimizer.step_size": [-1e-4, math.nan, math.inf],
    "optimizer.adam_eps": [0.0, -1.0, math.nan, math.inf],
    "optimizer.sgd_momentum": [-0.1, 1.0, math.nan],
    "optimizer.minibatches": [0, -1],
    "optimizer.policy_epochs": [0],
    "optimizer.value_epochs": [0],
    "policy.second_moment": [0.0, -1.0, math.nan, math.inf],
    "optimizer.kl_target": [0.0, -0.01, math.nan, math.inf],
    "optimizer.kl_factor": [1.0, 0.5, math.nan, math.inf],
    "optimizer.kl_stop": [0.0, -0.01, math.nan, math.inf],
    "optimizer.epoch_window": [0.5, 0.0, math.nan, math.inf],
    "optimizer.value_coefficient": [-0.5, math.nan, math.inf],
    "optimizer.adam_betas": [(1.0, 0.9), (0.9, -0.1), (math.nan, 0.9)],
    "optimizer.max_grad_norm": [0.0, -1.0, math.nan],
    "aux.policy_iterations": [0],
    "aux.epochs": [-1],
    "aux.minibatches": [0],
    "aux.step_size": [-1.0, math.nan, math.inf],
    "aux.clone_coefficient": [-1.0, math.nan, math.inf],
    "eval.every": [0],
    "eval.episodes": [0],
    "eval.num_envs": [0, -3],
    "eval.max_steps": [0],
    "eval.stop_at": [math.nan, math.inf],
}
GOOD: dict[str, list[Any]] = {
    "checkpoint_seconds": [0.0, math.inf],
    "reward.return_discount": [0.0, 0.999],
    "reward.bound": [math.inf],
    "observation.clip": [math.inf],
    "model.recurrent_width": [1, None],
    "model.policy_gain": [0.0, None],
    "model.gaussian.log_std": [-20.0, 20.0],
    "model.gaussian.log_std_bounds": [(-5.0, 2.0), None],
    "advantage.discount": [0.0, 1.0],
    "advantage.gae_lambda": [0.0, 1.0],
    "advantage.span": [1.0, 1000.0],
    "policy.clip": [0.0, 1.5, math.inf],  # PPO without clipping is allowed: nothing but the clip would use prox
    "policy.center_of_mass": [0.0, 2048.0],
    "policy.max_importance_ratio": [1.0, math.inf],
    "policy.entropy_coefficient": [0.0, -0.1],
    "optimizer.step_size": [0.0],
    "optimizer.adam_betas": [(0.0, 0.0)],
    "optimizer.max_grad_norm": [0.5, None],
    "optimizer.minibatches": [1, 256],
    "optimizer.epoch_window": [1.0, 1.5, 64.0],
    "aux.epochs": [0],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_out_of_range_is_refused(name: str, value: Any) -> None:
    config = override(ppo(ENV), {name: value})
    with pytest.raises(ConfigError) as error:
        validate(config)
    text = sentence(error)
    assert text.startswith(f"{name} is {value}")
    assert len(text) > len(f"{name} is {value}, but must be ")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_value_at_the_edge_is_accepted(name: str, value: Any) -> None:
    config = override(ppo(ENV), {name: value})
    assert validate(config) is config


def test_every_number_has_a_rule() -> None:
    hints: dict[str, Any] = {}

    def collect(kind: type, prefix: str) -> None:
        for name, hint in typing.get_type_hints(kind).items():
            if dataclasses.is_dataclass(hint):
                collect(typing.cast(type, hint), f"{prefix}{name}.")
            else:
                hints[prefix + name] = hint

    collect(TrainConfig, "")
    numbers = {n for n, h in hints.items() if h in (int, float) or h in (tuple[float, float], float | None, int | None)}
    assert numbers == set(BAD)
    assert set(_RANGES) < numbers


STALE: dict[str, Any] = {"rollout.source.kind": "delayed", "delay": 4}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_envs": 9, "minibatches": 4, "steps": 10}, ["optimizer.minibatches 4", "9 environments", "10 steps"]),
        ({"policy.clip": math.inf, "proximal": "ewma"}, ["policy.proximal is ewma", "policy.clip inf"]),
        ({"policy.clip": math.inf, "proximal": "recent"}, ["policy.proximal is recent", "policy.clip inf"]),
        (
            {"objective": "kl", "kl_coefficient": 0.0, "proximal": "ewma"},
            ["policy.proximal is ewma", "policy.kl_coefficient 0"],
        ),
        ({"importance": "proximal"}, ["policy.importance", "policy.proximal is behavior"]),
        (
            {"importance": "proximal", "proximal": "ewma", "rollout.source.kind": "delayed"},
            ["policy.importance", "ewma", "behavior"],
        ),
        (
            {"importance": "proximal", "proximal": "recent"},
            ["policy.importance", "rollout.source.kind", "delayed"],
        ),
        (
            {
                "importance": "proximal",
                "proximal": "recent",
                "rollout.source.kind": "delayed",
                "allow_stale_coupled": True,
                "epoch_window": 4.0,
            },
            ["optimizer.epoch_window is 4", "policy.importance proximal", "biases"],
        ),
        ({"epoch_window": 4.0, "policy_epochs": 1, "value_epochs": 1}, ["optimizer.epoch_window is 4", "one epoch"]),
        (
            {"kl_target": 0.01, "policy_epochs": 1, "minibatches": 1},
            ["optimizer.kl_target is 0.01", "one gradient step"],
        ),
        ({"kl_stop": 0.01, "policy_epochs": 1}, ["optimizer.kl_stop is 0.01", "one policy epoch"]),
        ({"interpolated": True, "proximal": "ewma"}, ["policy.interpolated is true", "policy.proximal ewma"]),
        ({"interpolated": True, "objective": "kl"}, ["policy.interpolated is true", "kl_estimator half-squared"]),
        ({"interpolated": True}, ["policy.interpolated is true", "rollout.source.kind synchronous"]),
        ({"interpolated": True, **STALE, "compile": True}, ["compile is True", "policy.interpolated"]),
        ({"interpolated": True, **STALE, "epoch_window": 4.0}, ["optimizer.epoch_window is 4", "policy.interpolated"]),
        ({"interpolated": True, **STALE, "kl_target": 0.01}, ["optimizer.kl_target is 0.01", "policy.interpolated"]),
        ({"interpolated": True, **STALE, "kl_stop": 0.01}, ["optimizer.kl_stop is 0.01", "policy.interpolated"]),
        # with one gradient step an iteration, the recent policy is the policy itself, however old the data
        (
            {**STALE, "proximal": "recent", "kl_target": 0.01, "policy_epochs": 1, "minibatches": 1},
            ["optimizer.kl_target is 0.01", "one gradient step", "recent"],
        ),
        ({"proximal": "ewma", "center_of_mass": 0.0}, ["policy.center_of_mass is 0", "policy.proximal behavior"]),
        ({"num_envs": 1, "steps": 1, "minibatches": 1}, ["advantage.normalize", "one sample", "advantage.span"]),
        ({"delay": 3}, ["rollout.source.delay is 3", "synchronous", "delayed"]),
        *(
            (
                {"rollout.source": source, **variant},
                [f"figure {panel}", "figure 1(b)", "policy.allow_stale_coupled true"],
            )
            for source in ({"kind": "delayed", "delay": 1}, {"kind": "asynchronous"})
            for panel, variant in (
                ("1(a)", {"proximal": "recent", "importance": "proximal"}),
                ("1(c)", {}),
                ("1(c)", {"objective": "kl"}),
            )
        ),
        (
            {"policy.clip": math.inf, "clip_schedule": "linear"},
            ["policy.clip_schedule is", "policy.clip is inf"],
        ),
        (  # (x + 9) / 11 of it rounds to 1, whose atanh is infinite
            {"log_std_bounds": (-20.0, 2.0), "log_std": math.nextafter(2, 0)},
            ["model.gaussian.log_std is 1.9999", "inside model.gaussian.log_std_bounds"],
        ),
        ({"deterministic": True}, ["rollout.source.deterministic is True", "asynchronous"]),
        ({"ray_workers": 2}, ["rollout.source.ray_workers is 2", "asynchronous"]),
        (
            {"rollout.source.kind": "asynchronous", "deterministic": True, "compile": True, "proximal": "recent"},
            ["rollout.source.deterministic is true", "with compile"],
        ),
        (
            {"rollout.source": {"kind": "asynchronous", "ray_workers": 3}, "proximal": "recent"},
            ["rollout.source.ray_workers is 3", "env.num_envs 256"],
        ),
    ],
)
def test_combinations_that_make_no_sense(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        validate(ppo(ENV, **changes))
    for part in parts:
        assert part in sentence(error)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"allow_stale_coupled": True, "rollout.source.kind": "delayed", "delay": 4, **variant}
            for variant in ({"proximal": "recent", "importance": "proximal"}, {})  # figures 1(a) and 1(c)
        ),
        {"proximal": "recent", "rollout.source.kind": "delayed", "delay": 4},  # (b), decoupled
        {"proximal": "recent", "importance": "proximal", "rollout.source.kind": "delayed", "delay": 0},
        {"rollout.source": {"kind": "asynchronous", "max_lag": 0}},
        {"rollout.source": {"kind": "asynchronous", "ray_workers": 4}, "proximal": "ewma"},
        {"policy.clip": math.inf, "rollout.source.kind": "delayed", "delay": 4},  # nothing is limited
        {"proximal": "ewma", "rollout.source.kind": "delayed", "delay": 4},
        {"rollout.source.kind": "delayed", "delay": 0},
        {"interpolated": True, **STALE},
        {"interpolated": True, "objective": "kl", "kl_estimator": "half-squared", **STALE},
        {"epoch_window": 4.0},  # coupled, but as old in environment steps as at the tuned batch
        {"epoch_window": 4.0, "proximal": "ewma", "rollout.source.kind": "delayed", "delay": 4},
        {"num_envs": 9, "minibatches": 4, "steps": 8},
        {"num_envs": 1, "minibatches": 8, "steps": 256},
    ],
)
def test_combinations_that_make_sense(changes: dict[str, Any]) -> None:
    validate(ppo(ENV, **changes))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (TrainConfig(policy=PolicyConfig(objective="CLIP")), "policy.objective is 'CLIP'"),  # type: ignore[arg-type]
        (TrainConfig(policy=PolicyConfig(proximal="EWMA")), "policy.proximal is 'EWMA'"),  # type: ignore[arg-type]
        (TrainConfig(policy=PolicyConfig(importance="behaviour")), "importance is"),  # type: ignore[arg-type]
        (TrainConfig(optimizer=OptimizerConfig(kind="Adam")), "optimizer.kind is 'Adam'"),  # type: ignore[arg-type]
        (TrainConfig(env=EnvConfig(num_envs=2.0)), r"env.num_envs is 2.0 \(float\), but must be 2"),  # type: ignore[arg-type]
        (TrainConfig(policy=PolicyConfig(clip="0.2")), "policy.clip is '0.2'"),  # type: ignore[arg-type]
        (TrainConfig(total_env_steps=1.5), "total_env_steps is 1.5, but must be an integer"),  # type: ignore[arg-type]
        (TrainConfig(env=EnvConfig(num_envs=4.5)), "env.num_envs is 4.5, but must be an integer"),  # type: ignore[arg-type]
        (TrainConfig(env={"id": ENV}), "env is .*, but must be of the class EnvConfig"),  # type: ignore[arg-type]
        (TrainConfig(optimizer=OptimizerConfig(adam_betas=(np.float64(0.9), 0.999))), r"must be \(0.9, 0.999\)"),
        (TrainConfig(env=EnvConfig(options={"x": np.int64(2)})), "but must be {'x': 2}"),  # type: ignore[dict-item]
        (TrainConfig(optimizer=OptimizerConfig(step_size=10**400)), "step_size is 10+.*must be a number below 1.8e308"),
        (
            TrainConfig(optimizer=OptimizerConfig(schedule=lambda x: x)),
            "schedule is .* text here; presets",
        ),  # type: ignore[arg-type]
        ((ppo(ENV), []), "the configuration is a tuple, but .*; scale and rescale return"),
        (ppo, "the configuration is a function, but must be a TrainConfig"),
    ],
)
def test_configurations_made_directly_are_checked_like_others(config: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate(config)


def test_integers_in_place_of_floats_are_right() -> None:
    validate(TrainConfig(optimizer=OptimizerConfig(step_size=1, adam_betas=(0, 0.999))))


def test_values_of_other_libraries_and_of_yaml() -> None:
    config = override(TrainConfig(), {"num_envs": np.int64(4), "step_size": np.float32(0.5), "max_grad_norm": "none"})
    assert (config.env.num_envs, config.optimizer.step_size, config.optimizer.max_grad_norm) == (4, 0.5, None)
    assert type(config.env.num_envs) is int and type(config.optimizer.step_size) is float
    words = {"env.id": np.str_(ENV), "objective": np.str_("kl"), "schedule": np.str_("linear")}
    config = override(config, {**words, "env_options": {"a": np.str_("x"), "b": np.float64(2.0), "c": np.bool_(True)}})
    assert from_dict(yaml.safe_load(to_yaml(validate(config)))) == config  # NumPy's cannot be written
    assert list(map(type, config.env.options.values())) == [str, float, bool]
    for changes, words in (
        ({"info_keys": "is_success"}, "must be a list of values"),
        ({"log_std_bounds": (1,)}, "must be 2 values or none"),
    ):
        with pytest.raises(ConfigError, match=words):
            override(TrainConfig(), changes)


def test_config_errors_are_value_errors_and_anybatch_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, AnybatchError)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: &a [1, 2]\nb: *a\n", "alias"),
        (b"env: {id: \xff\xfe}\n", "not text in UTF-8"),
        (b"a: " + b"[" * 3000, "nested too deeply"),
        (b"a: 9999-99-99\n", "not YAML"),
        (b"optimizer: {step_size: 0.1}\ndevice: cpu\noptimizer: {}\n", "'optimizer' twice, the second time in line 3"),
        (b"env: {id: a, num_envs: 1, id: b}\n", "'id' twice"),
        (b"optimizer: {step_size: 1" + b"0" * 400 + b"}\n", "step_size is 10+.*must be a number below"),
        (b"#" * 1_000_001, "larger than 1,000,000 bytes"),
    ],
)
def test_hostile_files_are_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_config_file(path)
    assert "\n" not in str(caught.value)


def test_a_home_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^~no-such-user/x.yaml cannot be read"):
        read_config_file("~no-such-user/x.yaml")


def test_aliases_are_refused_before_they_grow(tmp_path: Path) -> None:
    levels = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]\n" for i in range(1, 10))
    path = tmp_path / "config.yaml"
    path.write_text(f"x0: &x0 [1]\n{levels}device: *x9\n")  # 10**9 elements
    began = time.monotonic()
    with pytest.raises(ConfigError, match="alias"):
        read_config_file(path)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("value", ["x" * 10**6, [1] * 10**6, {"a": [["b" * 1000] * 1000] * 1000}, 10**4000])
def test_messages_show_long_values_short(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^precision is .{1,110}, but must be one of") as caught:
        override(ppo("gym:CartPole-v1"), {"precision": value})
    assert len(str(caught.value)) < 200
