"""Hyperparameters of the tables in appendix B.

Every preset takes the environment and changes by field name::

    ppo_ewma("procgen:coinrun-hard", num_envs=64, clip=0.1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anybatch.config.io import override
from anybatch.config.schema import AuxiliaryConfig, ModelConfig, OptimizerConfig, PolicyConfig, TrainConfig
from anybatch.envs.registry import environment_id

Env = str | Callable[..., Any]
"""An environment's id, or a callable that makes one."""
DEFAULT_ENV = "procgen:starpilot-hard"
"""Default environment."""


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


PRESETS: dict[str, Callable[..., TrainConfig]] = {"ppo": ppo, "ppo-ewma": ppo_ewma, "ppg": ppg, "ppg-ewma": ppg_ewma}
"""Presets by their name on the command line."""
