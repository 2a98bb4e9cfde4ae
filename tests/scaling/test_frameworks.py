"""Hyperparameters in other frameworks' names: values, and plain words where there is no counterpart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anybatch.config.frameworks.tables import FRAMEWORKS
from anybatch.presets import ppg_ewma, ppo, ppo_ewma
from anybatch.scaling import rescale, scale
from anybatch.scaling.frameworks import translate

SMALL, _ = scale(ppo_ewma(policy_epochs=1, value_epochs=1), 64, adam_betas=True)


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("sb3", ["n_envs=4", "n_steps=256", "batch_size=128", "learning_rate=6.25e-05", "betas=(0.9983551"]),
        ("cleanrl", ["--num-envs 4", "--num-minibatches 8", "--vf-coef 1.0", "--learning-rate 6.25e-05"]),
        ("rllib", ["train_batch_size_per_learner=1024", "minibatch_size=128", "lr=6.25e-05", "use_kl_loss=False"]),
        (
            "trl",
            ["learning_rate=6.25e-05", "adam_beta1=0.9983551", "num_iterations=1", "epsilon=0.2", "advantage_span=64"],
        ),
        ("torchrl", ["num_workers=4", "frames_per_batch=1024", "batch_size=128", "lr=6.25e-05", "span=64.0"]),
        (
            "rsl_rl",
            [
                "num_steps_per_env=256",
                "num_mini_batches=8",
                "learning_rate=6.25e-05",
                "max_iterations=97657",
                "center_of_mass=512.0",
            ],
        ),
    ],
)
def test_values(framework: str, words: list[str]) -> None:
    text = str(translate(SMALL, framework))
    for word in words:
        assert word in text
    assert "center_of_mass" in text  # has no counterpart, and that is said


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_missing_is_said_in_comments(framework: str) -> None:
    translation = translate(ppg_ewma(), framework)
    assert len(translation.missing) >= 2
    comments = [line for line in str(translation).splitlines() if line.startswith("#")]
    assert len(comments) == len(translation.missing)
    assert any("auxiliary phase" in line for line in comments)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rules_beyond_the_paper_are_translated_or_missed(framework: str) -> None:
    # SB3 stops above 1.5 times its target_kl, so that 0.015 is a target of 0.01
    arguments = {"sb3": ("target_kl", 0.01), "cleanrl": ("target-kl", 0.015), "rsl_rl": ("desired_kl", 0.02)}
    spread = {"policy_epochs": 2, "value_epochs": 2, "epoch_window": 4.0, "second_moment": 0.04}
    config = ppo(kl_target=0.02, kl_stop=0.015, follow_ess=True, **spread)
    translation = translate(config, framework)
    name, value = arguments.get(framework, ("", None))
    assert translation.arguments.get(name) == value
    text = "\n".join(translation.missing)
    expected = {"kl_target", "kl_stop", "follow_ess", "epoch_window", "second_moment"}
    assert {x for x in expected if f"{x} " in text} == expected - {
        "sb3": {"kl_stop"},
        "cleanrl": {"kl_stop"},
        "rsl_rl": {"kl_target"},
    }.get(framework, set())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arguments_are_plain_data(framework: str) -> None:
    for config in (SMALL, ppg_ewma(), ppo(schedule="linear")):
        arguments = translate(config, framework).arguments
        assert json.loads(json.dumps(arguments)) == arguments


def test_batches_are_those_of_each_framework() -> None:
    # 4 environments x 256 steps = 1,024 samples an iteration; 8 minibatches of 128
    sb3, cleanrl, rllib, trl = (translate(SMALL, name).arguments for name in ("sb3", "cleanrl", "rllib", "trl"))
    assert sb3["n_envs"] * sb3["n_steps"] == 8 * sb3["batch_size"] == 1024  # type: ignore[operator]
    assert cleanrl["num-envs"] * cleanrl["num-steps"] // cleanrl["num-minibatches"] == 128  # type: ignore[operator]
    runners = rllib["num_env_runners"] * rllib["num_envs_per_env_runner"]  # type: ignore[operator]
    assert runners * rllib["rollout_fragment_length"] == rllib["train_batch_size_per_learner"] == 1024
    assert rllib["minibatch_size"] == 128
    assert trl["steps_per_generation"] == "8 * GRADIENT_ACCUMULATION_STEPS"


def test_value_coefficients_mean_the_same() -> None:
    # ours: 0.5 mean((v - target)^2); CleanRL's ppo.py halves the squared error itself, the others do not
    names = {"sb3": "vf_coef", "cleanrl": "vf-coef", "rllib": "vf_loss_coeff", "torchrl": "critic_coeff"}
    names |= {"rsl_rl": "value_loss_coef"}
    assert [translate(SMALL, x).arguments[name] for x, name in names.items()] == [0.5, 1.0, 0.5, 0.5, 0.5]


def test_rsl_rl_from_4096_to_256_environments() -> None:
    """Isaac Lab's usual numbers; a sixteenth of the batch: 1e-3 / 4, 8 x 16, 1 x 16."""
    tuned = ppo_ewma(num_envs=4096, steps=24, minibatches=4, policy_epochs=5, value_epochs=5, step_size=1e-3)
    small, _ = rescale(tuned, num_envs=256)
    found = translate(small, "rsl_rl").arguments
    assert found["class_name"] == "anybatch.integrations.rsl_rl:PPOEWMA"
    names = ("num_steps_per_env", "num_mini_batches", "learning_rate", "center_of_mass", "advantage_span")
    assert [found[name] for name in names] == [24, 4, 2.5e-4, 128, 16]
    assert any("settled at" in sentence for sentence in translate(small, "rsl_rl").missing)


def test_a_kl_penalty_keeps_the_ewma_in_rsl_rl() -> None:
    found = translate(ppo_ewma(objective="kl", center_of_mass=32.0, span=4.0), "rsl_rl")
    names = ("class_name", "center_of_mass", "advantage_span")
    assert [found.arguments[name] for name in names] == ["anybatch.integrations.rsl_rl:PPOEWMA", 32.0, 4.0]
    assert "policy.kl_coefficient 1: no counterpart; clip_param limits the policy instead" in found.missing
    assert not any("center_of_mass" in x or "advantage.span" in x for x in found.missing)


def test_the_reference_model_of_trl_excludes_our_trainer() -> None:
    missing = translate(ppo_ewma(objective="kl"), "trl").missing
    assert not any("DecoupledGRPOTrainer" in sentence for sentence in missing)
    assert any("DecoupledGRPOTrainer" in sentence for sentence in translate(ppo_ewma(), "trl").missing)


def test_asynchronous_rollouts_are_async_grpo_s_in_trl() -> None:
    """AsyncGRPO makes one pass: 2 iterations of 8 minibatches are 16 gradient steps."""
    source = {"rollout.source": {"kind": "asynchronous", "max_lag": 2}}
    missing = "\n".join(translate(ppo_ewma(**source), "trl").missing)
    assert "AsyncGRPOConfig in place of GRPOConfig, with max_staleness=16" in missing
    assert "DecoupledAsyncGRPOTrainer" in missing
    assert "advantage.span 1: no counterpart" in missing  # which that trainer has no argument for
    assert "rollout.source asynchronous: no counterpart" not in missing
    reference = translate(ppo_ewma(objective="kl", **source), "trl").missing  # which AsyncGRPO does not have
    assert any(sentence.startswith("rollout.source asynchronous: no counterpart") for sentence in reference)


def test_sgd_is_not_sold_as_adam() -> None:
    config = ppo(optimizer_kind="sgd", sgd_momentum=0.9)
    kind = translate(config, "sb3").arguments["policy_kwargs"]
    assert kind == {"optimizer_class": "torch.optim.SGD", "optimizer_kwargs": {"momentum": 0.9}}
    assert translate(config, "trl").arguments["optim"] == "sgd"
    for framework in ("cleanrl", "rllib", "trl", "rsl_rl"):
        text = str(translate(config, framework))
        assert "momentum 0.9" in text
        assert "betas" not in text and "adam" not in text


def test_schedules() -> None:
    config = ppo(schedule="linear", total_env_steps=1000, step_size=0.25)
    assert "learning_rate=lambda left: left * 0.25," in str(translate(config, "sb3"))
    assert translate(config, "sb3").arguments["total_timesteps"] == 1000  # in which it reaches 0
    assert "--anneal-lr" in str(translate(config, "cleanrl"))
    assert translate(config, "rllib").arguments["lr"] == [[0, 0.25], [1000, 0.0]]
    assert translate(config, "trl").arguments["lr_scheduler_type"] == "linear"


@pytest.mark.parametrize(
    ("changes", "framework", "words"),
    [
        ({"value_epochs": 9}, "sb3", "optimizer.value_epochs 9"),
        ({"rollout.source.kind": "delayed", "rollout.source.delay": 2}, "cleanrl", "rollout.source delayed"),
        ({"advantage.normalize": False}, "rllib", "advantage.normalize false"),
        ({"advantage.normalize": False}, "rsl_rl", "advantage.normalize false"),
        ({"schedule": "linear"}, "rsl_rl", "optimizer.schedule linear"),
        ({"objective": "kl"}, "sb3", "clip_range limits the policy instead"),
        ({"objective": "kl", "proximal": "ewma", "kl_estimator": "half-squared"}, "sb3", "the KL is exact"),
        ({"objective": "kl"}, "rllib", "kl_target"),
        ({"objective": "kl"}, "trl", "policy.kl_coefficient 1"),
        ({}, "trl", "total_env_steps: no counterpart; max_steps counts gradient steps"),
        ({}, "trl", "advantage.span 1: no counterpart"),
        ({"total_env_steps": 50000}, "rllib", "total_env_steps 50000: no argument"),
        ({}, "sb3", "optimizer.shuffle trajectories: no counterpart"),
        ({"max_grad_norm": 0.5}, "rsl_rl", "optimizer.max_grad_norm 0.5: limits the joint gradient"),
        ({"precision": "fp32"}, "cleanrl", "precision fp32: not translated"),
        ({"objective": "kl", "proximal": "ewma"}, "trl", "evaluated once per generated batch"),
        ({}, "rllib", "per learner"),
        ({"proximal": "recent"}, "trl", "policy.proximal recent"),
        ({"rollout.source.kind": "delayed", "rollout.source.delay": 2}, "trl", "rollout.source delayed"),
        ({"return_discount": 0.9, "bound": 3.0}, "sb3", "return_discount 0.9 and bound 3:"),
        ({"observation.normalize": True, "observation.clip": 5.0}, "sb3", "clip 5:"),
        ({"max_importance_ratio": 7.0}, "cleanrl", "policy.max_importance_ratio 7.0: not translated"),
        ({"kl_target": 0.01, "kl_factor": 2.0}, "sb3", "optimizer.kl_factor 2.0: not translated"),
    ],
)
def test_what_has_no_counterpart(changes: dict[str, Any], framework: str, words: str) -> None:
    assert any(words in sentence for sentence in translate(ppo(**changes), framework).missing)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fields_of_networks_and_environments_are_named_if_they_differ_from_the_defaults(framework: str) -> None:
    changes: dict[str, Any] = {"frame_stack": 4, "bootstrap_truncated": False, "recurrent": "gru", "squash": True}
    # without an effect, and so not named: model.recurrent_width without a recurrent layer
    assert not any("not translated" in x for x in translate(ppo(recurrent_width=8), framework).missing)
    last = translate(ppo(**changes, model_options={"width": 8}), framework).missing[-1]
    assert last == (
        "env.bootstrap_truncated false; env.frame_stack 4; model.options width 8; model.recurrent gru; "
        "model.gaussian.squash true: not translated; choose their equivalents in that framework"
    )


def test_one_sentence_for_advantages_that_are_not_normalised() -> None:
    missing = translate(ppo_ewma(**{"advantage.normalize": False}), "rsl_rl").missing
    assert [x for x in missing if "advantage.normalize" in x] == [
        "advantage.normalize false: no counterpart; advantages are normalised by moments over iterations"
    ]


def test_a_kl_penalty_is_not_mentioned_where_there_is_none() -> None:
    assert "kl_target" not in str(translate(ppo(), "rllib"))
    assert "kl_coefficient" not in str(translate(ppo(), "sb3"))


@pytest.mark.parametrize("framework", ["sb3", "rllib", "trl", "torchrl", "rsl_rl"])
def test_python_is_python(framework: str) -> None:
    compile(str(translate(SMALL, framework)), framework, "exec")
    compile(str(translate(ppg_ewma(), framework)), framework, "exec")


def test_trl_s_reference_model_stands_in_for_the_ewma() -> None:
    text = str(translate(ppg_ewma(), "trl"))
    assert "sync_ref_model=True" in text
    assert "ref_model_mixup_alpha=0.111111" in text  # 1 - 8/9
    assert "sync_ref_model" not in str(translate(ppo(), "trl"))
