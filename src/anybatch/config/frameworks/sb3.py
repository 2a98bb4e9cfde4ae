"""Arguments of Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.config.frameworks.common import (
    MINIBATCHES,
    NO_VALUE_CLIPPING,
    SEED,
    exact_kl,
    has_ewma,
    is_adam,
    is_linear,
    is_penalty,
    max_norm,
    minibatch_size,
    ppo_notes,
)
from anybatch.config.frameworks.rows import Code, Framework, Row
from anybatch.config.schema import TrainConfig


def _classes(config: TrainConfig) -> dict[str, str]:
    return {"PPO": "PPOEWMA" if has_ewma(config) else "PPO"}


def _imports(config: TrainConfig) -> list[str]:
    name, module = _classes(config)["PPO"], "stable_baselines3"
    torch = [] if is_adam(config) else ["import torch"]
    source = "anybatch.integrations.sb3" if name == "PPOEWMA" else module
    return [*torch, f"from {module}.common.env_util import make_vec_env", f"from {source} import {name}"]


def _step(config: TrainConfig) -> object:
    step = config.optimizer.step_size
    return Code(f"lambda left: left * {step:.7g}") if is_linear(config) else step


def _optimizer(config: TrainConfig) -> object:
    optimizer = config.optimizer
    if optimizer.kind == "sgd":
        return {"optimizer_class": Code("torch.optim.SGD"), "optimizer_kwargs": {"momentum": optimizer.sgd_momentum}}
    return {"optimizer_kwargs": {"betas": optimizer.adam_betas, "eps": optimizer.adam_eps}}


def _stops(config: TrainConfig) -> bool:
    """Whether epochs stop early; our subclass, which the EWMA needs, refuses to."""
    return config.optimizer.kl_stop is not None and not has_ewma(config)


def _target_kl(config: TrainConfig) -> object:
    return (config.optimizer.kl_stop or 0.0) / 1.5


def _notes(config: TrainConfig) -> Iterator[str]:
    ewma = has_ewma(config)
    yield from ppo_notes(
        config,
        "" if ewma else "normalize_advantage works on each minibatch",
        "" if ewma else "clip_range",
        counterparts=() if ewma else ("kl_stop",),
    )
    if ewma:
        yield from exact_kl(config)


_ENV = (Row("env_id", "env.id", lambda config: Code("ENV_ID")), Row("n_envs", "env.num_envs"))
_PPO = (
    Row("policy", value=lambda config: Code("POLICY")),
    Row("env", value=lambda config: Code("env")),
    Row("n_steps", "rollout.steps"),
    Row("batch_size", "optimizer.minibatches", minibatch_size, MINIBATCHES),
    Row("n_epochs", "optimizer.policy_epochs"),
    Row("learning_rate", "optimizer.step_size", _step),
    Row("gamma", "advantage.discount"),
    Row("gae_lambda", "advantage.gae_lambda"),
    Row("clip_range", "policy.clip", when=lambda config: not (is_penalty(config) and has_ewma(config))),
    Row("kl_coefficient", "policy.kl_coefficient", when=lambda config: is_penalty(config) and has_ewma(config)),
    Row("ent_coef", "policy.entropy_coefficient"),
    Row("vf_coef", "optimizer.value_coefficient"),
    Row("max_grad_norm", "optimizer.max_grad_norm", max_norm),
    Row("normalize_advantage", "advantage.normalize"),
    Row("target_kl", "optimizer.kl_stop", _target_kl, "optimizer.kl_stop / 1.5", _stops),
    Row("center_of_mass", "policy.center_of_mass", when=has_ewma),
    Row(
        "advantage_span",
        "advantage.span",
        lambda x: x.advantage.span if x.advantage.normalize else 1.0,
        when=has_ewma,
    ),
    Row("max_importance_ratio", "policy.max_importance_ratio", when=has_ewma),
    Row("policy_kwargs", "", _optimizer, "model.options"),
)
_LEARN = (Row("total_timesteps", "total_env_steps"),)
_KNOWN = (
    Row("betas", "optimizer.adam_betas"),
    Row("eps", "optimizer.adam_eps"),
    Row("log_std_init", "model.gaussian.log_std"),
    Row("norm_obs", "observation.normalize"),
    Row("clip_obs", "observation.clip"),
    Row("net_arch", meaning="model.options, width and depth of the networks"),
    Row("weight_decay", meaning="not available here, weights are not decayed"),
    Row("clip_range_vf", meaning=NO_VALUE_CLIPPING),
    Row("seed", meaning=SEED),
    Row("use_sde sde_sample_freq", meaning="not available here, noise is drawn independently in every step"),
    Row("stats_window_size", meaning="always 100 episodes here"),
    Row("verbose", meaning="the argument quiet of train, not a field of the configuration"),
)

TABLE = Framework(
    "Stable-Baselines3",
    {"env = make_vec_env": _ENV, "model = {PPO}": _PPO, "model.learn": _LEARN},
    _notes,
    _KNOWN,
    imports=_imports,
    classes=_classes,
)
