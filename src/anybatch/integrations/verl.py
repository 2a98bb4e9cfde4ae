"""Decoupled losses for the hooks of verl, SkyRL, prime-rl and slime, none of which is imported.

| trainer | hook | function |
|---|---|---|
| verl | ``register_policy_loss(name)(verl_policy_loss())`` | :func:`verl_policy_loss` |
| SkyRL | ``PolicyLossRegistry.register(name, skyrl_policy_loss())`` | :func:`skyrl_policy_loss` |
| prime-rl | ``[trainer.loss] type = "custom"``, ``import_path`` | :func:`prime_rl_loss` |
| slime | ``--use-tis --custom-tis-function-path`` | :func:`slime_importance_weights` |

**None of them carries EWMA weights.** The proximal policy is what each trainer has in that place: in verl, SkyRL and
slime the weights at the start of the iteration ("old" log-probabilities, recomputed by the trainer), so that its age
follows the iteration batch. This is figure 1(b), and with fresh data the paper's ablation "no EWMA". prime-rl has only
the policy that sampled, figure 1(c), unless its reference model is an average. To carry an EWMA, keep a
:class:`anybatch.integrations.weight_average.WeightAverage` in the training worker, move it after each step of the
optimiser, and compute the old log-probabilities inside ``average.applied(model)``. This was not tried with sharded
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.errors import ConfigError
from anybatch.integrations.token_batches import Level
from anybatch.integrations.token_objectives import (
    Bound,
    Truncate,
    check_options,
    count,
    importance_weights,
    of_weight,
    token_clip_loss,
)

DEFAULT_BOUND = Truncate(100.0)
"""The paper's cap on theta/behav (appendix B)."""


@dataclass(frozen=True)
class LossOutputs:
    """Loss and metrics under the names that prime-rl reads."""

    loss: Tensor
    """Scalar: the sum over the tokens, which prime-rl divides by their number in the gradient step."""
    metrics: dict[str, Tensor]
    """Scalars to log."""


def verl_policy_loss(
    *, weight: Level = "token", bound: Bound | Sequence[Bound] = DEFAULT_BOUND
) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """A policy loss for verl's ``register_policy_loss``.

    Clip ranges, aggregation and the sizes of the global batch are those of verl's actor configuration. verl hands over
    prox/behav as ``rollout_is_weights``, truncated by its ``algorithm.rollout_correction``, from which log behav is
    computed; without it the data counts as sampled by the old policy. verl's dual clip, ``clip_ratio_c``, is left
    out: the cap on theta/behav takes its place, and keeps the gradient.

    >>> from verl.trainer.ppo.core_algos import register_policy_loss
    >>> register_policy_loss("decoupled")(verl_policy_loss())

    Args:
        weight: the level of prox/behav; with verl's weights it must be ``token``, for they have a level already.
        bound: the treatment of large weights.

    Returns:
        A function of verl's arguments, which returns the scalar loss and metrics.

    Raises:
        ConfigError: an option is not one of these, or ``weight`` is not ``token`` when verl's weights arrive.
    """
    check_options(weight, bound)

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        if config is None:
            raise ConfigError("verl's policy losses need config, the actor's configuration")
        clip = tuple(
            float(config.clip_ratio if side is None else side)
            for side in (config.clip_ratio_low, config.clip_ratio_high)
        )
        behavior = old_log_prob
        if rollout_is_weights is not None:
            if weight != "token":
                raise ConfigError(
                    f"weight is {weight!r}, but verl's rollout_is_weights already have the level of its "
                    'algorithm.rollout_correction.rollout_is; set weight="token"'
                )
            behavior = old_log_prob - rollout_is_weights.log()
        aggregate, denominator = _verl_denominator(response_mask, loss_agg_mode, config.global_batch_info)
        options: Any = {"weight": weight, "ratio": "token", "bound": bound, "aggregate": aggregate, "clip": clip}
        policies = log_prob, old_log_prob, behavior
        value = token_clip_loss(*policies, advantages, response_mask, denominator=denominator, **options)
        metrics = _metrics(*policies, response_mask.bool(), clip)
        return value, {f"actor/{name}": x.item() for name, x in metrics.items()}

    return loss


def _verl_denominator(mask: Tensor, mode: str, batch: Any) -> tuple[str, float | Tensor]:
    """The terms of the sum, and its denominator on this worker, whose gradients verl averages over all of them."""
    workers = batch.get("dp_size") or 1
    tokens, completions = batch.get("batch_num_tokens"), batch.get("global_batch_size")
    if mode == "token-mean":
        return "token", (count(mask, "token").clamp(min=1) if tokens is None else tokens) / workers
    if mode == "token-sum":
        return "token", 1 / workers
    if mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
        total = count(mask, "sequence_product").clamp(min=1) if completions is None else completions
        length = float(batch.get("loss_scale_factor") or mask.shape[-1]) if mode.endswith("norm") else 1.0
        return "sequence" if mode.endswith("mean") else "token", total * length / workers
    raise ConfigError(
        f"loss_agg_mode is {mode!r}, but must be token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or "
        "seq-mean-token-sum-norm"
    )


def skyrl_policy_loss(
    *, weight: Level = "token", bound: Bound | Sequence[Bound] = DEFAULT_BOUND
) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """A policy loss for SkyRL's ``PolicyLossRegistry``.

    Clip ranges are ``eps_clip_low`` and ``eps_clip_high`` of SkyRL's configuration. SkyRL scales the advantages for its
    ``loss_reduction`` beforehand, so the loss is a sum. Leave ``off_policy_correction`` off: ``bound`` replaces it.

    Args:
        weight: the level of prox/behav.
        bound: the treatment of large weights.

    Returns:
        A function of SkyRL's arguments, which returns the scalar loss and metrics.

    Raises:
        ConfigError: an option is not one of these.
    """
    check_options(weight, bound)

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask > 0
        behavior = old_log_probs if rollout_logprobs is None else rollout_logprobs
        clip = (float(config.eps_clip_low), float(config.eps_clip_high))
        policies = log_probs, old_log_probs, behavior
        options: Any = {"weight": weight, "ratio": "token", "bound": bound, "aggregate": "token", "clip": clip}
        value = token_clip_loss(*policies, advantages, mask, denominator=1.0, **options)
        metrics = _metrics(*policies, mask, clip)
        return value, {"clip_ratio": metrics.pop("clip_fraction").item(), **{k: x.item() for k, x in metrics.items()}}

    return loss


def prime_rl_loss(
    inputs: Any,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_importance_ratio: float = 100.0,
    proximal: str = "inference",
) -> LossOutputs:
    """The decoupled clipped objective of one sequence, for prime-rl's ``[trainer.loss] type = "custom"``.

    In its TOML file, ``import_path`` is "anybatch.integrations.verl.prime_rl_loss", and the keyword arguments are
    ``kwargs``.

    Args:
        inputs: prime-rl's ``LossInputs``: (T,) log-probabilities by trainer, inference and reference, advantages, mask
            and weights of the tokens.
        clip_low: the ratio theta/prox is clipped from below at 1 - clip_low.
        clip_high: and from above at 1 + clip_high.
        max_importance_ratio: cap on theta/behav.
        proximal: ``inference``, the policy that sampled, or ``reference``, if the reference model is an average of the
            trained weights.

    Returns:
        The sum over the tokens, and metrics.

    Raises:
        ConfigError: ``proximal`` is neither, or there are no reference log-probabilities.
    """
    if proximal not in ("inference", "reference"):
        raise ConfigError(f"proximal is {proximal!r}, but must be inference or reference")
    logp_proximal = inputs.inference_logprobs if proximal == "inference" else inputs.ref_logprobs
    if logp_proximal is None:
        raise ConfigError("proximal is 'reference', but prime-rl provides no reference log-probabilities")
    policies, mask = (inputs.trainer_logprobs, logp_proximal, inputs.inference_logprobs), inputs.loss_mask
    advantages = inputs.advantages if inputs.loss_weights is None else inputs.advantages * inputs.loss_weights
    ids, clip = torch.zeros_like(mask, dtype=torch.int64), (clip_low, clip_high)
    loss = token_clip_loss(
        *policies,
        advantages,
        mask,
        weight="token",
        bound=Truncate(max_importance_ratio),
        denominator=1.0,
        clip=clip,
        sequence_ids=ids,
    )
    return LossOutputs(loss, _metrics(*policies, mask.bool(), clip))


def slime_importance_weights(
    *, weight: Level = "token", bound: Bound | Sequence[Bound] = DEFAULT_BOUND
) -> Callable[..., tuple[Tensor, list[Tensor], dict[str, Tensor]]]:
    """Importance weights prox/behav for slime's ``--custom-tis-function-path``.

    slime clips theta/prox itself and multiplies the loss of each token by these weights. The option takes the path of
    a function: put ``weights = slime_importance_weights(...)`` into a module of yours and name ``your_module.weights``.

    Args:
        weight: the level of prox/behav; with context parallelism it must be ``token``, for sequences are cut then.
        bound: the treatment of large weights; a bound on prox/behav, whose ``of`` is not looked at.

    Returns:
        A function of slime's arguments, which returns the weighted loss of each token, the masks as they are, and
        metrics.

    Raises:
        ConfigError: an option is not one of these.
    """
    check_options(weight, bound)

    def weigh(
        args: Any,
        *,
        pg_loss: Tensor,
        train_log_probs: list[Tensor],
        rollout_log_probs: list[Tensor],
        loss_masks: list[Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        lengths = torch.tensor([len(x) for x in train_log_probs], device=pg_loss.device)
        ids = torch.arange(len(lengths), device=pg_loss.device).repeat_interleave(lengths)
        proximal, behavior = torch.cat(train_log_probs).detach(), torch.cat(rollout_log_probs)
        counted = torch.ones_like(ids) if weight == "token" else torch.cat(loss_masks)
        bounds = of_weight(bound)
        weights = importance_weights(proximal, behavior, counted, weight=weight, bound=bounds, sequence_ids=ids)
        plain = importance_weights(proximal, behavior, counted, weight=weight, bound=(), sequence_ids=ids)
        return pg_loss * weights, loss_masks, {"tis": plain, "tis_clipfrac": (weights != plain).float()}

    return weigh


@torch.no_grad()
def _metrics(
    logp: Tensor, proximal: Tensor, behavior: Tensor, mask: Tensor, clip: tuple[float, ...]
) -> dict[str, Tensor]:
    """Fraction clipped, and how far the policy is from the other two, as means over the tokens that count."""

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x.float(), 0.0).sum() / mask.sum().clamp(min=1)

    log_ratio, log_weight = logp - proximal, logp - behavior
    ratio = log_ratio.exp()
    return {
        "clip_fraction": mean((ratio < 1 - clip[0]) | (ratio > 1 + clip[1])),
        "kl_proximal": mean(log_ratio.expm1() - log_ratio),
        "kl_behavior": mean(log_weight.expm1() - log_weight),
    }
