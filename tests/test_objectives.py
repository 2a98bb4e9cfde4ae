"""The policy losses: hand-worked numbers, what they reduce to, and what must never reach a gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.advantages import gae
from anybatch.objectives import (
    auxiliary_loss,
    behavior_share,
    capped_behavior,
    decoupled_clip_loss,
    decoupled_kl_loss,
    half_squared_log_ratio,
    interpolated_logp,
    second_moment_mask,
)


def logs(*probabilities: float, grad: bool = False) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float().requires_grad_(grad)


def samples(count: int = 4096, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp (with gradient), prox, behav, advantage: ratios on both sides of every boundary."""
    generator = torch.Generator().manual_seed(seed)
    logp, prox, behav, advantage = torch.randn(4, count, generator=generator)
    return (logp - 2).requires_grad_(), logp - 2 + 0.4 * prox, logp - 2 + 0.4 * behav, advantage


def value_and_gradient(loss: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.detach(), gradient


# r = theta/prox, weight = theta/behav, prefix = prox/behav. The objective is min(weight A, prefix clip(r, .8, 1.2) A).
@pytest.mark.parametrize(
    ("theta", "prox", "behav", "cap", "advantage", "objective", "gradient"),
    [
        # r = .5/.4 = 1.25 > 1.2; prefix = 2. A=+1: min(2.5, 2 * 1.2) = 2.4, flat. A=-1: min(-2.5, -2.4) = -2.5.
        (0.5, 0.4, 0.2, 100.0, 1.0, 2.4, 0.0),
        (0.5, 0.4, 0.2, 100.0, -1.0, -2.5, -2.5),
        # cap 2: behav becomes .5/2 = .25, weight 2, prefix 1.6. A=-1: min(-2, -1.92) = -2. A=+1: min(2, 1.92) = 1.92.
        (0.5, 0.4, 0.2, 2.0, -1.0, -2.0, -2.0),
        (0.5, 0.4, 0.2, 2.0, 1.0, 1.92, 0.0),
        # r = .44/.4 = 1.1, in the range: weight 2.2 whatever the sign
        (0.44, 0.4, 0.2, 100.0, 1.0, 2.2, 2.2),
        (0.44, 0.4, 0.2, 100.0, -3.0, -6.6, -6.6),
        # r = .3/.4 = .75 < .8; weight 1.5, prefix 2. A=+1: min(1.5, 1.6) = 1.5. A=-1: min(-1.5, -1.6) = -1.6, flat.
        (0.3, 0.4, 0.2, 100.0, 1.0, 1.5, 1.5),
        (0.3, 0.4, 0.2, 100.0, -1.0, -1.6, 0.0),
    ],
)
def test_clip_loss_by_hand(
    theta: float, prox: float, behav: float, cap: float, advantage: float, objective: float, gradient: float
) -> None:
    logp = logs(theta, grad=True)
    loss = decoupled_clip_loss(
        logp, logs(prox), logs(behav), torch.tensor([advantage]), clip=0.2, max_importance_ratio=cap
    )
    loss.backward()
    assert loss.shape == ()
    assert loss.item() == pytest.approx(-objective, rel=1e-6)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(-gradient, rel=1e-6, abs=0)  # a flat sample has exactly no gradient


def test_clip_loss_defaults_and_mean() -> None:
    # the first two rows above: objectives 2.4 and -2.5, mean -.05; each gradient is divided by 2
    logp = logs(0.5, 0.5, grad=True)
    loss = decoupled_clip_loss(logp, logs(0.4, 0.4), logs(0.2, 0.2), torch.tensor([1.0, -1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.05, rel=1e-5)
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, 1.25]))
    # the default cap is 100: weight .5/.001 = 500 becomes 100, with r = 1
    loss = decoupled_clip_loss(logs(0.5), logs(0.5), logs(0.001), torch.tensor([1.0]))
    assert loss.item() == pytest.approx(-100.0, rel=1e-5)


def test_only_theta_gets_a_gradient() -> None:
    logp, prox, behav, advantage = samples(64)
    prox.requires_grad_()
    behav.requires_grad_()
    kl = half_squared_log_ratio(logp, prox.detach())
    for loss in (
        decoupled_clip_loss(logp, prox.detach(), behav.detach(), advantage),
        decoupled_kl_loss(logp, behav.detach(), advantage, kl, kl_coefficient=1.0),
    ):
        (gradient,) = torch.autograd.grad(loss, logp, retain_graph=True)
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("clip", [0.0, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("cap", [100.0, math.inf])
def test_with_prox_behav_it_is_textbook_ppo_to_the_last_bit(clip: float, cap: float) -> None:
    logp, _, behav, advantage = samples()
    ratio = torch.exp(logp - behav)
    assert ratio.max() < 100
    textbook = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage).mean()
    ours = decoupled_clip_loss(logp, behav, behav, advantage, clip=clip, max_importance_ratio=cap)
    expected, actual = value_and_gradient(textbook, logp), value_and_gradient(ours, logp)
    if clip:  # at clip 0 the samples at r == 1 alone, of which there are none here
        assert 0 < (expected[1] == 0).float().mean() < 1
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("prox", ["near", "far below", "far above", "zero"])
def test_infinite_clip_leaves_no_trace_of_the_proximal_policy(prox: str) -> None:
    logp, near, behav, advantage = samples()
    proximal = {
        "near": near,
        "far below": torch.full_like(near, -300.0),
        "far above": torch.full_like(near, 300.0),
        "zero": torch.zeros_like(near),
    }[prox]
    plain = -(torch.exp(logp - torch.maximum(behav, logp.detach() - math.log(100.0))) * advantage).mean()
    ours = decoupled_clip_loss(logp, proximal, behav, advantage, clip=math.inf)
    for actual, expected in zip(value_and_gradient(ours, logp), value_and_gradient(plain, logp), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("far", [-300.0, 300.0])
@pytest.mark.parametrize("clip", [0.2, 1.5])
def test_a_wild_proximal_policy_stays_finite(far: float, clip: float) -> None:
    logp, near, behav, advantage = samples(256)
    loss = decoupled_clip_loss(logp, torch.full_like(near, far), behav, advantage, clip=clip)
    value, gradient = value_and_gradient(loss, logp)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


def test_zero_kl_coefficient_leaves_no_trace_of_the_proximal_policy() -> None:
    logp, prox, behav, advantage = samples()
    plain = -(torch.exp(logp - behav) * advantage).mean()
    expected = value_and_gradient(plain, logp)
    for proximal in (prox, torch.full_like(prox, -300.0)):
        kl = half_squared_log_ratio(logp, proximal)
        ours = decoupled_kl_loss(logp, behav, advantage, kl, kl_coefficient=0.0)
        for a, b in zip(value_and_gradient(ours, logp), expected, strict=True):
            assert torch.equal(a, b)


def test_zero_kl_coefficient_removes_an_infinite_kl() -> None:
    logp, _, behav, advantage = samples(16)
    kl = half_squared_log_ratio(logp, torch.full((16,), -1e20))  # overflows to inf
    value, gradient = value_and_gradient(decoupled_kl_loss(logp, behav, advantage, kl, kl_coefficient=0.0), logp)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("coefficient", [0.0, torch.zeros(1)])
def test_zero_clone_coefficient_removes_an_infinite_kl(coefficient: float | Tensor) -> None:
    """0.5 (1 - 0)^2 of both value heads is 1, whatever the KL."""
    one, zero, far = torch.ones(1), torch.zeros(1), torch.full((1,), math.inf)
    assert auxiliary_loss(one, one, zero, far, clone_coefficient=coefficient).item() == 1


def test_kl_loss_by_hand() -> None:
    # weights .5/.2 = 2.5 and .1/.4 = .25. Objectives 2.5 * 2 - .5 * .3 = 4.85 and .25 * -1 - .5 * .1 = -.3: mean 2.275
    logp = logs(0.5, 0.1, grad=True)
    kl = torch.tensor([0.3, 0.1], requires_grad=True)
    loss = decoupled_kl_loss(logp, logs(0.2, 0.4), torch.tensor([2.0, -1.0]), kl, kl_coefficient=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(-2.275, rel=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor([-2.5, 0.125]))  # -weight * A / 2
    torch.testing.assert_close(kl.grad, torch.tensor([0.25, 0.25]))  # beta / 2
    # cap 2: the first weight becomes 2, with gradient: objective 2 * 2 - .15 = 3.85, mean (3.85 - .3) / 2 = 1.775
    capped = decoupled_kl_loss(
        logp, logs(0.2, 0.4), torch.tensor([2.0, -1.0]), kl, kl_coefficient=0.5, max_importance_ratio=2.0
    )
    (gradient,) = torch.autograd.grad(capped, logp)
    assert capped.item() == pytest.approx(-1.775, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 0.125]))


def test_half_squared_estimator_by_hand() -> None:
    # log(.5/.4) = .223144: half its square .024897, derivative the log ratio itself
    logp = logs(0.5, grad=True)
    estimate = half_squared_log_ratio(logp, logs(0.4))
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(0.0248965, rel=1e-5)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(0.2231436, rel=1e-6)


def test_half_squared_estimator_is_the_kl_to_second_order() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, direction = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    errors = []
    for step in (1e-2, 1e-3):
        prox, theta = logits.log_softmax(0), (logits + step * direction).log_softmax(0)
        exact = (prox.exp() * (prox - theta)).sum()
        estimate = (prox.exp() * half_squared_log_ratio(theta, prox)).sum()
        errors.append(float((estimate / exact - 1).abs()))
    assert errors[0] < 0.02
    assert errors[1] < errors[0] / 5


def test_capped_behavior_by_hand() -> None:
    # theta .5 over behav .2 is 2.5: cap 2 raises behav to .25, cap 3 leaves it, inf too
    for cap, expected in ((2.0, 0.25), (3.0, 0.2), (math.inf, 0.2), (torch.tensor(2.0), 0.25)):
        assert capped_behavior(logs(0.5), logs(0.2), cap).exp().item() == pytest.approx(expected, rel=1e-6)
    assert not capped_behavior(logs(0.5, grad=True), logs(0.2), 2.0).requires_grad


@pytest.mark.parametrize("objective", ["clip", "kl"])
def test_a_mask_is_the_subset(objective: str) -> None:
    logp, prox, behav, advantage = samples(500)
    mask = torch.rand(500, generator=torch.Generator().manual_seed(1)) < 0.6

    def loss(keep: Tensor | None, use: Tensor | None) -> Tensor:
        pick = [x if keep is None else x[keep] for x in (logp, prox, behav, advantage)]
        if objective == "clip":
            return decoupled_clip_loss(*pick, mask=use)
        kl = half_squared_log_ratio(pick[0], pick[1])
        return decoupled_kl_loss(pick[0], pick[2], pick[3], kl, kl_coefficient=0.7, mask=use)

    masked, subset = value_and_gradient(loss(None, mask), logp), value_and_gradient(loss(mask, None), logp)
    torch.testing.assert_close(masked, subset, rtol=1e-6, atol=1e-8)
    assert (masked[1][~mask] == 0).all()
    everything = value_and_gradient(loss(None, torch.ones_like(mask)), logp)
    torch.testing.assert_close(everything, value_and_gradient(loss(None, None), logp))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("objective", ["clip", "kl"])
def test_masked_junk_reaches_neither_value_nor_gradient(junk: float, which: int, objective: str) -> None:
    inputs = [x.detach().clone() for x in samples(8)]
    mask = torch.tensor([True, True, False, True, True, False, True, True])

    def loss(values: list[Tensor]) -> tuple[Tensor, Tensor]:
        logp = values[0].clone().requires_grad_()
        if objective == "clip":
            result = decoupled_clip_loss(logp, *values[1:], mask=mask)
        else:  # the second input stands for the KL
            result = decoupled_kl_loss(logp, values[2], values[3], values[1], kl_coefficient=1.0, mask=mask)
        return value_and_gradient(result, logp)

    clean = loss(inputs)
    inputs[which][~mask] = junk
    dirty = loss(inputs)
    assert torch.isfinite(clean[0])
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[1], clean[1])


def test_all_masked_is_zero() -> None:
    logp, prox, behav, advantage = samples(8)
    nothing = torch.zeros(8, dtype=torch.bool)
    for loss in (
        decoupled_clip_loss(logp, prox, behav, advantage, mask=nothing),
        decoupled_kl_loss(logp, behav, advantage, (logp - prox) ** 2, kl_coefficient=1.0, mask=nothing),
    ):
        value, gradient = value_and_gradient(loss, logp)
        assert value == 0
        assert (gradient == 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_leading_run_axis_is_a_loop(masked: bool) -> None:
    runs = 5
    stacked = [torch.stack([samples(64, seed)[i].detach() for seed in range(runs)]) for i in range(4)]
    clip = torch.tensor([0.0, 0.1, 0.2, math.inf, 1.5])
    beta = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0])
    cap = torch.tensor([1.2, 100.0, 2.0, math.inf, 1.1])
    mask = torch.rand(runs, 64, generator=torch.Generator().manual_seed(3)) < (0.5 if masked else 2.0)

    def clip_loss(*inputs: Tensor) -> Tensor:
        *data, eps, most, keep = inputs
        return decoupled_clip_loss(*data, clip=eps, max_importance_ratio=most, mask=keep)

    def kl_loss(*inputs: Tensor) -> Tensor:
        logp, prox, behav, advantage, coefficient, most, keep = inputs
        kl = half_squared_log_ratio(logp, prox)
        return decoupled_kl_loss(
            logp, behav, advantage, kl, kl_coefficient=coefficient, max_importance_ratio=most, mask=keep
        )

    for function, number in ((clip_loss, clip), (kl_loss, beta)):
        both = torch.func.grad_and_value(function)
        gradients, values = torch.func.vmap(both)(*stacked, number, cap, mask)
        for run in range(runs):
            gradient, value = both(*(x[run] for x in stacked), number[run], cap[run], mask[run])
            torch.testing.assert_close(values[run], value)
            torch.testing.assert_close(gradients[run], gradient)
    # a number as tensor or as float is the same
    as_float = decoupled_clip_loss(*(x[2] for x in stacked), clip=0.2, max_importance_ratio=2.0, mask=mask[2])
    as_tensor = clip_loss(*(x[2] for x in stacked), clip[2], cap[2], mask[2])
    torch.testing.assert_close(as_float, as_tensor)


def test_low_precision_inputs_give_an_fp32_loss() -> None:
    inputs = [x.detach().bfloat16() for x in samples(64)]
    clip = decoupled_clip_loss(*inputs)
    kl = decoupled_kl_loss(inputs[0], inputs[2], inputs[3], inputs[1].abs(), kl_coefficient=1.0)
    assert clip.dtype == kl.dtype == torch.float32
    # the same as converting first: nothing is computed in bf16
    assert torch.equal(clip, decoupled_clip_loss(*(x.float() for x in inputs)))
    assert torch.equal(
        kl, decoupled_kl_loss(*(inputs[i].float() for i in (0, 2, 3)), inputs[1].abs().float(), kl_coefficient=1.0)
    )


def authors_clip_loss(logp: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, clip: float, cap: float) -> Tensor:
    """The published code's form, in log space and float64."""
    behav = torch.maximum(behav, logp.detach() - math.log(cap))
    clipped = torch.clamp(logp - prox, math.log(1 - clip), math.log(1 + clip)) + prox - behav
    return torch.maximum(-advantage * torch.exp(logp - behav), -advantage * torch.exp(clipped)).mean()


@pytest.mark.parametrize("clip", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("cap", [1.3, 2.0, 100.0])
def test_agrees_with_the_published_log_space_form(clip: float, cap: float) -> None:
    logp, prox, behav, advantage = samples()
    wide = logp.detach().double().requires_grad_()
    reference = authors_clip_loss(wide, *(x.double() for x in (prox, behav, advantage)), clip, cap)
    expected = value_and_gradient(reference, wide)
    ours = decoupled_clip_loss(logp, prox, behav, advantage, clip=clip, max_importance_ratio=cap)
    actual = value_and_gradient(ours, logp)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=1e-4, atol=1e-9)


def test_bf16_log_probabilities_are_computed_with_in_fp32() -> None:
    """-1 and -1 - 2^-7 are neighbours in bf16; e^(2^-7) is not a bf16 number."""
    logp, other = torch.tensor([-1.0, -1.0]).bfloat16(), torch.tensor([-1.0, -1.0 - 2**-7]).bfloat16()
    ratio, one = math.exp(2**-7), torch.ones(2, dtype=torch.bfloat16)
    assert decoupled_clip_loss(logp, other, other, one).item() == pytest.approx(-(1 + ratio) / 2, rel=1e-6)
    loss = decoupled_kl_loss(logp, other, one, half_squared_log_ratio(logp, other), kl_coefficient=1.0)
    assert loss.item() == pytest.approx(-(1 + ratio) / 2 + 2**-14 / 4, rel=1e-6)
    assert half_squared_log_ratio(logp, other).dtype == capped_behavior(logp, other, 2.0).dtype == torch.float32


def test_losses_compile_in_one_graph_with_numbers_and_tensors() -> None:
    samples = [torch.zeros(2, 3) for _ in range(4)]
    for number in (0.2, torch.full((2, 1), 0.2)):

        def both(number: Any = number) -> Tensor:
            clip = decoupled_clip_loss(*samples, clip=number, mask=torch.ones(2, 3).bool())
            return clip + decoupled_kl_loss(*samples, kl_coefficient=number)

        assert torch.equal(torch.compile(both, backend="eager", fullgraph=True)(), both())


def test_a_clipped_sample_has_no_gradient_however_large_its_weight() -> None:
    """log theta/behav of 100: e^100 is infinite in fp32. The objective is min(e^60 A, 1.2 A) = 1.2 for A = 1."""
    logp, zero = torch.tensor([100.0], requires_grad=True), torch.zeros(1)
    for cap in (math.inf, torch.tensor([math.inf])):
        loss = decoupled_clip_loss(logp, zero, zero, torch.ones(1), clip=0.2, max_importance_ratio=cap)
        value, gradient = value_and_gradient(loss, logp)
        assert value.item() == pytest.approx(-1.2) and gradient.item() == 0


def test_float64_coefficients_of_stacked_runs_are_fp32() -> None:
    x, number = torch.zeros(2, 3), torch.full((2, 1), 0.1, dtype=torch.float64)
    caps = {"max_importance_ratio": number + 1}
    for result in (
        decoupled_clip_loss(x, x, x, x, clip=number, **caps),
        decoupled_kl_loss(x, x, x, x, kl_coefficient=number, **caps),
        auxiliary_loss(x, x, x, x, clone_coefficient=number),
        interpolated_logp(x, x, number),
        *gae(x, x, x, x.bool(), x.bool(), discount=number, gae_lambda=number),
    ):
        assert result.dtype == torch.float32


def test_numbers_that_make_no_sense_are_named() -> None:
    x = torch.zeros(3)
    for call, error, words in (
        (lambda: decoupled_clip_loss(x, x, x, x, clip=(0.1, 0.2, 0.3)), TypeError, r"^clip is \(0.1, .* tuple of two"),
        (lambda: decoupled_clip_loss(x, x, x, x, clip=[0.1, 0.2]), TypeError, r"^clip is \[0.1, .* tuple of two"),
        (lambda: interpolated_logp(x, x, 1.5), ValueError, r"^behavior_share is 1.5, but must be from 0 to 1"),
        (lambda: second_moment_mask(x, x, math.nan), ValueError, r"^limit is nan, but must be above 0"),
        (lambda: second_moment_mask(x, x, -1.0), ValueError, r"^limit is -1.0, but must be above 0"),
        (lambda: behavior_share(8, -4), ValueError, r"^age is -4, but must be at least 0"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_second_moment_mask_by_hand() -> None:
    """Squares 0.01, 0.25, 0.04, 0: means 0.075 of all, 0.0167 without 0.25, 0.005 without 0.04 as well."""
    behavior = torch.tensor([-1.0, -2.0, -0.5, -1.5])
    logp = behavior + torch.tensor([0.1, -0.5, 0.2, 0.0])
    for limit, kept in (
        (0.08, [True, True, True, True]),
        (0.07, [True, False, True, True]),
        (0.01, [True, False, False, True]),
        (0.001, [False, False, False, True]),
    ):
        assert second_moment_mask(logp, behavior, limit).tolist() == kept
    far = behavior + 3.0
    assert second_moment_mask(far, behavior, 0.04).sum() == 1  # one is always kept
    stacked = second_moment_mask(torch.stack([logp, behavior]), torch.stack([behavior, behavior]), 0.07)
    assert stacked.tolist() == [[True, False, True, True], [True] * 4]


def test_interpolated_logp_by_hand() -> None:
    """Data 32 gradient steps old and a centre of mass of 8: a quarter of -2, three quarters of -1."""
    logp, behavior = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0])
    share = behavior_share(8.0, age=32)
    assert share == 0.25
    proximal = interpolated_logp(logp, behavior, share)
    assert proximal.tolist() == [-1.25] and not proximal.requires_grad
    assert behavior_share(8.0, age=0) == behavior_share(8.0, age=4) == 1.0  # the coupled objective
    shares = behavior_share(torch.tensor([8.0, 64.0]), age=32)
    assert isinstance(shares, torch.Tensor) and shares.tolist() == [0.25, 1.0]
    # A-3PO: data d versions of K steps old, and a proximal policy one version old
    assert behavior_share(12.0, age=5 * 12) == 1 / 5


def test_interpolation_with_all_of_the_behaviour_policy_is_the_coupled_loss() -> None:
    logp, behavior, advantage = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).unbind()
    coupled = decoupled_clip_loss(logp, behavior, behavior, advantage)
    assert decoupled_clip_loss(logp, interpolated_logp(logp, behavior, 1.0), behavior, advantage) == coupled
