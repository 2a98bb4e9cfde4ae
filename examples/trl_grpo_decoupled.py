"""Decoupled token-level losses inside TRL's GRPO trainer, on stale completions.

GRPO takes many gradient steps on completions that were sampled once, so its data is stale, and its ratio
does two jobs: it corrects for who sampled, and it limits the step. Here they are separate. A subclass of the real
`GRPOTrainer` replaces its loss by `anybatch.integrations.token_objectives.token_clip_loss`: it clips around a moving
average of the weights, and the importance weight (its level, and how it is bounded, are arguments) corrects for the
policy that sampled. Advantages are normalised by moments over iterations, and the sum over tokens is divided by the
number of tokens of the whole gradient step, so that micro-batches leave the gradient as it is.

The model is a randomly initialised transformer of 10,000 weights whose ten-word tokenizer is made here; it learns to
say "a". Nothing is downloaded. One process, all weights trained; the average is a second copy of the model, and of a
bf16 model another one in fp32, which `EwmaProximal` keeps because small steps of an average are lost in bf16.

How to run it (under a minute on a CPU):

    pip install '.[trl]'
    python examples/trl_grpo_decoupled.py
    python examples/trl_grpo_decoupled.py --weight sequence_geometric_mean --bound mask
"""

from __future__ import annotations

import argparse
import os
from typing import Any, get_args

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported; nothing here needs the hub

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from anybatch.distributed import moments
from anybatch.integrations.token_objectives import Bound, Level, Mask, Truncate, importance_weights, token_clip_loss
from anybatch.normalize import AdvantageNormalizer
from anybatch.proximal import EwmaProximal


class DecoupledGRPOTrainer(GRPOTrainer):
    """TRL's GRPO trainer with L^CLIP_decoupled; the policy that limits the step is an EWMA of the weights."""

    def __init__(
        self,
        *args: Any,
        weight: Level,
        bound: Bound,
        center_of_mass: float = 8.0,
        advantage_span: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.weight, self.bound = weight, bound
        self.proximal = EwmaProximal(self.model, center_of_mass)
        self.proximal.module.eval()
        self.normalizer = AdvantageNormalizer(advantage_span)
        self.add_callback(_AfterGradientStep(self.proximal))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.normalizer.update(*moments(output["advantages"]))
            output["advantages"] = self.normalizer(output["advantages"])
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        mask, ids = inputs["completion_mask"], torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, mask.size(1), compute_entropy=True
        )
        with torch.no_grad():
            logp_proximal, _, _ = self._get_per_token_logps_and_entropies(
                self.proximal.module, ids, attention, mask.size(1)
            )
        # TRL computes these when it generates, unless each batch is used for a single gradient step and so is fresh
        logp_behavior = inputs.get("old_per_token_logps", logp.detach())
        loss = token_clip_loss(
            logp,
            logp_proximal,
            logp_behavior,
            inputs["advantages"],
            mask,
            weight=self.weight,
            bound=self.bound,
            denominator=self._denominator(inputs),
            clip=self.epsilon_low,
        )
        with torch.no_grad():
            weights = importance_weights(logp, logp_behavior, mask, weight=self.weight, bound=self.bound)
            statistics = {
                "entropy": (entropy * mask).sum() / mask.sum(),
                "importance_weight/max": weights.max(),
                "log_ratio/proximal": ((logp - logp_proximal).abs() * mask).sum() / mask.sum(),
                "log_ratio/behavior": ((logp - logp_behavior).abs() * mask).sum() / mask.sum(),
            }
        for name, value in statistics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value.item())
        return loss

    def _denominator(self, inputs: dict[str, Any]) -> float:
        """Samples in one gradient step of one process: tokens, or completions; the same for each micro-batch of it."""
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.weight != "token":
            return float(len(inputs["completion_ids"]) * steps)
        tokens = float(inputs["num_items_in_batch"]) / self.accelerator.num_processes  # of the generation batch
        return tokens * steps / self.args.steps_per_generation if self.model.training else tokens


class _AfterGradientStep(TrainerCallback):
    def __init__(self, proximal: EwmaProximal) -> None:
        self.proximal = proximal

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """theta_prox <- EWMA(theta)."""
        self.proximal.after_gradient_step()


def tiny() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A language model of one layer, and a tokenizer of the words a to h."""
    words = ["<pad>", "<eos>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config), wrapped


def says_a(completions: list[str], **_: Any) -> list[float]:
    """The reward: how many of eight words are "a"."""
    return [completion.split().count("a") / 8 for completion in completions]


def build(
    out: str,
    *,
    weight: Level = "token",
    bound: Bound | None = None,
    gradient_steps: int = 24,
    micro_batch: int = 16,
    center_of_mass: float = 4.0,
    seed: int = 0,
) -> DecoupledGRPOTrainer:
    """A trainer that samples 64 completions, and takes 4 gradient steps of 32 on them, 2 passes.

    Args:
        out: folder that transformers insists on; nothing is saved.
        weight: level of the importance weights.
        bound: what happens to large ones; None means Truncate(100).
        gradient_steps: in all.
        micro_batch: completions in one forward pass, a divisor of 32; the gradient does not depend on it.
        center_of_mass: of the proximal EWMA, in gradient steps.
        seed: of everything.
    """
    model, tokenizer = tiny()
    settings = GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=32 // micro_batch,
        steps_per_generation=64 // micro_batch,  # two gradient steps on each sampled batch,
        num_iterations=2,  # twice over: its last gradient step is three steps stale
        num_generations=8,
        max_completion_length=8,
        max_steps=gradient_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        epsilon=0.2,
        beta=0.0,  # no reference model
        scale_rewards="none",  # moments over iterations instead, see the trainer
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        logging_steps=4,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = ["b c", "d e", "f g", "c h", "e e", "h b", "g d", "b f"]
    return DecoupledGRPOTrainer(
        model=model,
        reward_funcs=says_a,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts * 8}),
        processing_class=tokenizer,
        weight=weight,
        bound=bound or Truncate(100.0),
        center_of_mass=center_of_mass,
    )


def rewards(trainer: DecoupledGRPOTrainer) -> list[float]:
    """Mean reward of each sampled batch."""
    return [float(row["reward"]) for row in trainer.state.log_history if "reward" in row]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weight", choices=get_args(Level), default="token")
    parser.add_argument("--bound", choices=("truncate", "mask"), default="truncate")
    parser.add_argument("--gradient-steps", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more
    chosen = Truncate(100.0) if asked.bound == "truncate" else Mask(below=0.1, above=10.0)
    run = build("runs/trl-grpo", weight=asked.weight, bound=chosen, gradient_steps=asked.gradient_steps)
    run.train()
    print("mean reward of each sampled batch:", " ".join(f"{x:.2f}" for x in rewards(run)))
