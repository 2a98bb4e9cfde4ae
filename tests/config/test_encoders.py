"""Encoders given as classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from anybatch.errors import ConfigError
from anybatch.presets import ppo
from anybatch.runs import load_policy
from anybatch.training import train


class Wide(nn.Module):
    """One dense layer."""

    def __init__(self, observation_space: Any, *, width: int = 8) -> None:
        super().__init__()
        self.out_features = width
        self.layer = nn.Linear(observation_space.shape[0], width)

    def forward(self, observation: Any) -> Any:
        return self.layer(observation)


def test_a_class_is_its_import_path(tmp_path: Path) -> None:
    config = ppo(
        "gym:CartPole-v1",
        num_envs=2,
        rollout_steps=8,
        minibatches=1,
        total_env_steps=16,
        encoder=Wide,
        model_options={"width": 5},
    )
    assert config.model.encoder == f"{__name__}:Wide"
    train(config, tmp_path / "run", quiet=True)
    encoder = load_policy(tmp_path / "run").agent.policy.encoder
    assert isinstance(encoder, Wide) and encoder.layer.out_features == 5


def test_what_nobody_finds_again_is_refused() -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(
        ConfigError, match=r"the class .*Local, which cannot be imported again from .*: define it at the"
    ):
        ppo(encoder=Local)
    with pytest.raises(
        ConfigError, match=r"but must be impala, nature, small-conv, mlp, auto, import.path:Class, or the class"
    ):
        ppo(encoder=lambda space: Wide(space))
