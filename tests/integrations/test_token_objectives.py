"""Token-level losses: hand-worked numbers, reduction to the sample-level losses, and micro-batches."""

from __future__ import annotations

import math
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
    of_weight,
    token_clip_loss,
    token_kl_loss,
)
from anybatch.objectives import decoupled_clip_loss, decoupled_kl_loss, half_squared_log_ratio

LEVELS = ("token", "sequence_product", "sequence_geometric_mean")
FREE = Truncate(math.inf)


def log(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


def data(sequences: int = 6, tokens: int = 9, scale: float = 0.3) -> dict[str, Tensor]:
    """Random log-probabilities; completions of different lengths, one of them empty, NaN where nothing counts."""
    generator = torch.Generator().manual_seed(4)
    logp, proximal, behavior = (-2 + scale * torch.randn(sequences, tokens, generator=generator) for _ in range(3))
    lengths = torch.tensor([9, 4, 1, 0, 7, 2])[:sequences]
    mask = torch.arange(tokens) < lengths.unsqueeze(1)
    advantage = torch.randn(sequences, generator=generator)
    values = {"logp": logp, "logp_proximal": proximal, "logp_behavior": behavior}
    values = {name: torch.where(mask, x, torch.nan) for name, x in values.items()}
    values["logp"].requires_grad_()
    return values | {"advantage": advantage, "mask": mask}


def test_hand_worked_weights() -> None:
    """One completion with ratios 2 and 1/8: product 1/4, geometric mean 1/2; one with ratio 3 and padding."""
    logp, behavior = log([0.5, 0.1], [0.6, 1.0]), log([0.25, 0.8], [0.2, 1.0])
    behavior[1, 1] = torch.nan
    mask = torch.tensor([[1, 1], [1, 0]])
    expected = {
        "token": [[2.0, 0.125], [3.0, 0.0]],
        "sequence_product": [[0.25], [3.0]],
        "sequence_geometric_mean": [[0.5], [3.0]],
    }
    for level, weights in expected.items():
        found = importance_weights(logp, behavior, mask, weight=level, bound=FREE)  # type: ignore[arg-type]
        torch.testing.assert_close(found, torch.tensor(weights))
    truncated = importance_weights(logp, behavior, mask, weight="token", bound=Truncate(2.5))
    torch.testing.assert_close(truncated, torch.tensor([[2.0, 0.125], [2.5, 0.0]]))
    hidden = importance_weights(logp, behavior, mask, weight="token", bound=Mask(below=0.2, above=2.5))
    torch.testing.assert_close(hidden, torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    assert [int(count(mask, level)) for level in LEVELS] == [3, 2, 2]  # type: ignore[arg-type]


def test_hand_worked_clip_loss_and_gradients() -> None:
    """One completion of 2 tokens, A = 2, prox = behav: ratios 3/2 and 2/3, epsilon 1/5.

    token: min(3/2, 6/5) 2 + 2/3 2 is not clipped from below, as A > 0: (12/5 + 4/3) / 2 tokens; gradient of the second
    token's log-probability -2/3 * 2 / 2. product: 1, so -2; the gradient -2 reaches both tokens. geometric mean: 1,
    so -2, and half of the gradient each.
    """
    proximal = log([0.2, 0.6])
    expected = {
        "token": (-(12 / 5 + 4 / 3) / 2, [0.0, -2 / 3]),
        "sequence_product": (-2.0, [-2.0, -2.0]),
        "sequence_geometric_mean": (-2.0, [-1.0, -1.0]),
    }
    mask = torch.ones(1, 2)
    for level, (value, gradient) in expected.items():
        logp = log([0.3, 0.4]).requires_grad_()
        loss = token_clip_loss(
            logp, proximal, proximal, torch.tensor([2.0]), mask,
            weight=level, bound=FREE, denominator=count(mask, level),  # type: ignore[arg-type]
        )  # fmt: skip
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-6)
        assert logp.grad is not None
        assert logp.grad[0].tolist() == pytest.approx(gradient, rel=1e-6)


def test_hand_worked_clipped_tokens_with_sequence_weights() -> None:
    """Tokens are clipped alone and weighted by their completion's prox/behav.

    theta/prox is 3/2 and 1, prox/behav 2 and 3, product 6, and A = 1: (6 * min(3/2, 6/5) + 6 * 1) / 2 = 6.6. The
    completion's theta/behav is 9: with a cap of 3 everything is 3 times as small, and Mask(0, 3) hides the completion.
    """
    logp, proximal, behavior = log([0.9, 0.6]), log([0.6, 0.6]), log([0.3, 0.2])
    mask = torch.ones(1, 2)
    for bound, value in ((FREE, -6.6), (Truncate(3.0), -2.2), (Mask(0, 3.0), 0.0), (Mask(0, 9.5), -6.6)):
        loss = token_clip_loss(
            logp, proximal, behavior, torch.ones(1), mask,
            weight="sequence_product", ratio="token", bound=bound, denominator=2,
        )  # fmt: skip
        assert loss.item() == pytest.approx(value, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("cap", [1.5, 100.0, math.inf])
@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_tokens_are_samples(cap: float, clip: float) -> None:
    """At level token with Truncate it is the decoupled loss of the flattened tokens, value and gradient."""
    x = data()
    mine = token_clip_loss(**x, weight="token", bound=Truncate(cap), denominator=count(x["mask"], "token"), clip=clip)  # type: ignore[arg-type]
    flat = {name: x[name][x["mask"]] for name in ("logp", "logp_proximal", "logp_behavior")}
    advantage = x["advantage"].unsqueeze(1).expand_as(x["mask"])[x["mask"]]
    theirs = decoupled_clip_loss(**flat, advantage=advantage, clip=clip, max_importance_ratio=cap)
    torch.testing.assert_close(mine, theirs)
    gradients = [torch.autograd.grad(loss, x["logp"])[0] for loss in (mine, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("level", LEVELS)
def test_completions_of_one_token_are_the_same_at_every_level(level: Any) -> None:
    x = data(tokens=1)
    everything = torch.ones(6, 1, dtype=torch.bool)
    x = {name: torch.nan_to_num(value, -2.0) for name, value in x.items()} | {"mask": everything}
    mine = token_clip_loss(**x, weight=level, bound=Truncate(2.0), denominator=6)
    flat = {name: x[name].squeeze(1) for name in ("logp", "logp_proximal", "logp_behavior")}
    torch.testing.assert_close(mine, decoupled_clip_loss(**flat, advantage=x["advantage"], max_importance_ratio=2.0))


def test_kl_loss_of_tokens_is_that_of_samples() -> None:
    x = data()
    kl = half_squared_log_ratio(x["logp"], x["logp_proximal"])
    mine = token_kl_loss(
        x["logp"], x["logp_behavior"], x["advantage"], kl, x["mask"],
        weight="token", bound=Truncate(1.5), denominator=count(x["mask"], "token"), kl_coefficient=0.7,
    )  # fmt: skip
    keep = x["mask"]
    advantage = x["advantage"].unsqueeze(1).expand_as(keep)[keep]
    theirs = decoupled_kl_loss(
        x["logp"][keep], x["logp_behavior"][keep], advantage, kl[keep], kl_coefficient=0.7, max_importance_ratio=1.5
    )
    torch.testing.assert_close(mine, theirs)
    gradients = [torch.autograd.grad(loss, x["logp"], retain_graph=True)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(*(torch.nan_to_num(x) for x in gradients))


def test_hand_worked_kl_of_completions() -> None:
    """theta/behav = 2 * 3 = 6, KL 0.1 + 0.3, A = 1, beta = 10: product -(6 - 4) = -2, mean -(sqrt 6 - 2).

    Hidden by Mask, only the KL is left.
    """
    logp, behavior, kl = log([0.4, 0.6]), log([0.2, 0.2]), torch.tensor([[0.1, 0.3]])
    cases: list[tuple[Any, Any, float]] = [
        ("sequence_product", FREE, -2.0),
        ("sequence_geometric_mean", FREE, 2 - math.sqrt(6)),
        ("sequence_product", Truncate(5.0), -1.0),
        ("sequence_product", Mask(0, 5), 4.0),
    ]
    for level, bound, value in cases:
        loss = token_kl_loss(
            logp, behavior, torch.ones(1), kl, torch.ones(1, 2),
            weight=level, bound=bound, denominator=1, kl_coefficient=10,
        )  # fmt: skip
        assert loss.item() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("bound", [Truncate(1.5), Mask(below=0.6, above=1.8)])
@pytest.mark.parametrize(("weight", "ratio"), [*((x, None) for x in LEVELS), ("sequence_product", "token")])
@pytest.mark.parametrize("pieces", [[1, 5], [2, 2, 2], [1, 1, 1, 1, 1, 1]])
def test_micro_batches_do_not_change_the_gradient(bound: Any, weight: Any, ratio: Any, pieces: list[int]) -> None:
    x = data()
    options = {"weight": weight, "bound": bound, "denominator": count(x["mask"], ratio or weight)}
    kl_options = options | {"kl_coefficient": 0.5, "denominator": count(x["mask"], weight)}

    def losses(part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        kl = half_squared_log_ratio(part["logp"], part["logp_proximal"])
        clip = token_clip_loss(**part, ratio=ratio, **options)  # type: ignore[arg-type]
        rest = (part["logp_behavior"], part["advantage"], kl, part["mask"])
        return clip, token_kl_loss(part["logp"], *rest, **kl_options)  # type: ignore[arg-type]

    for which in (0, 1):
        whole = torch.autograd.grad(losses(x)[which], x["logp"])[0]
        whole = torch.where(x["mask"], whole, 0)
        split = {name: value.split(pieces) for name, value in x.items()}
        total = torch.zeros_like(whole)
        for i in range(len(pieces)):
            loss = losses({name: parts[i] for name, parts in split.items()})[which]
            total += torch.where(x["mask"], torch.autograd.grad(loss, x["logp"])[0], 0)
        torch.testing.assert_close(total, whole)
        assert whole.abs().sum() > 0


def test_clip_loss_gradient_where_nothing_counts_is_zero_and_never_nan() -> None:
    for level in LEVELS:
        x = data()
        loss = token_clip_loss(**x, weight=level, bound=Truncate(5.0), denominator=1)  # type: ignore[arg-type]
        gradient = torch.autograd.grad(loss, x["logp"])[0]
        assert torch.equal(gradient[~x["mask"]], torch.zeros(int((~x["mask"]).sum())))
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("bound", [Truncate(100.0), Mask(0.01, 100.0)])
def test_long_completions_do_not_overflow(bound: Any) -> None:
    """A product of 2,000 ratios of e is e^2000."""
    logp = torch.zeros(1, 2000, requires_grad=True)
    behavior, mask = torch.full((1, 2000), -1.0), torch.ones(1, 2000)
    for advantage in (1.0, 0.0, -1.0):
        loss = token_clip_loss(
            logp, behavior, behavior, torch.tensor([advantage]), mask,
            weight="sequence_product", bound=bound, denominator=1,
        )  # fmt: skip
        gradient = torch.autograd.grad(loss, logp)[0]
        assert math.isfinite(loss.item())
        assert bool(torch.isfinite(gradient).all())
        if isinstance(bound, Truncate) and advantage < 0:
            assert loss.item() == pytest.approx(100.0, rel=1e-3)  # -min(100 A, ...), not clipped as A < 0


def test_token_advantages() -> None:
    x = data()
    rows = x["advantage"].unsqueeze(1).expand_as(x["mask"]).clone()
    rows[~x["mask"]] = torch.nan
    options: dict[str, Any] = {"weight": "token", "bound": FREE, "denominator": 3}
    one, other = (token_clip_loss(**x | {"advantage": a}, **options) for a in (x["advantage"], rows))
    assert torch.equal(one, other)
    assert bool(torch.isfinite(torch.autograd.grad(other, x["logp"])[0]).all())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": "sequence"}, "weight is 'sequence', but must be one of token, sequence_product"),
        ({"weight": "token", "ratio": "sequence"}, "ratio is 'sequence', but must be one of token, sequence_product"),
        ({"weight": "token", "aggregate": "mean"}, "aggregate is 'mean', but must be one of token, sequence"),
        ({"weight": "token", "bound": [Truncate(2.0), Truncate(3.0, of="proximal")]}, "bound has Truncate twice"),
        ({"weight": "token", "bound": None}, "bound is None, but must be Truncate"),
        ({"weight": "token", "bound": "truncate"}, "bound is 'truncate', but must be Truncate"),
        ({"weight": "token", "bound": [Truncate(2.0), 3.0]}, "but must be Truncate"),
        ({"weight": "token", "denominator": 0}, "denominator is 0"),
        ({"weight": "sequence_product", "advantage": torch.zeros(6, 9)}, r"must be \(B,\), one for each completion"),
        ({"weight": "token", "advantage": torch.zeros(9)}, r"must be \(B,\) or \(B, T\)"),
    ],
)
def test_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        token_clip_loss(**{**data(), "bound": FREE, "denominator": 1, **changes})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Truncate(0),
        lambda: Truncate("100"),  # type: ignore[arg-type]
        lambda: Mask(0, None),  # type: ignore[arg-type]
        lambda: Mask(2, 1),
        lambda: Mask(-1, 1),
        lambda: Truncate(2, of="prox"),  # type: ignore[arg-type]
        lambda: Mask(0, 1, level="sequence"),  # type: ignore[arg-type]
    ],
)
def test_bounds_that_make_no_sense(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_bound_limits_the_weight_of_tokens_whose_policy_has_moved_back() -> None:
    # prox - behav = .1 and theta - prox = -.1 at each of 100 tokens: theta/behav = 1, and prox/behav = e^10. Truncated
    # at 100, a token's weight is 100 e^-.1 = 90.48; masked, the completion does not count
    shape = (1, 100)
    behav = torch.full(shape, -2.0)
    prox, logp, mask = behav + 0.1, behav.clone(), torch.ones(shape)
    arguments = (logp, prox, behav, torch.ones(1, 100), mask)
    for bound, expected in ((Truncate(100.0), -100 * math.exp(-0.1)), (Mask(0.01, 100.0), 0.0)):
        loss = token_clip_loss(
            *arguments, weight="sequence_product", ratio="token", bound=bound, denominator=100.0, clip=math.inf
        )
        assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_hand_worked_low_and_high_clip() -> None:
    """DAPO, prox = behav, ratios 3/2 and 1/2, clipped to [1 - 0.2, 1 + 0.28].

    A = 1: min(1.5, 1.28) + min(0.5, 0.8) = 1.78, of which only the second token has a gradient, 0.5.
    A = -1: min(-1.5, -1.28) + min(-0.5, -0.8) = -2.3, of which only the first token has one, -1.5.
    """
    proximal, mask = log([0.4, 0.6]), torch.ones(1, 2)
    for advantage, value, gradient in ((1.0, -1.78, [0.0, -0.5]), (-1.0, 2.3, [1.5, 0.0])):
        logp = log([0.6, 0.3]).requires_grad_()
        loss = token_clip_loss(
            logp, proximal, proximal, torch.tensor([advantage]), mask,
            weight="token", bound=FREE, denominator=1, clip=(0.2, 0.28),
        )  # fmt: skip
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-6)
        assert logp.grad is not None
        assert logp.grad[0].tolist() == pytest.approx(gradient, rel=1e-6)
    sample = (log([0.6, 0.3])[0], proximal[0], proximal[0], torch.ones(2))
    assert decoupled_clip_loss(*sample, clip=(0.2, 0.28)).item() == pytest.approx(-0.89, rel=1e-6)
    with pytest.raises(ValueError, match="clip is -1"):
        decoupled_clip_loss(*sample, clip=(0.2, -1))


def test_hand_worked_bounds_of_the_proximal_policy() -> None:
    """Tokens with theta/prox 1.1 and 0.9, prox/behav 4 and 1 (geometric mean 2), A = 1: 4 * 1.1 + 1 * 0.9 = 5.3.

    Truncate(2) of prox/behav: 2 * 1.1 + 0.9 = 3.1, with the gradient 2.2 and 0.9; of theta/behav: 2 + 0.9. Masked above
    3: 0.9; as a completion, whose weight is 2, above 1.9: 0, and above 2.1: all; and of theta/behav above 4.2: 0.9.
    """
    logp = log([0.88, 0.45]).requires_grad_()
    proximal, behavior, mask = log([0.8, 0.5]), log([0.2, 0.5]), torch.ones(1, 2)
    geometric: Any = {"of": "proximal", "level": "sequence_geometric_mean"}
    for bound, value in (
        (FREE, 5.3),
        ((), 5.3),
        (Truncate(2.0, of="proximal"), 3.1),
        (Truncate(2.0), 2.9),
        (Mask(0, 3.0, of="proximal"), 0.9),
        (Mask(0, 1.9, **geometric), 0.0),
        (Mask(0, 2.1, **geometric), 5.3),
        ((Truncate(2.0, of="proximal"), Mask(0, 2.1, **geometric)), 3.1),
        (Mask(0, 4.2), 0.9),
    ):
        loss = token_clip_loss(
            logp, proximal, behavior, torch.ones(1), mask, weight="token", bound=bound, denominator=1
        )
        assert -loss.item() == pytest.approx(value, rel=1e-5, abs=1e-7)
        if bound == Truncate(2.0, of="proximal"):
            assert (-torch.autograd.grad(loss, logp)[0][0]).tolist() == pytest.approx([2.2, 0.9], rel=1e-5)


def test_hand_worked_gspo() -> None:
    """theta/prox 2 and 1/8, geometric mean 1/2; prox/behav 3 and 1, at level token; A = 1, not clipped.

    Terms 3/2 and 1/2. Per sequence their mean, 1; each token's log-probability has half of that as its gradient. Per
    token their sum, 2. Clipped to [0.8, 1.2] with A = -1: -(3 + 1) * 0.8, without gradient.
    """
    proximal, behavior, mask = log([0.3, 0.8]), log([0.1, 0.8]), torch.ones(1, 2)
    for advantage, aggregate, clip, value, gradient in (
        (1.0, "sequence", math.inf, -1.0, [-0.5, -0.5]),
        (1.0, None, math.inf, -1.0, [-0.5, -0.5]),
        (1.0, "token", math.inf, -2.0, [-1.0, -1.0]),
        (-1.0, "token", 0.2, 3.2, [0.0, 0.0]),
    ):
        logp = log([0.6, 0.1]).requires_grad_()
        loss = token_clip_loss(
            logp, proximal, behavior, torch.tensor([advantage]), mask, ratio="sequence_geometric_mean",
            weight="token", bound=FREE, denominator=1, aggregate=aggregate, clip=clip,  # type: ignore[arg-type]
        )  # fmt: skip
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-5)
        assert logp.grad is not None
        assert logp.grad[0].tolist() == pytest.approx(gradient, rel=1e-5)


def test_hand_worked_aggregations() -> None:
    """Completions of 1 and 3 tokens with A = 1 and 2, every ratio 1, and 5 tokens at most.

    Per token (1 + 3 * 2) / 4; per sequence (1 + 2) / 2; constant length (1 + 3 * 2) / (2 * 5).
    """
    logp, mask = torch.zeros(2, 3), torch.tensor([[1, 0, 0], [1, 1, 1]])
    completions = count(mask, "sequence_product")
    for aggregate, denominator, value in (
        ("token", count(mask, "token"), 1.75),
        ("sequence", completions, 1.5),
        ("token", completions * 5, 0.7),
    ):
        options: dict[str, Any] = {"weight": "token", "bound": FREE, "aggregate": aggregate}
        advantage = torch.tensor([1.0, 2.0])
        loss = token_clip_loss(logp, logp, logp, advantage, mask, denominator=denominator, **options)
        assert loss.item() == pytest.approx(-value, rel=1e-6)
        other = token_kl_loss(
            logp, logp, advantage, torch.ones(2, 3), mask, denominator=denominator, kl_coefficient=1.0, **options
        )
        ones = {1.75: 1.0, 1.5: 1.0, 0.7: 0.4}[value]  # the same with 1 in place of A
        assert other.item() == pytest.approx(ones - value, rel=1e-6)


def test_a_bound_of_the_proximal_policy_needs_one() -> None:
    for loss in (token_kl_loss, importance_weights):
        with pytest.raises(ConfigError, match="is about prox/behav, but only theta/behav is used as a weight here"):
            loss(**arguments(loss) | {"bound": Truncate(2.0, of="proximal")})


def arguments(loss: Any, shape: tuple[int, int] = (3, 4)) -> dict[str, Any]:
    names = ("logp", "logp_proximal", "logp_behavior") if loss is token_clip_loss else ("logp", "logp_behavior")
    names += ("kl",) if loss is token_kl_loss else ()
    values: dict[str, Any] = {name: torch.zeros(shape) for name in names} | {"mask": torch.ones(shape).bool()}
    if loss is importance_weights:
        return values | {"weight": "token", "bound": FREE}
    values |= {"advantage": torch.zeros(shape[0]), "weight": "token", "bound": FREE, "denominator": 12}
    return values | ({"kl_coefficient": 0.0} if loss is token_kl_loss else {})


@pytest.mark.parametrize("loss", [token_clip_loss, token_kl_loss, importance_weights])
def test_a_wrong_argument_is_named(loss: Any) -> None:
    good = arguments(loss)
    for name, x in good.items():
        if not isinstance(x, Tensor) or name == "advantage":
            continue
        for wrong in (x[:1], x[:, :1], x[0], x.unsqueeze(-1), x.T):
            blamed = "mask|logp_proximal|logp_behavior" if name == "logp" else f"{name}|mask"
            with pytest.raises(ValueError, match=rf"^({blamed}) has shape .*, but must"):
                loss(**good | {name: wrong})
        with pytest.raises(TypeError, match=rf"^{name} is a (numpy\.)?ndarray, but must be a .*tensor"):
            loss(**good | {name: x.numpy()})
        if name != "mask":
            with pytest.raises(TypeError, match=rf"^{name} is a tensor of torch.int64, but must be a floating-point"):
                loss(**good | {name: x.long()})
    with pytest.raises(ValueError, match=r"^mask contains values other than 0 and 1"):
        loss(**good | {"mask": torch.full((3, 4), 0.5)})
    for mask in (good["mask"].float(), good["mask"].long()):
        assert torch.equal(loss(**good | {"mask": mask}), loss(**good))


@pytest.mark.parametrize("loss", [token_clip_loss, token_kl_loss])
def test_wrong_numbers_and_advantages_are_refused(loss: Any) -> None:
    good = arguments(loss)
    for changes, error, words in (
        ({"advantage": torch.zeros(3).long()}, TypeError, "^advantage is a tensor of torch.int64"),
        ({"advantage": torch.zeros(3, 1)}, ConfigError, r"^advantage has shape \(3, 1\)"),
        ({"denominator": torch.tensor([1.0, 2.0])}, ConfigError, "^denominator is .*single number"),
        ({"denominator": torch.tensor(0.0)}, ConfigError, "^denominator is 0.0"),
        ({"denominator": math.nan}, ConfigError, "^denominator is nan"),
        (
            {"clip" if loss is token_clip_loss else "kl_coefficient": -1.0},
            ValueError,
            "is -1.0, but must be at least 0",
        ),
    ):
        with pytest.raises(error, match=words):
            loss(**good | changes)


@pytest.mark.parametrize("loss", [token_clip_loss, token_kl_loss])
def test_losses_can_be_mapped_and_compiled(loss: Any) -> None:
    x, level = arguments(loss), {"denominator": torch.tensor(12.0)}
    tensors = {name: value for name, value in x.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in x.items() if name not in tensors} | level

    def call(tensors: dict[str, Tensor], denominator: Tensor) -> Tensor:
        return loss(**tensors, **rest | {"denominator": denominator})

    mapped = torch.func.vmap(call)({n: v.expand(2, *v.shape) for n, v in tensors.items()}, torch.tensor([12.0, 6.0]))
    assert torch.equal(mapped, call(tensors, level["denominator"]).expand(2))
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tensors, level["denominator"]), mapped[0])


def test_bf16_log_probabilities_are_summed_in_fp32() -> None:
    """300 tokens of log-ratio 2^-7: the sum 2.34375 is not a bf16 number, and 256 + 1 is 256 in bf16."""
    logp, behavior = torch.full((1, 300), -1.0).bfloat16(), torch.full((1, 300), -1.0 - 2**-7).bfloat16()
    weights = importance_weights(logp, behavior, torch.ones(1, 300), weight="sequence_product", bound=FREE)
    assert weights.dtype == torch.float32
    assert weights.item() == pytest.approx(math.exp(300 * 2**-7), rel=1e-5)


def test_a_token_that_the_behaviour_policy_could_not_sample_has_the_weight_of_the_cap() -> None:
    logp, impossible = torch.tensor([[-1.0]], requires_grad=True), torch.tensor([[-math.inf]])
    mask, advantage = torch.ones(1, 1, dtype=torch.bool), torch.ones(1)
    common: Any = {"weight": "token", "bound": Truncate(100.0)}
    # the cap times the advantage, as in decoupled_clip_loss
    loss = token_clip_loss(logp, logp.detach(), impossible, advantage, mask, denominator=1.0, **common)
    reference = decoupled_clip_loss(logp[0], logp[0].detach(), impossible[0], advantage)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5) == pytest.approx(-100.0, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient.item() == pytest.approx(-100.0, rel=1e-5)
    kl = torch.zeros(1, 1)
    penalised = token_kl_loss(logp, impossible, advantage, kl, mask, denominator=1.0, kl_coefficient=1.0, **common)
    assert penalised.item() == pytest.approx(-100.0, rel=1e-5)
    assert importance_weights(logp, impossible, mask, **common).item() == pytest.approx(100.0, rel=1e-5)


def test_bounds_of_the_only_weight() -> None:
    # where prox/behav alone weighs, it is what importance_weights calls theta/behav
    bounds = of_weight([Truncate(2.0, of="proximal"), Mask(0.5, 3.0)])
    assert bounds == [Truncate(2.0), Mask(0.5, 3.0)]
    logp, behavior = torch.tensor([[0.0, 0.0]]), torch.tensor([[-5.0, 0.0]])
    weights = importance_weights(
        logp, behavior, torch.ones(1, 2), weight="token", bound=of_weight(Truncate(2.0, of="proximal"))
    )
    assert weights.tolist() == [[pytest.approx(2.0), 1.0]]


def test_a_mask_of_tokens_gives_a_weight_for_each() -> None:
    ones = torch.ones(2, 3)
    bound = Mask(0.5, 2.0, level="token")
    assert importance_weights(ones, ones, ones, weight="sequence_product", bound=bound).shape == (2, 3)
