"""Hyperparameters of the tables in appendix B, and of the field's baselines for other kinds of tasks.

Every preset takes the environment and changes by field name::

    ppo_ewma("procgen:coinrun-hard", num_envs=64, clip=0.1)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Unpack, cast

from anybatch.config.fields import flat, get, resolve
from anybatch.config.io import override
from anybatch.config.overrides import Overrides
from anybatch.config.schema import (
    AdvantageConfig,
    AuxiliaryConfig,
    EnvConfig,
    ModelConfig,
    ObservationConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from anybatch.envs.registry import environment_id
from anybatch.scaling.ppo import from_ppo

Env = str | Callable[..., Any]
"""An environment's id, or a callable that makes one."""
DEFAULT_ENV = "procgen:starpilot-hard"
"""Default environment."""
MUJOCO_ENV = "envpool:HalfCheetah-v4"
"""Default environment of the presets for MuJoCo."""
CONTROL_ENV = "gym:CartPole-v1"
"""Default environment of the presets for small control tasks."""
ATARI_ENV = "envpool:Breakout-v5"
"""Default environment of the presets for Atari."""


def ppo(env: Env = DEFAULT_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
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


def ppo_ewma(env: Env = DEFAULT_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPO-EWMA: PPO whose proximal policy is an EWMA of the weights with centre of mass 8 (beta_prox = 0.889).

    Arguments and errors as for :func:`ppo`.
    """
    return override(ppo(env, proximal="ewma", center_of_mass=8.0), overrides)


def ppg(env: Env = DEFAULT_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
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


def ppg_ewma(env: Env = DEFAULT_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPG-EWMA: PPG whose proximal policy is an EWMA of the weights with centre of mass 8 (beta_prox = 0.889).

    Arguments and errors as for :func:`ppo`.
    """
    return override(ppg(env, proximal="ewma", center_of_mass=8.0), overrides)


def ppo_mujoco(env: Env = MUJOCO_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPO for MuJoCo with the hyperparameters of the field's own baselines: E = 10, the clipped objective.

    They come from CleanRL's ``ppo_continuous_action.py`` (github.com/vwxyzjn/cleanrl) and equal those of PPO's paper
    (Schulman et al. 2017, table 3) and Stable-Baselines3's defaults, except that the step size decays and observations
    and rewards are normalised, as in OpenAI's baselines. Differences: the value loss is not clipped; advantages are
    normalised over an iteration instead of a minibatch; an episode that a time limit ends is bootstrapped.

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


def ppo_ewma_mujoco(env: Env = MUJOCO_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPO-EWMA for MuJoCo in the form that the scaling rules need: one epoch, the KL penalty, 64 environments.

    Networks and normalisation are those of :func:`ppo_mujoco`. One epoch, a constant step size and no gradient clipping
    are the conditions of batch size-invariance (section 4). Minibatches consist of samples, not of trajectories: those
    of 1 environment would have 2 consecutive samples, more alike than the rule for the step size assumes. The step size
    was the best of 3e-4, 1e-3 and 3e-3 (benchmarks/mujoco_tasks.py, queue ``tune``).

    Arguments and errors as for :func:`ppo`.
    """
    config = ppo_mujoco(
        env,
        num_envs=64,
        steps=64,
        minibatches=32,
        policy_epochs=1,
        value_epochs=1,
        step_size=3e-3,
        schedule="constant",
        adam_eps=1e-8,
        max_grad_norm=None,
        objective="kl",
        proximal="ewma",
        center_of_mass=8.0,
    )
    return override(config, overrides)


def ppo_control(env: Env = CONTROL_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPO for small control tasks, such as CartPole and Acrobot: 500,000 steps of 4 environments.

    The hyperparameters are those of CleanRL's ``ppo.py`` (github.com/vwxyzjn/cleanrl). Differences: the value loss is
    not clipped, advantages are normalised over an iteration instead of a minibatch, and an episode that a time limit
    ends is bootstrapped.

    Arguments and errors as for :func:`ppo`.
    """
    config = TrainConfig(
        total_env_steps=500_000,
        env=EnvConfig(num_envs=4),
        model=ModelConfig(encoder="mlp", architecture="dual", policy_gain=0.01, value_gain=1.0),
        rollout=RolloutConfig(steps=128),
        reward=RewardConfig(normalize=False),
        advantage=AdvantageConfig(discount=0.99),
        policy=PolicyConfig(objective="clip", clip=0.2, proximal="behavior"),
        optimizer=OptimizerConfig(
            step_size=2.5e-4,
            schedule="linear",
            adam_eps=1e-5,
            max_grad_norm=0.5,
            minibatches=4,
            shuffle="samples",
            policy_epochs=4,
            value_epochs=4,
            value_coefficient=0.25,  # there 0.5 * 0.5 mean((v - target)^2)
        ),
    )
    return override(config, {"env.id": environment_id(env), **overrides})


def ppo_ewma_control(env: Env = CONTROL_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPO-EWMA with the settings of :func:`ppo_control` and an EWMA that limits the policy as strongly.

    See :func:`anybatch.scaling.from_ppo`. Arguments and errors as for :func:`ppo`.
    """
    return _with_ewma(ppo_control(env), overrides)


def ppo_atari(env: Env = ATARI_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPO for Atari games of EnvPool: 10 million steps of 8 environments, 40 million frames.

    The hyperparameters, the network and EnvPool's options are those of CleanRL's ``ppo_atari_envpool.py``
    (github.com/vwxyzjn/cleanrl), which are those of PPO's paper (Schulman et al. 2017, table 5) in OpenAI's baselines.
    The options are the wrappers of DeepMind: up to 30 actions without effect at the start, every action repeated for 4
    frames, the maximum of 2 frames in 84 x 84 greys, stacks of 4, the sign of rewards, and the end of an episode with a
    life; no sticky actions. Returns are those of whole games, before clipping. Differences as in :func:`ppo_control`.

    ``env_options`` replaces the options of the preset, ``episodic_life`` and ``reward_clip``: name them too to keep
    them. On the command line, options that are not named stay.

    Arguments and errors as for :func:`ppo`.
    """
    config = ppo_control(
        env,
        total_env_steps=10_000_000,
        num_envs=8,
        encoder="nature",
        architecture="shared",
        clip=0.1,
        env_options={"episodic_life": True, "reward_clip": True},
    )
    return override(config, overrides)


def ppo_ewma_atari(env: Env = ATARI_ENV, **overrides: Unpack[Overrides]) -> TrainConfig:
    """PPO-EWMA with the settings of :func:`ppo_atari` and an EWMA that limits the policy as strongly.

    See :func:`anybatch.scaling.from_ppo`. Arguments and errors as for :func:`ppo`.
    """
    return _with_ewma(ppo_atari(env), overrides)


def _with_ewma(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """PPO-EWMA with the limit of a PPO that has the gradient steps of ``overrides``, unless they name another limit.

    A PPO with one gradient step in an iteration has no limit: then that of ``config``.
    """
    given = flat(overrides)
    steps = {name: x for name, x in given.items() if name in ("optimizer.policy_epochs", "optimizer.minibatches")}
    tuned = override(config, steps)
    if "policy.center_of_mass" in given or tuned.optimizer.policy_epochs * tuned.optimizer.minibatches == 1:
        tuned = config
    return override(from_ppo(tuned), overrides)


PAPER: dict[str, Callable[..., TrainConfig]] = {"ppo": ppo, "ppo-ewma": ppo_ewma, "ppg": ppg, "ppg-ewma": ppg_ewma}
"""The paper's algorithms by their name on the command line."""
PRESETS = {
    **PAPER,
    **{"ppo-control": ppo_control, "ppo-ewma-control": ppo_ewma_control},
    **{"ppo-mujoco": ppo_mujoco, "ppo-ewma-mujoco": ppo_ewma_mujoco},
    **{"ppo-atari": ppo_atari, "ppo-ewma-atari": ppo_ewma_atari},
}
"""All presets by their name on the command line."""


def environments_for(preset: str) -> str:
    """Ids of environments that suit a preset, in words."""
    examples = {
        "control": "gym:CartPole-v1 or gym:Acrobot-v1",
        "mujoco": "envpool:HalfCheetah-v4 or gym:Hopper-v5",
        "atari": "envpool:Breakout-v5 or envpool:Pong-v5",
    }
    return examples.get(preset.rpartition("-")[2], "gym:CartPole-v1, procgen:coinrun-hard or import.path:function")


def _name_parameters(preset: Callable[..., TrainConfig]) -> None:
    """Give a preset the signature that names every field, with the preset's own values as defaults."""
    config, kind = preset(), inspect.Parameter
    env, overrides = inspect.signature(preset).parameters.values()
    named = [
        kind(name, kind.KEYWORD_ONLY, default=get(config, _FULL[name]), annotation=hint)
        for name, hint in Overrides.__annotations__.items()
    ]
    signature = inspect.Signature([env, *named, overrides], return_annotation=TrainConfig)
    cast(Any, preset).__signature__ = signature


_FULL = {name: resolve(name) for name in Overrides.__annotations__}
for _preset in PRESETS.values():
    _name_parameters(_preset)
