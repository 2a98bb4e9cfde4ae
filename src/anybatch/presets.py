"""Hyperparameters of the tables in appendix B, and of the field's baselines for continuous control.

Every preset takes the environment and changes by field name::

    ppo_ewma("procgen:coinrun-hard", num_envs=64, clip=0.1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anybatch.config.io import override
from anybatch.config.schema import (
    AdvantageConfig,
    AuxiliaryConfig,
    EnvConfig,
    ModelConfig,
    ObservationConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    TrainConfig,
)
from anybatch.envs.registry import environment_id

Env = str | Callable[..., Any]
"""An environment's id, or a callable that makes one."""
DEFAULT_ENV = "procgen:starpilot-hard"
"""Default environment."""
MUJOCO_ENV = "envpool:HalfCheetah-v4"
"""Default environment of the presets for MuJoCo."""


def ppo(env: Env = DEFAULT_ENV, **overrides: Any) -> TrainConfig:
    """PPO with the clipped objective: the shared defaults, E = 3, and one network for policy and value.

    Args:
        env: environment id or a callable that makes one, see :class:`anybatch.config.schema.EnvConfig`.
        **overrides: changes by field name, see :func:`anybatch.config.io.override`.

    Raises:
        ConfigError: an unknown field or a value of the wrong kind.
    """
    config = TrainConfig(
        optimizer=OptimizerConfig(policy_epochs=3, value_epochs=3),
        policy=PolicyConfig(objective="clip", proximal="behavior"),
    )
    return override(config, {"env.id": environment_id(env), **overrides})


def ppo_ewma(env: Env = DEFAULT_ENV, **overrides: Any) -> TrainConfig:
    """PPO-EWMA: PPO whose proximal policy is an EWMA of the weights with centre of mass 8 (beta_prox = 0.889).

    Arguments and errors as for :func:`ppo`.
    """
    return override(ppo(env, proximal="ewma", center_of_mass=8.0), overrides)


def ppg(env: Env = DEFAULT_ENV, **overrides: Any) -> TrainConfig:
    """PPG: E_pi = E_V = 1, the KL-penalised objective, separate networks, an auxiliary phase after N_pi = 32.

    Arguments and errors as for :func:`ppo`.
    """
    config = TrainConfig(
        model=ModelConfig(architecture="dual"),
        optimizer=OptimizerConfig(policy_epochs=1, value_epochs=1),
        policy=PolicyConfig(objective="kl", kl_coefficient=1.0, proximal="behavior"),
        aux=AuxiliaryConfig(enabled=True),
    )
    return override(config, {"env.id": environment_id(env), **overrides})


def ppg_ewma(env: Env = DEFAULT_ENV, **overrides: Any) -> TrainConfig:
    """PPG-EWMA: PPG whose proximal policy is an EWMA of the weights with centre of mass 8 (beta_prox = 0.889).

    Arguments and errors as for :func:`ppo`.
    """
    return override(ppg(env, proximal="ewma", center_of_mass=8.0), overrides)


def ppo_mujoco(env: Env = MUJOCO_ENV, **overrides: Any) -> TrainConfig:
    """PPO for MuJoCo with the hyperparameters of the field's own baselines: E = 10, the clipped objective.

    They are those of CleanRL's ``ppo_continuous_action.py`` (github.com/vwxyzjn/cleanrl), which are those of PPO's
    paper (Schulman et al. 2017, table 3) and Stable-Baselines3's defaults as well, but for the decay of the step size
    and the normalisation, which come from OpenAI's baselines. Differences: the value loss is not clipped, which is not
    offered here; advantages are normalised over an iteration instead of a minibatch; an episode that a time limit ends
    is bootstrapped.

    Arguments and errors as for :func:`ppo`.
    """
    config = TrainConfig(
        total_env_steps=1_000_000,
        env=EnvConfig(num_envs=1),
        observation=ObservationConfig(normalize=True),
        model=ModelConfig(encoder="mlp", architecture="dual", policy_gain=0.01, value_gain=1.0),
        rollout=RolloutConfig(steps=2048),
        advantage=AdvantageConfig(discount=0.99),
        policy=PolicyConfig(objective="clip", clip=0.2, proximal="behavior", entropy_coefficient=0.0),
        optimizer=OptimizerConfig(
            step_size=3e-4,
            schedule="linear",
            adam_eps=1e-5,
            max_grad_norm=0.5,
            minibatches=32,
            shuffle="samples",
            policy_epochs=10,
            value_epochs=10,
            value_coefficient=0.25,  # there 0.5 * 0.5 mean((v - target)^2)
        ),
    )
    return override(config, {"env.id": environment_id(env), **overrides})


def ppo_ewma_mujoco(env: Env = MUJOCO_ENV, **overrides: Any) -> TrainConfig:
    """PPO-EWMA for MuJoCo in the form that the scaling rules need: one epoch, the KL penalty, 64 environments.

    Networks and normalisation are those of :func:`ppo_mujoco`. One epoch, a constant step size and no gradient clipping
    are the conditions of batch size-invariance (section 4).

    Arguments and errors as for :func:`ppo`.
    """
    config = ppo_mujoco(
        env,
        num_envs=64,
        steps=64,
        minibatches=32,
        shuffle="trajectories",
        policy_epochs=1,
        value_epochs=1,
        step_size=1e-3,
        schedule="constant",
        adam_eps=1e-8,
        max_grad_norm=None,
        objective="kl",
        proximal="ewma",
        center_of_mass=8.0,
    )
    return override(config, overrides)


PAPER: dict[str, Callable[..., TrainConfig]] = {"ppo": ppo, "ppo-ewma": ppo_ewma, "ppg": ppg, "ppg-ewma": ppg_ewma}
"""The paper's algorithms by their name on the command line."""
PRESETS = {**PAPER, "ppo-mujoco": ppo_mujoco, "ppo-ewma-mujoco": ppo_ewma_mujoco}
"""All presets by their name on the command line."""
