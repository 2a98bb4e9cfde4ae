"""Generalised advantage estimation and explained variance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from anybatch.advantages import explained_variance, gae


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def flags(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.bool)


def test_termination_by_hand() -> None:
    # gamma = lambda = .5, so gamma lambda = .25; the last step terminates, its next value (8) must not be seen.
    # delta = 1 + .5*1 - .5 = 1;  2 + .5*2 - 1 = 2;  4 + 0 - 2 = 2
    # A3 = 2;  A2 = 2 + .25*2 = 2.5;  A1 = 1 + .25*2.5 = 1.625
    # targets A + V: 2.125, 3.5, 4
    advantage, target = gae(
        row(1, 2, 4), row(0.5, 1, 2), row(1, 2, 8), flags(0, 0, 1), flags(0, 0, 1), discount=0.5, gae_lambda=0.5
    )
    assert torch.equal(advantage, row(1.625, 2.5, 2))
    assert torch.equal(target, row(2.125, 3.5, 4))


def test_truncation_by_hand() -> None:
    # the second step is cut by a time limit at a state of value 6; the third belongs to a new episode, next value 8.
    # delta = 1 + .5*1 - .5 = 1;  2 + .5*6 - 1 = 4;  4 + .5*8 - 2 = 6
    # A3 = 6;  A2 = 4, cut off from A3;  A1 = 1 + .25*4 = 2
    # target of the truncated step: r + gamma V(final) = 2 + .5*6 = 5
    advantage, target = gae(
        row(1, 2, 4), row(0.5, 1, 2), row(1, 6, 8), flags(0, 1, 0), flags(0, 0, 0), discount=0.5, gae_lambda=0.5
    )
    assert torch.equal(advantage, row(2, 4, 6))
    assert torch.equal(target, row(2.5, 5, 8))


def test_what_follows_a_terminal_step_is_never_read() -> None:
    arguments = (row(1, 2, 4), row(0.5, 1, 2), flags(0, 1, 0), flags(0, 1, 0))
    results = []
    for junk in (0.0, math.nan, math.inf):
        reward, value, done, terminated = arguments
        results.append(gae(reward, value, row(1, junk, 8), done, terminated, discount=0.9, gae_lambda=0.9)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def random_case(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, *shape, generator=generator)
    done = torch.rand(shape, generator=generator) < 0.2
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    # inside an episode the next value is the next step's value
    follows = torch.cat([value[..., 1:], next_value[..., -1:]], dim=-1)
    return reward, value, torch.where(done, next_value, follows), done, terminated


def test_lambda_1_is_the_discounted_return_minus_the_value() -> None:
    reward, value, next_value, done, terminated = random_case(3, 40)
    advantage, target = gae(reward, value, next_value, done, terminated, discount=0.9, gae_lambda=1.0)
    for n in range(3):
        ret = next_value[n, -1]
        for t in reversed(range(40)):
            if done[n, t]:
                ret = torch.tensor(0.0) if terminated[n, t] else next_value[n, t]
            ret = reward[n, t] + 0.9 * ret
            assert advantage[n, t].item() == pytest.approx(float(ret - value[n, t]), abs=1e-5)
            assert target[n, t].item() == pytest.approx(float(ret), abs=1e-5)


def test_lambda_0_is_the_temporal_difference() -> None:
    reward, value, next_value, done, terminated = random_case(3, 40)
    advantage, _ = gae(reward, value, next_value, done, terminated, discount=0.9, gae_lambda=0.0)
    torch.testing.assert_close(advantage, reward + 0.9 * next_value * ~terminated - value)


def test_leading_axes_and_numbers_per_run() -> None:
    case = random_case(4, 3, 25)
    discount, gae_lambda = torch.tensor([0.5, 0.9, 0.99, 1.0]), torch.tensor([0.0, 0.5, 0.95, 1.0])
    stacked = gae(*case, discount=discount.view(4, 1, 1), gae_lambda=gae_lambda.view(4, 1, 1))
    mapped = torch.func.vmap(lambda g, x, *data: gae(*data, discount=g, gae_lambda=x))(discount, gae_lambda, *case)
    for run in range(4):
        single = gae(*(x[run] for x in case), discount=float(discount[run]), gae_lambda=float(gae_lambda[run]))
        for a, b, c in zip(stacked, mapped, single, strict=True):
            torch.testing.assert_close(a[run], c)
            torch.testing.assert_close(b[run], c)


def test_result_is_fp32_without_gradient() -> None:
    reward, value, next_value, done, terminated = random_case(2, 5)
    advantage, target = gae(
        reward.double(), value.requires_grad_(), next_value.bfloat16(), done, terminated, discount=0.9, gae_lambda=0.9
    )
    assert advantage.dtype == target.dtype == torch.float32
    assert not advantage.requires_grad
    assert not target.requires_grad
    assert advantage.is_contiguous()


def test_explained_variance_by_hand() -> None:
    # targets 1 2 3 6: mean 3, variance (4+1+0+9)/4 = 3.5; residuals 1 -1 1 -1: variance 1; 1 - 1/3.5 = 5/7
    target, value = torch.tensor([1.0, 2, 3, 6]), torch.tensor([0.0, 3, 2, 7])
    assert explained_variance(value, target).item() == pytest.approx(5 / 7, rel=1e-6)
    assert explained_variance(target, target).item() == 1
    assert explained_variance(torch.full((4,), 9.0), target).item() == pytest.approx(0, abs=1e-6)
    assert explained_variance(value.view(2, 2), target.view(2, 2)).item() == pytest.approx(5 / 7, rel=1e-6)
    assert explained_variance(-target, target).item() == pytest.approx(-3)  # residual 2 * target: 1 - 4


@pytest.mark.parametrize("constant", [0.0, 1.0, 1e-20])
def test_explained_variance_of_constant_targets_is_undefined(constant: float) -> None:
    assert math.isnan(explained_variance(torch.rand(1001), torch.full((1001,), constant)).item())


@pytest.mark.parametrize("constant", [0.1, 3.3, 1e6 + 0.1])
@pytest.mark.parametrize("count", [1000, 1001])
def test_explained_variance_of_constant_targets_that_round(constant: float, count: int) -> None:
    assert math.isnan(explained_variance(torch.rand(count), torch.full((count,), constant)).item())


def test_terminated_steps_are_done_where_that_can_be_read() -> None:
    zeros, done = torch.zeros(2, 3), torch.zeros(2, 3).bool()

    def call(terminated: torch.Tensor) -> torch.Tensor:
        return gae(zeros, zeros, zeros, done, terminated, discount=0.9, gae_lambda=0.9)[0]

    with pytest.raises(ValueError, match=r"^terminated is true for a step for which done is not"):
        call(~done)
    # neither can look at data; without a graph break, too
    assert torch.func.vmap(call)(~done.expand(2, 2, 3)).shape == (2, 2, 3)
    assert torch.compile(call, backend="eager", fullgraph=True)(~done).shape == (2, 3)


def test_gae_needs_two_axes_a_step_and_bool_flags() -> None:
    zeros, done = torch.zeros(2, 3), torch.zeros(2, 3).bool()
    numbers = {"discount": 0.9, "gae_lambda": 0.9}
    with pytest.raises(ValueError, match=r"^reward has shape \(3,\), but must have at least 2 axes"):
        gae(*[zeros[0]] * 3, done[0], done[0], **numbers)
    with pytest.raises(ValueError, match="at least one time step"):
        gae(*[zeros[:, :0]] * 3, done[:, :0], done[:, :0], **numbers)
    with pytest.raises(
        TypeError, match=r"^done is a tensor of torch.float32, but must be a bool tensor: done.bool\(\)"
    ):
        gae(zeros, zeros, zeros, zeros, done, **numbers)
    with pytest.raises(ValueError, match=r"^discount has shape \(3,\), but must be a number or broadcast to \(2, 1\)"):
        gae(zeros, zeros, zeros, done, done, discount=torch.ones(3), gae_lambda=0.9)


def test_bf16_input_is_summed_in_fp32() -> None:
    # 400 rewards of 1 with discount and lambda 1: the first advantage is 400, where bf16 stays at 256
    ones, done = torch.ones(1, 400, dtype=torch.bfloat16), torch.zeros(1, 400).bool()
    advantage, target = gae(ones, 0 * ones, 0 * ones, done, done, discount=1.0, gae_lambda=1.0)
    assert advantage.dtype == target.dtype == torch.float32
    assert advantage[0, 0] == 400
