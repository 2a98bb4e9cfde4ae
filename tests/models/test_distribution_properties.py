"""Properties of the distributions for any parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch import distributions as reference

from anybatch.models.distributions import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical
from anybatch.models.squashed import TanhGaussian

SIZE = 6
FEW = settings(max_examples=40, deadline=None)


def params(bound: float) -> st.SearchStrategy[Tensor]:
    leading = st.sampled_from([(), (1,), (3,), (2, 3)])
    floats = st.floats(-bound, bound, width=32)
    return leading.flatmap(lambda shape: hnp.arrays("float32", (*shape, SIZE), elements=floats).map(torch.from_numpy))


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "categorical": Categorical,
    "multicategorical": lambda p: MultiCategorical(p, (1, 2, 3)),
    "bernoulli": Bernoulli,
    "gaussian": lambda p: DiagonalGaussian(p, (3, 1)),
}
GAUSSIANS = ("gaussian", "squashed")
ALL = {**MAKERS, "squashed": lambda p: TanhGaussian(p, (3, 1))}


def torch_version(name: str, p: Tensor) -> list[tuple[Any, Callable[[Tensor], Tensor]]]:
    """The same distribution as torch writes it: independent parts, and the part of the action that each takes."""
    if name == "categorical":
        return [(reference.Categorical(logits=p), lambda a: a)]
    if name == "multicategorical":
        parts = p.split([1, 2, 3], dim=-1)
        return [(reference.Categorical(logits=part), lambda a, i=i: a[..., i]) for i, part in enumerate(parts)]
    if name == "bernoulli":
        return [(reference.Independent(reference.Bernoulli(logits=p), 1), lambda a: a.float())]
    mean, log_std = p.chunk(2, dim=-1)
    return [(reference.Independent(reference.Normal(mean, log_std.exp()), 1), lambda a: a.squeeze(-1))]


@pytest.mark.parametrize("name", MAKERS)
@FEW
@given(data=st.data())
def test_agrees_with_torch(name: str, data: st.DataObject) -> None:
    p = data.draw(params(4))
    q = p.flip(-1) * 0.5
    ours, theirs, other = MAKERS[name](p), torch_version(name, p), torch_version(name, q)
    action = ours.sample(torch.Generator().manual_seed(0))
    tolerance = {"atol": 2e-5, "rtol": 2e-4}
    torch.testing.assert_close(ours.log_prob(action), sum(d.log_prob(pick(action)) for d, pick in theirs), **tolerance)
    torch.testing.assert_close(ours.entropy(), sum(d.entropy() for d, _ in theirs), **tolerance)
    kl = sum(reference.kl_divergence(d, e) for (d, _), (e, _) in zip(theirs, other, strict=True))
    torch.testing.assert_close(ours.kl(MAKERS[name](q)), kl, **tolerance)


@pytest.mark.parametrize("name", ALL)
@FEW
@given(data=st.data())
def test_kl_is_a_divergence_and_all_is_finite(name: str, data: st.DataObject) -> None:
    bound = 10.0 if name in GAUSSIANS else 1e4
    p = data.draw(params(bound))
    q = p.roll(1, -1) if name not in GAUSSIANS else p * 0.9
    mine, theirs = ALL[name](p), ALL[name](q)
    action = mine.sample(torch.Generator().manual_seed(0))
    assert (mine.kl(theirs) >= 0).all()
    assert (mine.kl(ALL[name](p.clone())) == 0).all()
    for value in (mine.log_prob(action), mine.log_prob(mine.mode()), mine.entropy(), mine.kl(theirs)):
        assert value.shape == p.shape[:-1]
        assert torch.isfinite(value).all()


@FEW
@given(params(1e4))
def test_probabilities_sum_to_one(p: Tensor) -> None:
    distribution = Categorical(p)
    choices = torch.arange(SIZE).reshape(SIZE, *[1] * (p.dim() - 1)).expand(SIZE, *p.shape[:-1])
    total = torch.stack([distribution.log_prob(choice).exp() for choice in choices]).sum(0)
    torch.testing.assert_close(total, torch.ones_like(total))
    # and the mode is no less likely than any other choice
    assert (distribution.log_prob(distribution.mode()) >= distribution.log_probs.max(-1).values).all()
