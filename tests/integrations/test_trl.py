"""Token-level losses in TRL's own GRPO trainer, with a tiny model and stale completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs pip install '.[trl]'")

from trl import GRPOTrainer

import trl_grpo_decoupled
from anybatch.integrations.token_objectives import Mask, Truncate, token_clip_loss
from trl_grpo_decoupled import DecoupledGRPOTrainer, build, rewards

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_learns_on_stale_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = build(str(tmp_path), gradient_steps=20)
    trainer.train()
    seen = rewards(trainer)
    assert len(seen) == 5  # 20 gradient steps, 4 on each sampled batch
    assert seen[-1] > seen[0] + 0.15
    stale = [row["log_ratio/behavior"] for row in trainer.state.log_history if "log_ratio/behavior" in row]
    assert min(stale) > 0.01  # the mean over the four steps, of which only the first is fresh
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
    for pair in ((whole.model, parts.model), (whole.proximal.module, parts.proximal.module)):
        for x, y in zip(*(module.parameters() for module in pair), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-5)


def test_clipping_around_the_behaviour_policy_is_trl_s_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same value and gradient as TRL's default loss (dapo), on the stale micro-batches of a run."""
    compared: list[float] = []
    ours = DecoupledGRPOTrainer._compute_loss

    def compare(self: DecoupledGRPOTrainer, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        old, mask = inputs["old_per_token_logps"], inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], mask], 1)
        logp, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))
        mine = token_clip_loss(
            logp, old, old, inputs["advantages"], mask,
            weight="token", bound=Truncate(100.0), denominator=self._denominator(inputs), clip=self.epsilon_low,
        )  # fmt: skip
        theirs = GRPOTrainer._compute_loss(self, model, inputs)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        parameter = model.get_input_embeddings().weight
        gradients = [torch.autograd.grad(loss, parameter)[0] for loss in (mine, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        compared.append(((logp - old).abs() * mask).max().item())
        return ours(self, model, inputs)

    monkeypatch.setattr(DecoupledGRPOTrainer, "_compute_loss", compare)
    build(str(tmp_path), gradient_steps=4).train()
    assert len(compared) == 8
    assert max(compared) > 0.2  # far enough for clipping


@pytest.mark.parametrize("weight", ["sequence_product", "sequence_geometric_mean"])
def test_sequence_weights(tmp_path: Path, weight: Any) -> None:
    trainer = build(str(tmp_path), weight=weight, bound=Mask(below=0.1, above=10.0), gradient_steps=4)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "importance_weight/max" in row)
    assert 0 < row["importance_weight/max"] <= 10
    assert row["grad_norm"] > 0
    assert trainer._denominator({"completion_ids": torch.zeros(16, 8)}) == 32


def test_the_average_moves_once_a_gradient_step(tmp_path: Path) -> None:
    trainer = build(str(tmp_path), gradient_steps=2, center_of_mass=1.0)
    start = [x.detach().clone() for x in trainer.model.parameters()]
    steps = [start]
    move = trainer.proximal.after_gradient_step

    def record() -> None:
        move()
        steps.append([x.detach().clone() for x in trainer.model.parameters()])

    trainer.proximal.after_gradient_step = record  # type: ignore[method-assign]
    trainer.train()
    assert len(steps) == 3
    for average, zero, one, two in zip(trainer.proximal.module.parameters(), *steps, strict=True):
        torch.testing.assert_close(average, (zero / 4 + one / 2 + two) / 1.75, rtol=1e-4, atol=1e-6)


def test_the_average_of_a_bf16_model_is_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = trl_grpo_decoupled.tiny()
    monkeypatch.setattr(trl_grpo_decoupled, "tiny", lambda: (model.bfloat16(), tokenizer))
    trainer = build(str(tmp_path), gradient_steps=2, center_of_mass=100.0)
    ewma, steps = trainer.proximal, [[x.detach().float() for x in trainer.model.parameters()]]
    move = ewma.after_gradient_step

    def record() -> None:
        move()
        steps.append([x.detach().float() for x in trainer.model.parameters()])

    ewma.after_gradient_step = record  # type: ignore[method-assign]
    trainer.train()
    beta = 100 / 101
    for average, parameter, zero, one, two in zip(ewma.average, ewma.module.parameters(), *steps, strict=True):
        assert average.dtype == torch.float32
        expected = (beta**2 * zero + beta * one + two) / (beta**2 + beta + 1)
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(parameter, average.bfloat16())


def test_nothing_is_downloaded() -> None:
    assert trl_grpo_decoupled.os.environ["HF_HUB_OFFLINE"] == "1"
    model, tokenizer = trl_grpo_decoupled.tiny()
    assert tokenizer("a h").input_ids == [2, 9]
    assert 5_000 < sum(x.numel() for x in model.parameters()) < 20_000
