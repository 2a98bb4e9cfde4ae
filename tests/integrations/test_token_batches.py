"""Packed tokens are padded ones in another layout: the same losses and gradients, in any order of the tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.errors import ConfigError
from anybatch.integrations.token_objectives import (
    Mask,
    Truncate,
    count,
    importance_weights,
    token_clip_loss,
    token_kl_loss,
)
from anybatch.objectives import half_squared_log_ratio

LEVELS = ("token", "sequence_product", "sequence_geometric_mean")
BOUNDS = (
    Truncate(1.5),
    Truncate(1.2, of="proximal"),
    Mask(0.6, 1.7),
    (Truncate(1.3, of="proximal"), Mask(0.7, 1.5, of="proximal", level="sequence_geometric_mean")),
)


def padded() -> dict[str, Tensor]:
    """Completions of 5, 3, 1 and 0 tokens, and one whose second token does not count."""
    generator = torch.Generator().manual_seed(7)
    names = ("logp", "logp_proximal", "logp_behavior")
    data = {name: -2 + 0.15 * torch.randn(5, 5, generator=generator) for name in names}
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 0, 4]).unsqueeze(1)
    mask[4, 1] = False
    return data | {"advantage": torch.randn(5, generator=generator), "mask": mask}


def packed(data: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """The same with the tokens of all completions in the given order, those that do not count among them."""
    ids = torch.arange(5).unsqueeze(1).expand(5, 5)
    rows = {**data, "advantage": data["advantage"].unsqueeze(1).expand(5, 5), "sequence_ids": ids}
    return {name: x.flatten()[order] for name, x in rows.items()}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("weight", "ratio"), list(itertools.product(LEVELS, LEVELS)))
@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_packed_is_padded(weight: Any, ratio: Any, aggregate: Any, bound: Any) -> None:
    rows, order = padded(), torch.randperm(25)
    flat = packed(rows, order)
    options: dict[str, Any] = {"weight": weight, "aggregate": aggregate, "denominator": 3}
    results = []
    for data in (rows, flat):
        data["logp"].requires_grad_()
        loss = token_clip_loss(**data, ratio=ratio, bound=bound, clip=(0.1, 0.3), **options)  # type: ignore[arg-type]
        results.append((loss, torch.autograd.grad(loss, data["logp"])[0]))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1].flatten()[order], results[1][1])
    assert results[0][1].abs().sum() > 0


@pytest.mark.parametrize("weight", LEVELS)
def test_packed_kl_loss_weights_and_counts(weight: Any) -> None:
    rows, order = padded(), torch.arange(25)
    flat, losses, weights = packed(rows, order), [], []
    for data in (rows, flat):
        ids = data.get("sequence_ids")
        kl = half_squared_log_ratio(data["logp"], data["logp_proximal"])
        common: dict[str, Any] = {"weight": weight, "bound": Mask(0.7, 1.3), "sequence_ids": ids}
        logps = data["logp"], data["logp_behavior"]
        losses.append(
            token_kl_loss(*logps, data["advantage"], kl, data["mask"], denominator=2, kl_coefficient=0.5, **common)
        )
        weights.append(importance_weights(*logps, data["mask"], **common))
        assert int(count(data["mask"], weight, ids)) == (12 if weight == "token" else 4)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(weights[0].expand(5, 5).flatten()[rows["mask"].flatten()], weights[1][flat["mask"]])


def test_a_completion_alone_is_itself_among_others() -> None:
    """Geometric mean of the ratios 2 and 1/8 is 1/2, of 3 alone 3; (1/2 * 4 + 3 * 1) / 2 completions."""
    behavior, ids = torch.zeros(3), torch.tensor([1, 0, 1])
    loss = token_clip_loss(
        torch.tensor([2.0, 3.0, 0.125]).log(), behavior, behavior, torch.tensor([4.0, 1.0, 4.0]), torch.ones(3),
        weight="sequence_geometric_mean", bound=(), denominator=2, clip=float("inf"), sequence_ids=ids,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-2.5)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"sequence_ids": None},
            ValueError,
            r"mask has shape \(25,\), but must be \(B, T\).*or \(T,\) with sequence_ids",
        ),
        ({"sequence_ids": torch.zeros(25)}, TypeError, "sequence_ids is of torch.float32"),
        ({"sequence_ids": [0] * 25}, TypeError, "sequence_ids is of list"),
        ({"sequence_ids": torch.zeros(3).long()}, ValueError, r"sequence_ids has shape \(3,\)"),
        ({"sequence_ids": torch.full((25,), 25)}, ValueError, "numbers from 0 to T-1"),
        ({"sequence_ids": torch.full((25,), -1)}, ValueError, "numbers from 0 to T-1"),
        ({"advantage": torch.zeros(5)}, ConfigError, r"must be \(T,\), one for each packed token"),
        ({"logp": torch.zeros(5, 5)}, ValueError, "has shape"),
    ],
)
def test_wrong_packed_arguments_are_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    data: dict[str, Any] = packed(padded(), torch.arange(25))
    with pytest.raises(error, match=words):
        token_clip_loss(**data | changes, weight="token", bound=(), denominator=1)


def test_packed_losses_can_be_mapped_and_compiled() -> None:
    data = packed(padded(), torch.arange(25))

    def call(data: dict[str, Tensor]) -> Tensor:
        options: Any = {"weight": "sequence_product", "bound": Truncate(2.0), "denominator": 5.0}
        return token_clip_loss(**data, **options)

    mapped = torch.func.vmap(call)({name: x.expand(2, 25) for name, x in data.items()})
    torch.testing.assert_close(mapped, call(data).expand(2))
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(data), mapped[0])
