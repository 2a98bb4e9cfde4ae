"""Settings that have no effect are named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from anybatch.cli.main import main
from anybatch.config import fields
from anybatch.config.effects import _NEEDS, without_effect
from anybatch.config.io import override
from anybatch.presets import PRESETS, ppg, ppo, ppo_ewma


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"center_of_mass": 4}, "policy.center_of_mass", "policy.proximal is behavior"),
        ({"kl_coefficient": 2}, "policy.kl_coefficient", "policy.objective is clip"),
        ({"objective": "kl", "clip": 0.3}, "policy.clip", "policy.objective is kl"),
        ({"optimizer": {"sgd_momentum": 0.9}}, "optimizer.sgd_momentum", "optimizer.kind is adam"),
        ({"optimizer.kind": "sgd", "adam_eps": 1e-5}, "optimizer.adam_eps", "optimizer.kind is sgd"),
        # also with an auxiliary phase, whose Adam has other numbers
        ({"aux.enabled": True, "optimizer.kind": "sgd", "adam_eps": 1}, "optimizer.adam_eps", "optimizer.kind is sgd"),
        ({"kl_factor": 2}, "optimizer.kl_factor", "optimizer.kl_target is none"),
        ({"aux_epochs": 9}, "aux.epochs", "aux.enabled is false"),
        ({"observation.clip": 5}, "observation.clip", "observation.normalize is false"),
        ({"reward_normalize": False, "bound": 5}, "reward.bound", "reward.normalize is false"),
        ({"advantage_normalize": False, "span": 5}, "advantage.span", "advantage.normalize is false"),
        ({"episodes": 5}, "eval.episodes", "eval.every is none"),
        ({"max_lag": 5}, "rollout.source.max_lag", "rollout.source.kind is synchronous"),
        ({"env.id": "gym:CartPole-v1", "threads": 5}, "env.threads", "env.id is gym:CartPole-v1"),
        ({"recurrent_width": 5}, "model.recurrent_width", "model.recurrent is none"),
    ],
)
def test_a_change_without_effect_is_a_warning(changes: dict[str, Any], name: str, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name} has no effect, because {reason}$") as caught:
        override(ppo("procgen:coinrun"), changes)
    assert len(caught) == 1


def test_changes_that_have_an_effect_are_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for preset in PRESETS.values():
            preset()
        override(ppo_ewma(), {"center_of_mass": 4, "max_importance_ratio": 5})
        override(ppo_ewma(), {"proximal": "behavior"})  # the rest stays as it was
        override(ppo(), {"policy": {"center_of_mass": ppo().policy.center_of_mass, "clip": 0.3}})  # one is no change
        override(ppg(), {"aux_epochs": 9})
        stale = {"rollout.source.kind": "delayed", "delay": 2}
        override(ppo(), stale | {"interpolated": True, "center_of_mass": 4})


def test_the_fields_exist() -> None:
    known = {*fields.types(), *(f"{name}." for name in fields.types())}
    assert {name for control, _, affected in _NEEDS for name in (control, *affected)} <= known
    assert not without_effect(ppo(), ["policy.clip", "env.num_envs"])


def test_options_without_effect_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["ppo-control", "--policy.center-of-mass", "8"]  # also where it is the preset's number
    assert main(["scale", *arguments, "--divide-batch-by", "2"]) == 0
    warning = "warning: policy.center_of_mass has no effect, because policy.proximal is behavior\n"
    assert warning in capsys.readouterr().err
    arguments += ["--env.id", "gym:CartPole-v1", "--rollout.steps", "4", "--total-env-steps", "32"]
    assert main(["train", *arguments, "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert warning in capsys.readouterr().err
