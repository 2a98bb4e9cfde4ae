"""Decoupled objectives in TRL's own trainers, with a tiny model and stale completions."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl", reason="needs pip install '.[trl]'")

from accelerate import Accelerator
from trl import GRPOTrainer

import trl_grpo_decoupled
from anybatch.diagnostics.noise_scale import NoiseScale
from anybatch.errors import ConfigError
from anybatch.integrations.token_objectives import Mask, Truncate, token_clip_loss
from anybatch.integrations.trl import DecoupledAsyncGRPOTrainer, DecoupledGRPOTrainer
from anybatch.integrations.weight_average import WeightAverage
from trl_grpo_decoupled import build, rewards

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_learns_on_stale_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build(str(tmp_path), gradient_steps=36, noise_scale=True)
    added, add = [], NoiseScale.add

    def record(self: NoiseScale, *given: Any) -> None:
        added.append(trainer.state.global_step)
        add(self, *given)

    monkeypatch.setattr(NoiseScale, "add", record)
    trainer.train()
    assert added == [step for step in range(36) if step % 4 < 2]  # the second pass has the same completions
    seen = rewards(trainer)
    assert len(seen) == 9  # 36 gradient steps, 4 on each sampled batch
    assert seen[-1] > seen[0] + 0.15
    rows = [row for row in trainer.state.log_history if "importance_weight/max" in row]
    assert min(row["log_ratio/proximal_behavior"] for row in rows) > 0.001
    assert {"noise_scale", "noise_scale_adam", "gradient_correlation"} <= rows[-1].keys()
    assert rows[-1]["gradient_correlation"] != 0
    capsys.readouterr()


def test_micro_batches_leave_training_as_it_is(tmp_path: Path) -> None:
    """Completions differ in length, so dividing by each micro-batch's own tokens would give other gradients."""
    before = [x.clone() for x in trl_grpo_decoupled.tiny()[0].parameters()]
    trainers = []
    for size in (32, 8):
        trainers.append(build(str(tmp_path), gradient_steps=5, micro_batch=size))  # which seeds what train() draws
        trainers[-1].train()
    whole, parts = trainers
    assert rewards(whole) == rewards(parts)
    moved = max((x - y).abs().max().item() for x, y in zip(whole.model.parameters(), before, strict=True))
    assert moved > 0.01
    for pair in ((whole.model.parameters(), parts.model.parameters()), (whole.average.average, parts.average.average)):
        for x, y in zip(*pair, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-5)


def token_loss(trainer: DecoupledGRPOTrainer, model: nn.Module, inputs: dict[str, Any], **options: Any) -> Tensor:
    """The loss of the token objectives on the inputs of TRL's."""
    logp = trainer._logps(model, inputs)
    proximal, behavior = trainer._proximal_logps(model, inputs), trainer._behavior_logps(model, inputs)
    mask, args = inputs["completion_mask"], trainer.args
    denominator = mask.shape[0] * trainer.current_gradient_accumulation_steps
    if args.loss_type == "dapo":
        share = trainer.current_gradient_accumulation_steps / args.steps_per_generation
        denominator = float(inputs["num_items_in_batch"]) * share
    aggregate = "sequence" if args.loss_type == "grpo" else "token"
    ratio = {"token": "token", "sequence": "sequence_geometric_mean"}[args.importance_sampling_level]
    clip = (trainer.epsilon_low, trainer.epsilon_high)
    common: Any = {"ratio": ratio, "aggregate": aggregate, "denominator": denominator, "clip": clip, **options}
    return token_clip_loss(logp, proximal, behavior, inputs["advantages"], mask, **common)


@pytest.mark.parametrize(
    ("weight", "bound", "changes"),
    [
        ("token", Truncate(1.1), {"epsilon_high": 0.3}),
        ("token", Mask(0.8, 1.2), {"loss_type": "grpo"}),
        ("sequence_geometric_mean", Truncate(1.05), {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
        ("sequence_product", Mask(0.5, 1.5), {"importance_sampling_level": "sequence"}),
    ],
)
def test_it_is_the_loss_of_the_token_objectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: Any, bound: Any, changes: dict[str, Any]
) -> None:
    """The same value and gradient on the stale micro-batches of a run."""
    compared: list[tuple[float, float]] = []
    ours = DecoupledGRPOTrainer._compute_loss
    same_bound = type(bound)(**{**vars(bound), "of": "proximal"})

    def compare(self: DecoupledGRPOTrainer, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = [ours(self, model, inputs), token_loss(self, model, inputs, weight=weight, bound=same_bound)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        parameter = model.get_input_embeddings().weight
        gradients = [torch.autograd.grad(loss, parameter)[0] for loss in losses]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        apart = (self._proximal_logps(model, inputs) - self._behavior_logps(model, inputs)) * inputs["completion_mask"]
        compared.append((apart.abs().max().item(), gradients[0].abs().max().item()))
        return ours(self, model, inputs)

    monkeypatch.setattr(DecoupledGRPOTrainer, "_compute_loss", compare)
    build(str(tmp_path), weight=weight, bound=bound, gradient_steps=4, **changes).train()
    assert len(compared) == 8
    assert max(far for far, _ in compared) > 0.1  # far enough for the bounds
    assert min(gradient for _, gradient in compared) > 0


def test_with_vllm_the_sampler_is_the_behaviour_policy(tmp_path: Path) -> None:
    """TRL's old log-probabilities are those of the trainer's weights; a token without the sampler's takes them."""
    trainer = build(str(tmp_path))
    trainer.model.train()
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    old, sampler = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, float("nan"), -2.5]])
    inputs: dict[str, Any] = {
        "prompt_ids": torch.tensor([[2, 3]]),
        "prompt_mask": torch.ones(1, 2, dtype=torch.long),
        "completion_ids": torch.tensor([[4, 5, 1]]),
        "completion_mask": torch.ones(1, 3, dtype=torch.long),
        "advantages": torch.tensor([1.0]),
        "num_items_in_batch": torch.tensor(3.0),
        "old_per_token_logps": old,
        "importance_sampling_ratio": torch.full((1, 3), 17.0),  # TRL's own correction, which must not count twice
    }
    assert torch.equal(trainer._behavior_logps(trainer.model, inputs), old)
    inputs["sampling_per_token_logps"] = sampler
    assert trainer._behavior_logps(trainer.model, inputs).tolist() == [[-1.5, -2.0, -2.5]]
    loss = trainer._compute_loss(trainer.model, inputs)
    expected = token_loss(trainer, trainer.model, inputs, weight="token", bound=Truncate(100.0, of="proximal"))
    torch.testing.assert_close(loss, expected)


def test_sequences_far_from_the_policy_that_sampled_are_left_out(tmp_path: Path) -> None:
    """TRL's off_policy_mask_threshold, also where the average is near the policy."""
    trainer = build(str(tmp_path), off_policy_mask_threshold=0.5)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    inputs: dict[str, Any] = {
        "prompt_ids": torch.tensor([[2, 3]]),
        "prompt_mask": torch.ones(1, 2, dtype=torch.long),
        "completion_ids": torch.tensor([[4, 5, 1]]),
        "completion_mask": torch.ones(1, 3, dtype=torch.long),
        "advantages": torch.tensor([-1.0]),
        "num_items_in_batch": torch.tensor(3.0),
    }
    logp = trainer._logps(trainer.model, inputs).detach()  # and that of the average, which has not moved
    losses = [
        trainer._compute_loss(trainer.model, {**inputs, "old_per_token_logps": logp + further}).item()
        for further in (0.0, 2.0)  # KL[behav, theta] by the sampled tokens: 0, and 2, which is above 0.5
    ]
    assert losses[0] > 0 and losses[1] == 0


def test_a_skipped_step_does_not_move_the_average(tmp_path: Path) -> None:
    trainer: Any = build(str(tmp_path))
    (steps,) = [x for x in trainer.callback_handler.callbacks if type(x).__name__ == "_GradientSteps"]
    skipping = SimpleNamespace(average=trainer.average, accelerator=SimpleNamespace(optimizer_step_was_skipped=True))
    steps.trainer = skipping
    steps.on_step_end(None, None, None)
    assert trainer.average.terms == 1
    skipping.accelerator.optimizer_step_was_skipped = False
    steps.on_step_end(None, None, None)
    assert trainer.average.terms == 2


def recorded(trainer: DecoupledGRPOTrainer) -> list[list[Tensor]]:
    """The weights at the start, and after each gradient step of a run that follows."""
    steps = [[x.detach().float().clone() for x in trainer.average.parameters.values()]]
    move = trainer.average.after_gradient_step

    def record() -> None:
        move()
        steps.append([x.detach().float().clone() for x in trainer.average.parameters.values()])

    trainer.average.after_gradient_step = record  # type: ignore[method-assign]
    trainer.train()
    return steps


def test_the_average_moves_once_a_gradient_step(tmp_path: Path) -> None:
    trainer = build(str(tmp_path), gradient_steps=2, center_of_mass=1.0, average_device="cpu")
    steps = recorded(trainer)
    assert len(steps) == 3
    for average, zero, one, two in zip(trainer.average.average, *steps, strict=True):
        torch.testing.assert_close(average, (zero / 4 + one / 2 + two) / 1.75, rtol=1e-4, atol=1e-6)


def test_the_average_of_a_bf16_model_is_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = trl_grpo_decoupled.tiny()
    monkeypatch.setattr(trl_grpo_decoupled, "tiny", lambda: (model.bfloat16(), tokenizer))
    trainer = build(str(tmp_path), gradient_steps=2, center_of_mass=100.0)
    steps, beta = recorded(trainer), 100 / 101
    for average, zero, one, two in zip(trainer.average.average, *steps, strict=True):
        assert average.dtype == torch.float32
        expected = (beta**2 * zero + beta * one + two) / (beta**2 + beta + 1)
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-7)


def test_checkpoints_hold_the_average_and_the_moments(tmp_path: Path) -> None:
    one = build(str(tmp_path), gradient_steps=2, save_strategy="steps", save_steps=2, noise_scale=True)
    one.train()
    two = build(str(tmp_path), gradient_steps=3)
    two.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert two.average.terms == 1 + 3
    three = build(str(tmp_path), gradient_steps=2)
    three.create_optimizer_and_scheduler(2)
    three._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-2"))
    assert three.average.terms == one.average.terms == 3
    assert all(map(torch.equal, three.average.average, one.average.average))
    assert three.normalizer.moments() == one.normalizer.moments()
    assert three._saved_noise is not None and three._saved_noise["window"] == {}
    (tmp_path / "checkpoint-2" / "ppo_ewma.pt").unlink()
    three._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-2"))
    assert three.average.terms == 1


def test_of_an_adapter_only_the_adapter_is_averaged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    trainer = build(str(tmp_path), gradient_steps=2, center_of_mass=1.0, peft_config=config)
    assert all("lora" in name for name in trainer.average.parameters)
    assert sum(x.numel() for x in trainer.average.average) < 1000
    steps = recorded(trainer)
    for average, zero, one, two in zip(trainer.average.average, *steps, strict=True):
        torch.testing.assert_close(average, (zero / 4 + one / 2 + two) / 1.75, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(x, y) for x, y in zip(steps[0], steps[2], strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "vespo"}, "loss_type is 'vespo', but must be one of grpo"),
        ({"scale_rewards": "group"}, 'set scale_rewards="none"'),
        ({"multi_objective_aggregation": "normalize_then_sum"}, 'set multi_objective_aggregation="sum_then_normalize"'),
        ({"center_of_mass": -1.0}, "center_of_mass is -1"),
        ({"center_of_mass": 0.0}, "center_of_mass is 0.0, but must be a finite number above 0"),
        ({"weight": "tokens"}, "weight is 'tokens', but must be one of token"),
        ({"noise_scale": True, "steps_per_generation": 3, "gradient_accumulation_steps": 2}, "within a pass"),
        ({"beta": 0.1}, r"beta is 0.1 with use_bias_correction_kl, .* set use_bias_correction_kl=False"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(str(tmp_path), **changes)


def test_rounding_errors_of_equal_rewards_are_no_advantages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL subtracts the mean of eight rewards of 0.7, which is not 0.7 in fp32."""
    trainer = build(str(tmp_path), advantage_span=1.0)
    trainer.model.train()
    rewards = torch.full((8,), 0.7)
    left = rewards - torch.tensor([0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7 + 1e-6]).mean()
    assert left.abs().max() > 0
    generate = "_generate_and_score_completions"
    monkeypatch.setattr(GRPOTrainer, generate, lambda self, inputs: {"advantages": left})
    assert trainer._generate_and_score_completions([])["advantages"].tolist() == [0.0] * 8


@pytest.mark.parametrize("reuse", [{"steps_per_generation": 2, "num_iterations": 1}, {}])
def test_the_first_step_has_weight_1_with_dropout(tmp_path: Path, reuse: dict[str, int]) -> None:
    """On fresh completions, and on those that TRL scores when it generates them, because several steps use them."""
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    trainer = build(str(tmp_path), gradient_steps=1, peft_config=config, **reuse)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "importance_weight/max" in row]
    assert row["importance_weight/max"] == pytest.approx(1.0, abs=1e-5)
    assert row["log_ratio/proximal_behavior"] == pytest.approx(0.0, abs=1e-5)
    assert row["clip_ratio/region_mean"] > 0  # the trained policy keeps its dropout


@pytest.mark.parametrize(("kind", "adam"), [(torch.optim.SGD, False), (torch.optim.AdamW, True)])
def test_the_noise_scale_after_adam_needs_adam(tmp_path: Path, kind: Any, adam: bool) -> None:
    trainer = build(str(tmp_path), gradient_steps=1, noise_scale=True)
    trainer.optimizer = kind(trainer.model.parameters(), lr=0.1)
    trainer.train()
    assert trainer.noise_scale is not None
    assert ("noise_scale_adam" in trainer.noise_scale.result()) is adam


class Packed(nn.Module):
    """A model of TRL's packed interface whose log-probabilities are those of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 7, generator=torch.Generator().manual_seed(2)))

    def forward(self, input_ids: Tensor, shift_labels: Tensor, fused_lm_head: bool, **_: Any) -> SimpleNamespace:
        logps = self.table[input_ids].log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return SimpleNamespace(log_probs=logps.gather(-1, shift_labels.unsqueeze(-1)).squeeze(-1), entropy=entropy)


def async_trainer(model: Packed, **options: Any) -> DecoupledAsyncGRPOTrainer:
    """The trainer without its server, which has what the loss uses."""
    trainer = object.__new__(DecoupledAsyncGRPOTrainer)
    counters = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    vars(trainer).update({f"_step_{name}": 0.0 for name in counters})
    trainer.accelerator, trainer.current_gradient_accumulation_steps = Accelerator(cpu=True), 1
    trainer.epsilon_low, trainer.epsilon_high, trainer.aux_loss_enabled = 0.2, 0.3, False
    trainer._metrics = {"train": defaultdict(list)}
    trainer.measures_noise = False
    trainer.average = WeightAverage(model.named_parameters(), 8.0)
    vars(trainer).update(options)
    return trainer


@pytest.mark.parametrize("weight", ["token", "sequence_geometric_mean"])
def test_async_grpo_clips_around_the_average(weight: Any) -> None:
    """Six tokens of two completions, one of them not trained on."""
    model, bound = Packed(), Truncate(1.5)
    trainer = async_trainer(model, weight=weight, bound=bound)
    with torch.no_grad():
        model.table += 0.5 * torch.randn(5, 7)
    empty = torch.full((1, 1), -1)
    inputs: dict[str, Any] = {
        "attention_mask": torch.ones(1, 6, dtype=torch.long),
        "input_ids": torch.tensor([[0, 1, 2, 3, 4, 0]]),
        "position_ids": torch.arange(6).unsqueeze(0),
        "shift_labels": torch.tensor([[1, 2, 3, 4, 5, 6]]),
        "token_index": torch.tensor([[0, 1, 3, 4, 5, -1]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, -1.5, -2.5, -1.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 1.0, -2.0, -2.0, -2.0, 0.0]]),
        "segment_id": torch.tensor([[0, 0, 1, 1, 1, -1]]),
        "global_n_tokens": torch.tensor([5.0]),
        "global_n_forward_tokens": torch.tensor([6.0]),
        "mean_seq_len": torch.tensor([3.0]),
        "tree_max_seqlens": torch.tensor([[6, 6]]),
        **dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), empty),
    }
    before = {name: x.clone() for name, x in inputs.items()}
    loss = trainer.compute_loss(model, inputs)
    assert all(torch.equal(x, inputs[name]) for name, x in before.items())
    with trainer.average.applied(model), torch.no_grad():
        proximal = trainer._packed_logps(model, inputs)
    expected = token_clip_loss(
        trainer._packed_logps(model, inputs), proximal, before["old_log_probs"][0, :5], before["advantages"][0, :5],
        torch.ones(5), weight=weight, ratio="token", bound=Truncate(1.5, of="proximal"), denominator=5,
        clip=(0.2, 0.3), sequence_ids=torch.tensor([0, 0, 1, 1, 1]),
    )  # fmt: skip
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, model.table)[0] for x in (loss, expected)))
    assert (trainer._metrics["train"]["importance_weight/max"][0] == 1.5) is (weight == "token")
    assert trainer._samples_of_step() == 2  # 6 tokens, 3 in a completion


def test_nothing_is_downloaded() -> None:
    assert trl_grpo_decoupled.os.environ["HF_HUB_OFFLINE"] == "1"
    model, tokenizer = trl_grpo_decoupled.tiny()
    assert tokenizer("a h").input_ids == [2, 9]
    assert 5_000 < sum(x.numel() for x in model.parameters()) < 20_000
