"""Decoupled objectives and a proximal EWMA inside TRL's GRPO trainer, on stale completions.

GRPO takes many gradient steps on completions that were sampled once, so its data is stale, and its ratio does two jobs:
it corrects for who sampled, and it limits the step. Here they are separate.
`anybatch.integrations.trl.DecoupledGRPOTrainer` is TRL's trainer with TRL's own loss, which clips around a moving
average of the weights; the importance weight (its level, and how it is bounded, are arguments) corrects for the policy
that sampled. Advantages are normalised by moments over iterations, and the sum over tokens is divided by the number of
tokens of the whole gradient step (`loss_type="dapo"`), so that micro-batches leave the gradient as it is.

The model is a randomly initialised transformer of 10,000 weights whose ten-word tokenizer is made here; it learns to
say "a". Nothing is downloaded.

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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from anybatch.integrations.token_batches import Level
from anybatch.integrations.token_objectives import Bound, Mask, Truncate
from anybatch.integrations.trl import DecoupledGRPOTrainer


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
    **changes: Any,
) -> DecoupledGRPOTrainer:
    """A trainer that samples 64 completions, and takes 4 gradient steps of 32 on them, 2 passes.

    Args:
        out: folder that transformers insists on; nothing is saved.
        weight: level of the importance weights prox/behav.
        bound: what happens to large ones; None means Truncate(100).
        gradient_steps: in all.
        micro_batch: completions in one forward pass, a divisor of 32; the gradient does not depend on it.
        center_of_mass: of the proximal EWMA, in gradient steps.
        seed: of everything.
        **changes: other arguments of the trainer, or of TRL's configuration.
    """
    model, tokenizer = tiny()
    settings: dict[str, Any] = {
        "output_dir": out,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": 32 // micro_batch,
        "steps_per_generation": 64 // micro_batch,  # two gradient steps on each sampled batch,
        "num_iterations": 2,  # twice over: its last gradient step is three steps stale
        "num_generations": 8,
        "max_completion_length": 8,
        "max_steps": gradient_steps,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "epsilon": 0.2,
        "beta": 0.0,  # no reference model
        "scale_rewards": "none",  # moments over iterations instead: advantage_span
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": seed,
        "logging_steps": 4,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    settings |= {name: changes.pop(name) for name in list(changes) if name in GRPOConfig.__dataclass_fields__}
    prompts = ["b c", "d e", "f g", "c h", "e e", "h b", "g d", "b f"]
    return DecoupledGRPOTrainer(
        model=model,
        reward_funcs=says_a,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": prompts * 8}),
        processing_class=tokenizer,
        weight=weight,
        bound=bound or Truncate(100.0),
        center_of_mass=center_of_mass,
        **{"advantage_span": 1.0, **changes},
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
