"""Configurations of small runs on CartPole, for tests of several folders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo


def tiny_ppo() -> TrainConfig:
    """Two iterations of 8 samples."""
    return ppo(
        "gym:CartPole-v1",
        num_envs=2,
        steps=4,
        minibatches=2,
        total_env_steps=16,
        tensorboard=False,
        device="cpu",
        model={"encoder": "mlp", "options": {"width": 4, "depth": 1}},
    )


def small_ppg(
    preset: Callable[..., TrainConfig],
    *,
    envs: int,
    steps: int,
    iterations: int,
    phase: int,
    epochs: int,
    **changes: Any,
) -> TrainConfig:
    """An auxiliary phase of 8 minibatches after every ``phase`` iterations."""
    config = preset(
        "gym:CartPole-v1",
        num_envs=envs,
        steps=steps,
        step_size=1e-2,
        total_env_steps=iterations * envs * steps,
        precision="fp32",
        device="cpu",
        tensorboard=False,
        **{
            "optimizer.minibatches": 4,
            "model.encoder": "mlp",
            "model.options": {"width": 8, "depth": 1},
            "aux.policy_iterations": phase,
            "aux.epochs": epochs,
            "aux.minibatches": 8,
            "aux.step_size": 1e-2,
        },
    )
    return override(config, changes)
