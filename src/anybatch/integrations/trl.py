"""Decoupled objectives with a proximal EWMA in TRL's GRPO and AsyncGRPO trainers (extra ``anybatch[trl]``).

>>> from anybatch.integrations.token_objectives import Truncate
>>> from anybatch.integrations.trl import DecoupledGRPOTrainer
>>> trainer = DecoupledGRPOTrainer(model, reward_funcs, args, train_dataset=data, weight="token", bound=Truncate(100.0))

TRL's GRPO clips around the weights that were current when a batch arrived, so that the age of the proximal policy
follows the batch, and AsyncGRPO clips around the policy that sampled. Here an EWMA of the trained weights is the
proximal policy. TRL's own loss is used: ``prox/behav * min(r A, clip(r) A)`` is TRL's objective with the proximal
policy in the place of the old one and advantages ``prox/behav * A``. Its options keep their meaning: ``loss_type``,
``epsilon`` and ``epsilon_high``, ``importance_sampling_level`` (the level of the clipped ratio), entropy, tools,
images. With vLLM, behaviour log-probabilities are the sampler's, and ``bound`` replaces TRL's
``vllm_importance_sampling_mode``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.diagnostics.noise_scale import NoiseScale, window_steps
from anybatch.errors import ConfigError, install_command
from anybatch.integrations.token_batches import Level
from anybatch.integrations.token_objectives import Bound, importance_weights, of_weight
from anybatch.integrations.weight_average import WeightAverage
from anybatch.normalize import AdvantageNormalizer

try:
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.async_grpo import AsyncGRPOTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"anybatch.integrations.trl needs TRL: {install_command('trl')} ({error})", name=error.name
    ) from error

_FILE = "ppo_ewma.pt"
_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")


class _Decoupled:
    """The average, the importance weights, the noise scale and the checkpoints of both trainers."""

    def __init__(
        self,
        *args: Any,
        weight: Level,
        bound: Bound | Sequence[Bound],
        center_of_mass: float = 8.0,
        average_device: torch.device | str | None = None,
        noise_scale: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._check()
        trainer: Any = self
        self.weight, self.bound = weight, bound
        self.average = WeightAverage(trainer.model.named_parameters(), center_of_mass, average_device)
        self.noise_scale = None if not noise_scale else self._new_noise_scale(center_of_mass)
        trainer.add_callback(_GradientSteps(self))

    def _check(self) -> None:
        trainer: Any = self
        for enabled, name in ((trainer.is_deepspeed_enabled, "DeepSpeed"), (trainer.is_fsdp_enabled, "FSDP")):
            if enabled:
                raise ConfigError(
                    f"{name} shards the weights, from which the average cannot be computed; use data parallelism, and "
                    "PEFT if the whole model does not fit"
                )
        loss_type = getattr(trainer.args, "loss_type", "dapo")
        if loss_type not in _LOSSES:
            raise ConfigError(f"loss_type is {loss_type!r}, but must be one of {', '.join(_LOSSES)}")

    def _new_noise_scale(self, center_of_mass: float) -> NoiseScale:
        args: Any = self.args  # type: ignore[attr-defined]
        passes = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        steps = window_steps(max(1, passes // args.gradient_accumulation_steps), center_of_mass)
        return NoiseScale(steps, adam="adam" in str(args.optim).lower(), device=args.device)

    def _weights(self, logp_proximal: Tensor, logp_behavior: Tensor, mask: Tensor, ids: Tensor | None = None) -> Tensor:
        """The bounded weights prox/behav, in which the proximal policy is what the losses call theta."""
        weights = importance_weights(
            logp_proximal, logp_behavior, mask, weight=self.weight, bound=of_weight(self.bound), sequence_ids=ids
        )
        metrics = self._metrics["train"]  # type: ignore[attr-defined]
        distance = torch.where(mask.bool(), (logp_proximal - logp_behavior).abs(), 0.0).sum() / mask.sum().clamp(min=1)
        metrics["importance_weight/max"].append(weights.max().item())
        metrics["log_ratio/proximal_behavior"].append(distance.item())
        return weights

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.args.should_save:  # type: ignore[attr-defined]
            torch.save(self._state(), os.path.join(output_dir, _FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            path = os.path.join(checkpoint, _FILE)
            if os.path.exists(path):
                self._load_state(torch.load(path, map_location="cpu", weights_only=True))
            else:  # of another trainer, whose weights start the average
                self.average.reset()

    def _state(self) -> dict[str, Any]:
        return {"average": self.average.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state["average"])


class _GradientSteps(TrainerCallback):
    """The noise scale before each step of the optimiser, the average after it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the gradient, which is that of all micro-batches, clipped if TRL clips."""
        noise = self.trainer.noise_scale
        if noise is not None:
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            noise.add(list(self.trainer.average.parameters.values()), self.trainer.optimizer, samples)
            for name, value in noise.result().items():
                self.trainer._metrics["train"][name].append(value)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """theta_prox <- EWMA(theta), unless the step was skipped because a gradient of fp16 overflowed."""
        if not self.trainer.accelerator.optimizer_step_was_skipped:
            self.trainer.average.after_gradient_step()


class DecoupledGRPOTrainer(_Decoupled, GRPOTrainer):
    """TRL's GRPO trainer with decoupled objectives; the policy that limits the step is an EWMA of the weights."""

    def __init__(self, *args: Any, advantage_span: float | None = None, **kwargs: Any) -> None:
        """Build the trainer.

        Args:
            *args: those of ``trl.GRPOTrainer``.
            advantage_span: effective sample size of advantage moments in generated batches, 2/(1-beta)-1, at least 1
                (third adjustment of section 4), with ``scale_rewards="none"``; None leaves advantages to TRL.
            **kwargs: those of ``trl.GRPOTrainer``, and ``weight``, the level of prox/behav; ``bound``, the treatment of
                large weights prox/behav; ``center_of_mass`` of the average in gradient steps (8); ``average_device``,
                where it is kept in fp32 (that of the weights); ``noise_scale``, whether the gradient noise scale is
                measured and logged, which takes the memory of four more gradients in fp32 (False).

        Raises:
            ConfigError: weights are sharded, a loss without an importance ratio, rewards are scaled twice, or TRL would
                weigh its KL term by theta/prox.
        """
        for given in (*args, *kwargs.values()):
            if isinstance(given, GRPOConfig) and given.beta and given.use_bias_correction_kl:
                raise ConfigError(
                    f"beta is {given.beta} with use_bias_correction_kl, which weights the KL term by theta/old, but "
                    "the old policy is the average here, not the behaviour policy; set use_bias_correction_kl=False"
                )
        super().__init__(*args, **kwargs)
        self.normalizer = None if advantage_span is None else AdvantageNormalizer(advantage_span)
        settings: Any = self.args
        if self.normalizer is not None and settings.scale_rewards != "none":
            raise ConfigError(
                f"scale_rewards is {settings.scale_rewards!r}, but advantage_span would scale them again; set "
                'scale_rewards="none"'
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        policy: Any = self.model
        if policy.training and self.normalizer is not None:
            everywhere = self.accelerator.gather(output["advantages"]).double()
            self.normalizer.update(everywhere.mean(), everywhere.var(correction=0), everywhere.numel())
            output["advantages"] = self.normalizer(output["advantages"])
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        policy: Any = self.model
        if not policy.training:
            return super()._compute_loss(model, inputs)
        logp_proximal = self._proximal_logps(model, inputs)
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        behavior = self._behavior_logps(model, inputs)
        weights = self._weights(logp_proximal, behavior, mask)
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        replaced = {"old_per_token_logps": logp_proximal, "advantages": advantages * weights}
        replaced["sampling_per_token_logps"] = behavior  # off_policy_mask_threshold asks how far that policy is
        if "importance_sampling_ratio" in inputs:
            replaced["importance_sampling_ratio"] = torch.ones_like(weights)
        return super()._compute_loss(model, {**inputs, **replaced})

    def _proximal_logps(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """(B, T) log pi_prox of the sampled tokens."""
        with self.average.applied(model), torch.no_grad():
            return self._logps(model, inputs)

    def _behavior_logps(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """(B, T) log pi_behav of the sampled tokens: by the sampler, or by the weights that it had.

        TRL leaves them out where each batch is used for a single gradient step, and so is fresh. A token that vLLM
        could not score counts as sampled by the weights.
        """
        logp, by_sampler = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        if logp is None:
            with torch.no_grad():
                logp = self._logps(model, inputs)
        return logp if by_sampler is None else torch.where(by_sampler.isnan(), logp, by_sampler)

    def _logps(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        rest = {name: inputs[name] for name in _INPUTS if name in inputs}
        logps: Tensor = self._get_per_token_logps_and_entropies(
            model, ids, attention, inputs["completion_ids"].size(1), **rest
        )[0]
        return logps

    def _state(self) -> dict[str, Any]:
        moments = {} if self.normalizer is None else self.normalizer.state_dict()
        return {**super()._state(), "advantages": moments}

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        if self.normalizer is not None and state["advantages"]:
            self.normalizer.load_state_dict(state["advantages"])


class DecoupledAsyncGRPOTrainer(_Decoupled, AsyncGRPOTrainer):
    """TRL's AsyncGRPO trainer with decoupled objectives; its own clips around the policy that sampled (figure 1(c)).

    Arguments are those of ``trl.experimental.async_grpo.AsyncGRPOTrainer``, and of :class:`DecoupledGRPOTrainer` but
    for ``advantage_span``.
    """

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """TRL's loss of one packed micro-batch, with the average in the place of the policy that sampled.

        Args:
            model: the model that is trained.
            inputs: TRL's packed batch; the caller's dictionary stays as it is.
            return_outputs: TRL's own.
            num_items_in_batch: TRL's own.

        Returns:
            Scalar loss.
        """
        selected = inputs["token_index"] >= 0
        with self.average.applied(model), torch.no_grad():
            logp_proximal = self._packed_logps(model, inputs)
        _, completion = inputs["segment_id"][selected].unique(return_inverse=True)  # from 0 without gaps
        behavior = inputs["old_log_probs"][selected]
        weights = self._weights(logp_proximal, behavior, torch.ones_like(completion), completion)
        old, advantages = inputs["old_log_probs"].clone(), inputs["advantages"].clone()
        old[selected] = logp_proximal.to(old.dtype)
        advantages[selected] = advantages[selected] * weights.to(advantages.dtype)
        replaced = {**inputs, "old_log_probs": old, "advantages": advantages}
        loss: Tensor = super().compute_loss(model, replaced, return_outputs, num_items_in_batch)
        return loss

    def _packed_logps(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """(T,) log-probabilities of the tokens that count, by TRL's packed forward pass."""
        present = inputs["attention_mask"].bool()
        tokens = {name: inputs[name][present].unsqueeze(0) for name in ("input_ids", "position_ids", "shift_labels")}
        names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
        tree = {name: inputs[name][inputs[name] >= 0] for name in names}
        longest_q, longest_k = inputs["tree_max_seqlens"][0].tolist()
        outputs = model(**tokens, **tree, tree_max_seqlen_q=longest_q, tree_max_seqlen_k=longest_k, fused_lm_head=True)
        index = inputs["token_index"]
        logps: Tensor = outputs.log_probs.flatten()[index[index >= 0]]
        return logps
