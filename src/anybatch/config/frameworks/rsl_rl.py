"""Arguments of rsl_rl."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anybatch.config.frameworks.common import (
    ITERATIONS,
    NO_VALUE_CLIPPING,
    describe_optimizer,
    has_ewma,
    is_linear,
    max_norm,
    ppo_notes,
)
from anybatch.config.frameworks.rows import Framework, Row
from anybatch.config.schema import TrainConfig

_CLASS = "anybatch.integrations.rsl_rl:PPOEWMA"


def _follows_kl(config: TrainConfig) -> bool:
    """Whether the step size follows a KL divergence."""
    return config.optimizer.kl_target is not None


def _notes(config: TrainConfig) -> Iterator[str]:
    ewma = has_ewma(config)
    normalization = "" if ewma else "advantages are normalised over each iteration"
    yield from ppo_notes(config, normalization, "clip_param", always=True, counterparts=("kl_target",))
    if ewma and not config.advantage.normalize:
        yield "advantage.normalize false: no counterpart; advantages are normalised by moments over iterations"
    norm = config.optimizer.max_grad_norm
    if norm is not None:
        yield (
            f"optimizer.max_grad_norm {norm:g}: limits the joint gradient of policy and value function here, but those "
            "of actor and critic separately in rsl_rl"
        )
    if is_linear(config):
        yield "optimizer.schedule linear: no counterpart; the learning rate is fixed, or follows desired_kl"
    if _follows_kl(config):
        yield "optimizer.kl_factor: no counterpart; the learning rate changes by a factor of 1.5 at every gradient step"
    else:
        yield (
            "schedule: if it was adaptive where you tuned, optimizer.step_size is the learning rate that it settled at "
            "(Loss/learning_rate in rsl_rl's log)"
            + ("; adaptive needs no scaling here, because desired_kl refers to the proximal policy" if ewma else "")
        )
    yield f"{describe_optimizer(config)}: no argument; rsl_rl passes only the learning rate"


_RUNNER = (
    Row("num_steps_per_env", "rollout.steps"),
    Row("max_iterations", "", lambda x: math.ceil(x.total_env_steps / x.iteration_batch), ITERATIONS),
)
_PPO = (
    Row("class_name", "policy.proximal", lambda config: _CLASS if has_ewma(config) else "PPO"),
    Row("optimizer", "optimizer.kind"),
    Row("num_learning_epochs", "optimizer.policy_epochs"),
    Row("num_mini_batches", "optimizer.minibatches"),
    Row("learning_rate", "optimizer.step_size"),
    Row("schedule", "optimizer.schedule", lambda config: "adaptive" if _follows_kl(config) else "fixed"),
    Row("desired_kl", "optimizer.kl_target", when=_follows_kl),
    Row("gamma", "advantage.discount"),
    Row("lam", "advantage.gae_lambda"),
    Row("clip_param", "policy.clip"),
    Row("entropy_coef", "policy.entropy_coefficient"),
    Row("value_loss_coef", "optimizer.value_coefficient"),
    Row("use_clipped_value_loss", "", lambda config: False, NO_VALUE_CLIPPING),
    Row("max_grad_norm", "optimizer.max_grad_norm", max_norm),
    Row("normalize_advantage_per_mini_batch", "advantage.normalize", lambda config: False),
    Row("center_of_mass", "policy.center_of_mass", when=has_ewma),
    Row("advantage_span", "advantage.span", when=has_ewma),
    Row("max_importance_ratio", "policy.max_importance_ratio", when=has_ewma),
)
_KNOWN = (
    Row("num_envs", "env.num_envs"),
    Row("empirical_normalization", "observation.normalize"),
    Row("init_noise_std", meaning="exp(model.gaussian.log_std)"),
)

TABLE = Framework("rsl_rl", {"runner = dict": _RUNNER, "algorithm = dict": _PPO}, _notes, _KNOWN)
