"""Arguments of RLlib."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anybatch.config.frameworks.common import (
    ITERATION,
    MINIBATCHES,
    NO_VALUE_CLIPPING,
    describe_optimizer,
    exact_kl,
    is_linear,
    is_penalty,
    minibatch_size,
    ppo_notes,
)
from anybatch.config.frameworks.rows import Framework, Row
from anybatch.config.schema import TrainConfig


def _notes(config: TrainConfig) -> Iterator[str]:
    yield from ppo_notes(config, "advantages are normalised over each train batch", "", always=True)
    yield from exact_kl(config)
    if is_penalty(config):
        yield (
            "kl_coeff penalises the KL to the behaviour policy and is adapted to kl_target after every iteration; it "
            "cannot be held constant"
        )
    yield (
        f"total_env_steps {config.total_env_steps}: no argument of training(); stop when "
        "num_env_steps_sampled_lifetime in the results of train() has reached it"
    )
    optimizer = describe_optimizer(config)
    yield f"{optimizer}: no argument of training(); override the learner's configure_optimizers_for_module"
    yield (
        "both batch sizes are per learner: with several, divide them by the number of learners; "
        "num_env_runners times num_envs_per_env_runner is the number of environments"
    )


def _step(config: TrainConfig) -> object:
    step = config.optimizer.step_size
    return [[0, step], [config.total_env_steps, 0.0]] if is_linear(config) else step


_ENV = (
    Row("num_env_runners num_workers", "", lambda config: 1, "a factor of env.num_envs"),
    Row("num_envs_per_env_runner num_envs_per_worker", "env.num_envs", meaning="env.num_envs / num_env_runners"),
    Row("rollout_fragment_length", "rollout.steps"),
)
_PPO = (
    Row("train_batch_size_per_learner train_batch_size", "", lambda x: x.iteration_batch, ITERATION),
    Row("minibatch_size sgd_minibatch_size", "optimizer.minibatches", minibatch_size, MINIBATCHES),
    Row("num_epochs num_sgd_iter", "optimizer.policy_epochs"),
    Row("lr", "optimizer.step_size", _step),
    Row("gamma", "advantage.discount"),
    Row("lambda_", "advantage.gae_lambda"),
    Row("clip_param", "policy.clip", lambda config: math.inf if is_penalty(config) else config.policy.clip),
    Row("use_kl_loss", "policy.objective", is_penalty, "policy.objective kl"),
    Row("kl_coeff", "policy.kl_coefficient", lambda x: x.policy.kl_coefficient if is_penalty(x) else 0.0),
    Row("entropy_coeff", "policy.entropy_coefficient"),
    Row("vf_loss_coeff", "optimizer.value_coefficient"),
    Row("vf_clip_param", "", lambda config: math.inf, NO_VALUE_CLIPPING),
    Row("grad_clip", "optimizer.max_grad_norm"),
)
_KNOWN = (
    Row("kl_target", meaning="not used here, policy.kl_coefficient is constant"),
    Row("use_critic", meaning="always true here"),
)

TABLE = Framework("RLlib", {"config.env_runners": _ENV, "config.training": _PPO}, _notes, _KNOWN)
