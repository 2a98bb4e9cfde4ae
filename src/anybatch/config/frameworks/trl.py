"""Arguments of TRL."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.config.frameworks.common import (
    ACCUMULATED,
    MINIBATCHES,
    NO_VALUE_CLIPPING,
    TWICE,
    beyond_notes,
    is_adam,
    is_linear,
    schedule_notes,
)
from anybatch.config.frameworks.rows import Code, Framework, Row
from anybatch.config.schema import TrainConfig


def _reference(config: TrainConfig) -> bool:
    """Whether the reference model of GRPO takes the role of the proximal EWMA."""
    return config.policy.objective == "kl" and config.policy.proximal == "ewma"


def _is_async(config: TrainConfig) -> bool:
    """Whether AsyncGRPO, which has no reference model, is the counterpart of the source of rollouts."""
    return config.rollout.source.kind == "asynchronous" and not _reference(config)


def _notes(config: TrainConfig) -> Iterator[str]:
    optimizer, policy = config.optimizer, config.policy
    yield from schedule_notes(config)
    yield from beyond_notes(config, ("source",) if _is_async(config) else ())
    if _is_async(config):
        staleness = config.rollout.source.max_lag * optimizer.minibatches
        yield (
            f"rollout.source asynchronous: use AsyncGRPOConfig in place of GRPOConfig, with max_staleness={staleness}, "
            "which counts gradient steps; it makes one pass, and has no num_iterations, steps_per_generation and "
            "entropy_coef"
        )
    yield from _limit_notes(config)
    yield (
        "per_device_train_batch_size x gradient_accumulation_steps x devices is the optimisation batch, and "
        "per_device_train_batch_size x steps_per_generation x devices is the iteration batch; both count completions, "
        "so divide your values by the same factor instead of copying values"
    )
    yield (
        "total_env_steps: no counterpart; max_steps counts gradient steps, so multiply it by the factor by which you "
        "divide the optimisation batch"
    )
    yield (
        "env.num_envs, rollout.steps, observation.normalize, reward.normalize, GAE, the value function and the "
        "auxiliary phase: no counterpart"
    )
    if config.advantage.normalize and policy.proximal == "ewma" and not (_reference(config) or _is_async(config)):
        yield (
            f"advantage.span: pass advantage_span={config.advantage.span:.7g} to DecoupledGRPOTrainer, with "
            'scale_rewards="none"; TRL\'s own trainer normalises rewards in a group or a batch'
        )
    elif config.advantage.normalize:
        yield f"advantage.span {config.advantage.span:g}: no counterpart; TRL normalises rewards in a group or a batch"
    if optimizer.kind == "sgd" and optimizer.sgd_momentum:
        yield f"optimizer.sgd_momentum {optimizer.sgd_momentum:g}: no counterpart"


def _limit_notes(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence about the policy that limits the step."""
    policy = config.policy
    if _reference(config):
        yield (
            "the reference model takes the role of the proximal EWMA, alpha = 1/(1 + policy.center_of_mass), but its "
            "KL is in the opposite direction, KL[theta, reference], and it is evaluated once per generated batch, so "
            "that part of its age follows the iteration batch; epsilon is too large to clip"
        )
    elif policy.proximal == "ewma":
        trainer = "DecoupledAsyncGRPOTrainer" if _is_async(config) else "DecoupledGRPOTrainer"
        yield (
            f"policy.center_of_mass, policy.max_importance_ratio: pass center_of_mass={policy.center_of_mass:.7g}, "
            f'weight="token", bound=Truncate({policy.max_importance_ratio:.7g}) to anybatch.integrations.trl.{trainer} '
            "(Truncate is in anybatch.integrations.token_objectives); in TRL's own trainer, epsilon clips around the "
            "behaviour policy"
        )
    elif policy.proximal == "recent":
        yield "policy.proximal recent: no counterpart; epsilon clips around the behaviour policy"
    elif policy.objective == "kl":
        yield (
            f"policy.kl_coefficient {policy.kl_coefficient:g} to the behaviour policy: no counterpart; beta is for the "
            "KL to a reference model; epsilon limits the policy instead"
        )


_BETA = "policy.kl_coefficient (of the KL to the proximal policy, not to a reference model)"
_ARGUMENTS = (
    Row("learning_rate", "optimizer.step_size"),
    Row("adam_beta1", "optimizer.adam_betas", lambda config: config.optimizer.adam_betas[0], when=is_adam),
    Row("adam_beta2", "optimizer.adam_betas", lambda config: config.optimizer.adam_betas[1], when=is_adam),
    Row("adam_epsilon", "optimizer.adam_eps", when=is_adam),
    Row("optim", "optimizer.kind", when=lambda config: not is_adam(config)),
    Row("lr_scheduler_type", "optimizer.schedule", lambda x: "linear" if is_linear(x) else "constant"),
    Row("num_iterations num_ppo_epochs", "optimizer.policy_epochs"),
    Row("epsilon cliprange", "policy.clip", lambda config: 1e9 if _reference(config) else config.policy.clip),
    Row("entropy_coef", "policy.entropy_coefficient", when=lambda config: config.policy.entropy_coefficient != 0),
    Row("max_grad_norm", "optimizer.max_grad_norm", lambda config: config.optimizer.max_grad_norm or 0.0),
    Row(
        "steps_per_generation",
        "",
        lambda x: Code(f"{x.optimizer.minibatches} * GRADIENT_ACCUMULATION_STEPS"),
        ACCUMULATED,
    ),
    Row("beta kl_coef", "policy.kl_coefficient", meaning=_BETA, when=_reference),
    Row("sync_ref_model", "", lambda config: True, "policy.proximal ewma", _reference),
    Row("ref_model_sync_steps", "", lambda config: 1, "always 1 here", _reference),
    Row(
        *("ref_model_mixup_alpha", "policy.center_of_mass", lambda config: 1 / (1 + config.policy.center_of_mass)),
        meaning="1 / (1 + policy.center_of_mass)",
        when=_reference,
    ),
)
_KNOWN = (
    Row("num_mini_batches", "optimizer.minibatches"),
    Row("gamma", "advantage.discount"),
    Row("lam", "advantage.gae_lambda"),
    Row("vf_coef", meaning=TWICE),
    Row("cliprange_value", meaning=NO_VALUE_CLIPPING),
    Row("epsilon_high", meaning="not available here, policy.clip is the same on both sides"),
    Row("num_generations", meaning="not used here, advantages come from a value function"),
    Row("per_device_train_batch_size", meaning=MINIBATCHES),
    Row("gradient_accumulation_steps", meaning="not needed here, micro_batch limits the memory of a gradient step"),
    Row("num_train_epochs", meaning="not used here, total_env_steps is the length of a run"),
)

TABLE = Framework("TRL", {"GRPOConfig": _ARGUMENTS}, _notes, _KNOWN)
