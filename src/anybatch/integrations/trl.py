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
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from anybatch.config.validation import check_positive
from anybatch.diagnostics.noise_scale import NoiseScale, window_steps
from anybatch.errors import ConfigError, install_command
from anybatch.integrations.token_batches import Level
from anybatch.integrations.token_objectives import Bound, check_options, importance_weights, of_weight
from anybatch.integrations.weight_average import WeightAverage, evaluation_mode
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
_ROUNDING = 1e-5
"""Advantages below this are rounding errors of equal rewards; moments would enlarge them to 1."""
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
        check_options(weight, bound)
        check_positive("center_of_mass", center_of_mass)  # before the model is loaded
        super().__init__(*args, **kwargs)
        self._check()
        trainer: Any = self
        self.weight, self.bound, self.center_of_mass = weight, bound, center_of_mass
        self.average = WeightAverage(trainer.model.named_parameters(), center_of_mass, average_device)
        self.measures_noise = noise_scale
        self.noise_scale: NoiseScale | None = None
        """Made before the first step of the optimiser, whose kind it depends on."""
        self._saved_noise: dict[str, Any] | None = None
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

    def measure_noise(self) -> None:
        """Add the gradient of a step to the noise scale, unless its completions have been there before."""
        trainer: Any = self
        if not (self.measures_noise and self._is_first_pass()):
            return
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
        if self.noise_scale is None:
            self.noise_scale = self._new_noise_scale(isinstance(optimizer, Adam))
        self.noise_scale.add(list(self.average.parameters.values()), optimizer, self._samples_of_step())
        for name, value in self.noise_scale.result().items():
            trainer._metrics["train"][name].append(value)

    def _new_noise_scale(self, adam: bool) -> NoiseScale:
        # a generated batch is shuffled over its gradient steps, which then have prompts in common
        steps = self._steps_of_batch()
        shared = steps > 1
        window = window_steps(steps, self.center_of_mass, shared_trajectories=shared)
        device = self.args.device  # type: ignore[attr-defined]
        noise = NoiseScale(window, adam=adam, iteration=steps if shared else None, device=device)
        if self._saved_noise is not None and self._saved_noise["signal"].keys() == noise.state_dict()["signal"].keys():
            noise.load_state_dict(self._saved_noise)
        return noise

    def _steps_of_batch(self) -> int:
        """Gradient steps of one pass over completions that were generated together."""
        return 1

    def _is_first_pass(self) -> bool:
        """Whether the completions of the gradient step have not been trained on before."""
        return True

    def _samples_of_step(self) -> int:
        """Completions of the gradient step, on all devices."""
        raise NotImplementedError

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
        # without its open window: after a resume, TRL generates a new batch
        noise = None if self.noise_scale is None else {**self.noise_scale.state_dict(), "window": {}}
        return {"average": self.average.state_dict(), "noise_scale": noise}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state["average"])
        self._saved_noise = state.get("noise_scale")


class _GradientSteps(TrainerCallback):
    """The noise scale before each step of the optimiser, the average after it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the gradient, which is that of all micro-batches, clipped if TRL clips."""
        self.trainer.measure_noise()

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
                (third adjustment of section 4), with ``scale_rewards="none"`` and
                ``multi_objective_aggregation="sum_then_normalize"``; None leaves advantages to TRL.
            **kwargs: those of ``trl.GRPOTrainer``, and ``weight``, the level of prox/behav; ``bound``, the treatment of
                large weights prox/behav; ``center_of_mass`` of the average in gradient steps, above 0 (8);
                ``average_device``, where it is kept in fp32 (that of the weights); ``noise_scale``, whether the
                gradient noise scale is measured and logged, which takes the memory of four more gradients in fp32
                (False).

        Raises:
            ConfigError: an option is none of these, weights are sharded, a loss without an importance ratio, rewards
                are scaled twice, TRL would weigh its KL term by theta/prox, or the noise scale would be measured on
                gradient steps that have the same completions twice.
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
        wanted = {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"}
        for name, value in wanted.items() if self.normalizer is not None else ():
            if (chosen := getattr(settings, name)) != value:
                raise ConfigError(
                    f'{name} is {chosen!r}, but advantage_span would scale rewards again; set {name}="{value}"'
                )
        fresh, parts, epochs = settings.steps_per_generation, settings.gradient_accumulation_steps, self.num_iterations
        if self.measures_noise and fresh % parts and (fresh > parts or epochs > 1):
            raise ConfigError(
                f"noise_scale needs gradient steps within a pass, but steps_per_generation is {fresh}, which is not a "
                f"multiple of gradient_accumulation_steps {parts}"
            )

    def _steps_of_batch(self) -> int:
        args: Any = self.args
        return max(1, int(args.steps_per_generation // args.gradient_accumulation_steps))

    def _is_first_pass(self) -> bool:
        args: Any = self.args
        last, fresh = self._step - 1, args.steps_per_generation  # in micro-batches
        return bool(last % (fresh * self.num_iterations) < fresh)

    def _samples_of_step(self) -> int:
        args = self.args
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        policy: Any = self.model
        if policy.training and self.normalizer is not None:
            advantages = torch.where(output["advantages"].abs() < _ROUNDING, 0.0, output["advantages"])
            everywhere = self.accelerator.gather(advantages).double()
            self.normalizer.update(everywhere.mean(), everywhere.var(correction=0), everywhere.numel())
            output["advantages"] = self.normalizer(advantages)
        return output

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # without a gradient, these are of a policy to compare with: dropout would make noise of the weights prox/behav
        with nullcontext() if torch.is_grad_enabled() else evaluation_mode(model):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

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

    def _samples_of_step(self) -> int:
        return round(self._step_samples)  # TRL packs as many as fit into token_budget

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
