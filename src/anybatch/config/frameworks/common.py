"""Values, conditions and sentences that several tables use."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from anybatch.config.schema import TrainConfig

EPOCHS = "policy_epochs and optimizer.value_epochs"
ITERATION = "env.num_envs * rollout.steps"
ITERATIONS = f"total_env_steps / ({ITERATION})"
ACCUMULATED = "optimizer.minibatches * gradient_accumulation_steps"
TWICE = "twice optimizer.value_coefficient"
MINIBATCHES = "optimizer.minibatches = env.num_envs * rollout.steps / {name}"
SEED = "the argument seed of train, not a field of the configuration"
NO_VALUE_CLIPPING = "not used here, values are never clipped"


def has_ewma(config: TrainConfig) -> bool:
    """Whether the proximal policy is the EWMA."""
    return config.policy.proximal == "ewma"


def minibatch_size(config: TrainConfig) -> int:
    """Samples in a gradient step."""
    return round(config.optimization_batch)


def max_norm(config: TrainConfig) -> float:
    """Largest norm of a gradient, for frameworks that always clip."""
    norm = config.optimizer.max_grad_norm
    return 1e9 if norm is None else norm


def is_adam(config: TrainConfig) -> bool:
    """Whether the optimiser is Adam, not SGD."""
    return config.optimizer.kind == "adam"


def is_penalty(config: TrainConfig) -> bool:
    """Whether the objective has the KL penalty in place of clipping."""
    return config.policy.objective == "kl"


def is_linear(config: TrainConfig) -> bool:
    """Whether the step size decays to 0 linearly."""
    return config.optimizer.schedule == "linear"


def describe_optimizer(config: TrainConfig) -> str:
    """The optimiser's settings beside the step size, in words."""
    optimizer = config.optimizer
    if optimizer.kind == "sgd":
        return f"SGD with momentum {optimizer.sgd_momentum:g}"
    betas = ", ".join(f"{beta:.7g}" for beta in optimizer.adam_betas)
    return f"Adam's betas ({betas}) and epsilon {optimizer.adam_eps:g}"


def schedule_notes(config: TrainConfig) -> Iterator[str]:
    """Schedules that none of the frameworks has."""
    if config.optimizer.schedule not in ("constant", "linear"):
        yield f"optimizer.schedule {config.optimizer.schedule}: set the framework's schedule; the step size is constant"
    for name in ("clip", "entropy"):
        if (schedule := getattr(config.policy, f"{name}_schedule")) != "constant":
            yield f"policy.{name}_schedule {schedule}: set the framework's schedule; the value is constant"


def beyond_notes(config: TrainConfig, counterparts: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for stale data, and for each rule beyond the paper, that the framework does not have.

    ``counterparts`` are the rules that it has, and "source" if it has stale data.
    """
    policy, optimizer = config.policy, config.optimizer
    sentences = {
        "epoch_window": (optimizer.epoch_window != 1, "all passes over a sample are made at once"),
        "kl_target": (optimizer.kl_target is not None, "the step size does not follow the KL"),
        "kl_stop": (optimizer.kl_stop is not None, "all epochs are made"),
        "follow_ess": (optimizer.follow_ess, "the step size does not follow the effective sample size"),
    }
    for name, (used, instead) in sentences.items():
        if used and name not in counterparts:
            yield f"optimizer.{name} {getattr(optimizer, name)}: no counterpart; {instead}"
    if config.stale and "source" not in counterparts:
        yield f"rollout.source {config.rollout.source.kind}: no counterpart; sampling and training alternate"
    if policy.second_moment is not None:
        yield f"policy.second_moment {policy.second_moment:g}: no counterpart; no sample is masked"
    if policy.interpolated:
        yield "policy.interpolated true: no counterpart; the limit is around the behaviour policy"


def exact_kl(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for frameworks whose KL penalty is the exact one."""
    if is_penalty(config) and config.policy.kl_estimator != "exact":
        yield f"policy.kl_estimator {config.policy.kl_estimator}: no counterpart; the KL is exact"


def ppo_notes(
    config: TrainConfig, normalization: str, clipping: str, always: bool = False, counterparts: Collection[str] = ()
) -> Iterator[str]:
    """Yield a sentence for each property that none of the PPOs has.

    ``normalization`` is how the framework normalises advantages, empty if as we do, and ``always`` whether it cannot be
    switched off; ``clipping`` limits the policy there in place of a KL penalty, empty if it has one; ``counterparts``
    are the rules beyond the paper that it has.
    """
    policy, optimizer = config.policy, config.optimizer
    yield from schedule_notes(config)
    yield from beyond_notes(config, counterparts)
    if policy.proximal != "behavior" and normalization:
        ewma = policy.proximal == "ewma"
        what = f"policy.center_of_mass {policy.center_of_mass:g}" if ewma else "policy.proximal recent"
        yield (
            f"{what}: no counterpart; the limit is around the behaviour policy, whose age follows the iteration "
            "batch: keep environments times steps constant where you can, and change only the minibatch size and the "
            "step size"
        )
    if policy.objective == "kl" and clipping:
        yield f"policy.kl_coefficient {policy.kl_coefficient:g}: no counterpart; {clipping} limits the policy instead"
    if config.advantage.normalize and normalization:
        yield f"advantage.span {config.advantage.span:g}: no counterpart; {normalization}"
    if not config.advantage.normalize and always and normalization:
        yield f"advantage.normalize false: no counterpart; {normalization}"
    if optimizer.shuffle == "trajectories" and config.model.recurrent == "none":
        yield "optimizer.shuffle trajectories: no counterpart; minibatches consist of single samples"
    if optimizer.value_epochs != optimizer.policy_epochs:
        yield f"optimizer.value_epochs {optimizer.value_epochs}: no counterpart; values use policy_epochs as well"
    if config.aux.enabled:
        yield "aux (the auxiliary phase of PPG): no counterpart"
    if config.reward.normalize:
        yield (
            f"reward.normalize, with return_discount {config.reward.return_discount:g} and bound "
            f"{config.reward.bound:g}: wrap the environments (VecNormalize, NormalizeReward, a connector)"
        )
    if config.observation.normalize:
        yield (
            f"observation.normalize, with clip {config.observation.clip:g}: wrap the environments (VecNormalize, "
            "NormalizeObservation, a connector)"
        )
