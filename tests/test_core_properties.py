"""Properties of the core that hold for any input."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from anybatch.advantages import explained_variance, gae
from anybatch.config.chunks import time_chunks
from anybatch.config.io import from_dict, override, to_dict
from anybatch.config.schema import TrainConfig
from anybatch.diagnostics.statistics import clip_fraction, effective_sample_size, policy_statistics
from anybatch.distributed.collectives import moments
from anybatch.errors import ConfigError
from anybatch.minibatches import Batch, Minibatch, shuffled
from anybatch.models.distributions import Categorical
from anybatch.normalize import AdvantageNormalizer, RewardNormalizer
from anybatch.objectives import (
    LogProbs,
    auxiliary_loss,
    capped_behavior,
    clipped_weight,
    decoupled_clip_loss,
    decoupled_kl_loss,
    half_squared_log_ratio,
)
from anybatch.policy_phase import value_loss
from anybatch.proximal import EwmaProximal

LOG_PROB = st.floats(-6, 0, width=32)
ADVANTAGE = st.floats(-5, 5, width=32)
SAMPLES = st.lists(st.tuples(LOG_PROB, LOG_PROB, LOG_PROB, ADVANTAGE), min_size=1, max_size=12)
CLIP = st.floats(0.05, 0.9)
CAP = st.floats(1.05, 200.0)


def columns(samples: list[tuple[float, ...]]) -> list[Tensor]:
    logp, *rest = (torch.tensor(column, dtype=torch.float32) for column in zip(*samples, strict=True))
    return [logp.requires_grad_(), *rest]


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss, logp)
    return result


# ---------------------------------------------------------------- objectives


@given(SAMPLES, CLIP, CAP)
@settings(max_examples=200)
def test_clip_loss_agrees_with_the_published_form_in_float64(
    samples: list[tuple[float, ...]], clip: float, cap: float
) -> None:
    logp, prox, behav, advantage = columns(samples)
    wide, prox64, behav64, advantage64 = (x.detach().double() for x in (logp, prox, behav, advantage))
    edges = torch.tensor([math.log(1 - clip), math.log(1 + clip)]).view(2, 1)
    assume(bool(((wide - prox64) - edges).abs().min() > 1e-4))  # at an edge rounding decides which branch is taken
    wide.requires_grad_()
    capped = torch.maximum(behav64, wide.detach() - math.log(cap))
    clipped = torch.clamp(wide - prox64, math.log(1 - clip), math.log(1 + clip)) + prox64 - capped
    expected = torch.maximum(-advantage64 * torch.exp(wide - capped), -advantage64 * torch.exp(clipped)).mean()
    loss = decoupled_clip_loss(logp, prox, behav, advantage, clip=clip, max_importance_ratio=cap)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient(loss, logp).double(), gradient(expected, wide), rtol=1e-4, atol=1e-5)


@given(SAMPLES, CLIP)
def test_prox_behav_is_textbook_ppo_to_the_last_bit(samples: list[tuple[float, ...]], clip: float) -> None:
    logp, _, behav, advantage = columns(samples)
    assume(bool((logp - behav).max() < math.log(100)))
    ratio = torch.exp(logp - behav)
    textbook = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage).mean()
    loss = decoupled_clip_loss(logp, behav, behav, advantage, clip=clip)
    assert torch.equal(loss, textbook)
    assert torch.equal(gradient(loss, logp), gradient(textbook, logp))


@given(SAMPLES, CAP, st.lists(st.floats(-400, 400, width=32), min_size=12, max_size=12))
def test_without_limit_the_proximal_policy_leaves_no_trace(
    samples: list[tuple[float, ...]], cap: float, wild: list[float]
) -> None:
    logp, prox, behav, advantage = columns(samples)
    other = torch.tensor(wild[: len(samples)])
    for losses in (
        [
            decoupled_clip_loss(logp, p, behav, advantage, clip=math.inf, max_importance_ratio=cap)
            for p in (prox, other)
        ],
        [
            decoupled_kl_loss(
                logp, behav, advantage, half_squared_log_ratio(logp, p), kl_coefficient=0.0, max_importance_ratio=cap
            )
            for p in (prox, other)
        ],
    ):
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(gradient(losses[0], logp), gradient(losses[1], logp))


@given(SAMPLES, st.data())
def test_a_mask_is_the_subset_whatever_it_hides(samples: list[tuple[float, ...]], data: st.DataObject) -> None:
    keep = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))
    junk = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
    mask = torch.tensor(keep)
    logp, *rest = columns(samples)
    filled = [torch.where(mask, x.detach(), junk) for x in (logp, *rest)]
    filled[0].requires_grad_()
    masked = decoupled_clip_loss(*filled, mask=mask)
    if not any(keep):
        assert masked == 0
        return
    subset = decoupled_clip_loss(*(x[mask] for x in (logp, *rest)))
    torch.testing.assert_close(masked, subset, rtol=1e-5, atol=1e-6)
    found = gradient(masked, filled[0])
    torch.testing.assert_close(found[mask], gradient(subset, logp)[mask], rtol=1e-5, atol=1e-6)
    assert (found[~mask] == 0).all()


@given(SAMPLES, CLIP)
def test_the_clipped_objective_is_a_lower_bound(samples: list[tuple[float, ...]], clip: float) -> None:
    logp, prox, behav, advantage = columns(samples)
    clipped = decoupled_clip_loss(logp, prox, behav, advantage, clip=clip)
    free = decoupled_clip_loss(logp, prox, behav, advantage, clip=math.inf)
    assert clipped >= free  # losses: minus the objectives


# ---------------------------------------------------------------- advantages


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[Tensor, ...]:
    n, t = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    numbers = [draw(hnp.arrays(np.float32, (n, t), elements=st.floats(-10, 10, width=32))) for _ in range(3)]
    done = draw(hnp.arrays(np.bool_, (n, t)))
    terminated = done & draw(hnp.arrays(np.bool_, (n, t)))
    return tuple(torch.from_numpy(x) for x in (*numbers, done, terminated))


@given(trajectories(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_double_sum(case: tuple[Tensor, ...], discount: float, gae_lambda: float) -> None:
    advantage, target = gae(*case, discount=discount, gae_lambda=gae_lambda)
    reward, value, next_value, done, terminated = (x.double().numpy() for x in case)
    delta = reward + discount * next_value * (1 - terminated) - value
    expected = np.zeros_like(delta)
    for t in range(delta.shape[1]):
        for k in range(t, delta.shape[1]):
            alive = np.prod(1 - done[:, t:k], axis=1)
            expected[:, t] += alive * (discount * gae_lambda) ** (k - t) * delta[:, k]
    np.testing.assert_allclose(advantage.numpy(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(target.numpy(), expected + value, rtol=1e-4, atol=1e-4)


@given(trajectories(), st.floats(0, 1), st.floats(0, 1))
def test_an_episode_does_not_see_the_next(case: tuple[Tensor, ...], discount: float, gae_lambda: float) -> None:
    reward, value, next_value, done, terminated = case
    before = gae(*case, discount=discount, gae_lambda=gae_lambda)[0]
    changed = reward.clone()
    changed[:, -1] += 1000
    after = gae(changed, value, next_value, done, terminated, discount=discount, gae_lambda=gae_lambda)[0]
    cut = done[:, :-1].flip(1).cummax(1).values.flip(1) if done.shape[1] > 1 else done[:, :0]
    assert torch.equal(before[:, :-1][cut], after[:, :-1][cut])


@given(hnp.arrays(np.float32, st.integers(2, 50), elements=st.floats(-100, 100, width=16)))
def test_explained_variance_is_at_most_1(target: np.ndarray) -> None:
    explained = explained_variance(torch.from_numpy(target[::-1].copy()), torch.from_numpy(target)).item()
    assert math.isnan(explained) or explained <= 1


# ---------------------------------------------------------------- normalisers

UPDATES = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(1, 100_000)), min_size=1, max_size=20)


@given(UPDATES, st.floats(1, 1000))
def test_advantage_moments_are_the_weighted_ones(updates: list[tuple[float, float, int]], span: float) -> None:
    normalizer, beta = AdvantageNormalizer(span), (span - 1) / (span + 1)
    for mean, var, count in updates:
        normalizer.update(mean, var, count)
    means, variances, counts = (np.array(column, dtype=np.longdouble) for column in zip(*updates, strict=True))
    weights = counts * np.longdouble(beta) ** np.arange(len(updates) - 1, -1, -1)
    mean = (weights * means).sum() / weights.sum()
    var = (weights * (variances + (means - mean) ** 2)).sum() / weights.sum()
    found_mean, found_var = normalizer.moments()
    assert found_var >= 0
    assert math.isclose(found_mean, mean, rel_tol=1e-8, abs_tol=1e-6)
    assert math.isclose(found_var, var, rel_tol=1e-8, abs_tol=1e-6)


@given(
    st.lists(
        hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
        min_size=1,
        max_size=8,
    ),
    st.floats(1, 100),
)
def test_the_variance_is_never_negative(batches: list[np.ndarray], span: float) -> None:
    normalizer = AdvantageNormalizer(span)
    for batch in batches:
        normalizer.update(*moments(torch.from_numpy(batch)))
        assert normalizer.moments()[1] >= 0
        assert torch.isfinite(normalizer(torch.from_numpy(batch))).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 1000), st.floats(1, 100))
def test_a_constant_normalises_to_0(constant: float, count: int, span: float) -> None:
    normalizer, data = AdvantageNormalizer(span), torch.full((count,), constant)
    for _ in range(5):
        normalizer.update(*moments(data))
        assert (normalizer(data) == 0).all()


@given(
    hnp.arrays(np.float32, (2, 20), elements=st.floats(-100, 100, width=16)),
    hnp.arrays(np.bool_, (2, 20)),
    st.lists(st.integers(1, 19), max_size=5, unique=True),
)
def test_reward_statistics_do_not_depend_on_the_cuts(reward: np.ndarray, first: np.ndarray, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 20]
    split = RewardNormalizer(2, discount=0.9)
    for start, stop in itertools.pairwise(edges):
        piece = split(torch.from_numpy(reward[:, start:stop].copy()), torch.from_numpy(first[:, start:stop].copy()))
        assert torch.isfinite(piece).all()
        assert piece.abs().max() <= 10
    carried, returns = np.zeros(2), []
    for t in range(20):
        carried = reward[:, t].astype(np.float64) + 0.9 * np.where(first[:, t], 0, carried)
        returns.append(carried)
    state = split.state_dict()
    assert math.isclose(float(state["squares"] / state["count"]), np.var(returns), rel_tol=1e-6, abs_tol=1e-9)
    np.testing.assert_allclose(state["return"].numpy(), carried, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- proximal policy


class Theta(nn.Module):
    def __init__(self, theta: float) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([theta], dtype=torch.float64))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.floats(0, 5000), st.data())
def test_ewma_is_the_closed_form(thetas: list[float], center_of_mass: float, data: st.DataObject) -> None:
    source = Theta(thetas[0])
    ewma = EwmaProximal(source, center_of_mass)  # type: ignore[arg-type]
    boundaries = data.draw(st.sets(st.integers(0, 40)))
    reset = data.draw(st.none() | st.integers(0, len(thetas) - 1))
    start = 0
    for step, theta in enumerate(thetas[1:], 1):
        if step in boundaries:
            ewma.before_iteration()
        with torch.no_grad():
            source.theta.fill_(theta)
        ewma.after_gradient_step()
        if step == reset:
            ewma.reset()
            start = step
    terms = np.array(thetas[start:])
    beta = center_of_mass / (1 + center_of_mass)
    weights = beta ** np.arange(len(terms) - 1, -1, -1)
    (average,) = ewma.module.parameters()
    assert math.isclose(average.item(), (weights * terms).sum() / weights.sum(), rel_tol=1e-9, abs_tol=1e-9)


# ---------------------------------------------------------------- minibatches


@given(st.integers(1, 12), st.integers(1, 24), st.integers(1, 24), st.integers(0, 2**32))
def test_each_sample_exactly_once_or_refusal(num_envs: int, steps: int, minibatches: int, seed: int) -> None:
    number = torch.arange(num_envs * steps).view(num_envs, steps)
    observation = {"x": number.unsqueeze(-1).float(), "y": -number}
    numbers = number.float()
    batch = Batch(observation, number, numbers, numbers.unsqueeze(-1), numbers, numbers)
    generator = torch.Generator().manual_seed(seed)
    if steps % (minibatches // math.gcd(num_envs, minibatches)):  # equal shares of equal pieces are impossible
        with pytest.raises(ConfigError, match=r"optimizer\.minibatches"):
            list(shuffled(batch, minibatches, generator))
        return
    dealt = list(shuffled(batch, minibatches, generator))
    assert len(dealt) == minibatches
    assert {len(minibatch) for minibatch in dealt} == {num_envs * steps // minibatches}
    assert sorted(torch.cat([minibatch.action for minibatch in dealt]).tolist()) == list(range(num_envs * steps))
    length = steps // time_chunks(num_envs, steps, minibatches)
    for minibatch in dealt:
        assert isinstance(minibatch.observation, dict)
        assert torch.equal(minibatch.observation["x"].squeeze(-1), minibatch.action.float())
        assert torch.equal(minibatch.observation["y"], -minibatch.action)
        pieces = minibatch.action.view(-1, length)
        assert (pieces.diff(dim=1) == 1).all()  # consecutive steps
        assert (pieces // steps == pieces[:, :1] // steps).all()  # of one environment


@given(st.integers(1, 300), st.integers(1, 320))
def test_pieces_partition(count: int, most: int) -> None:
    number = torch.arange(count)
    zeros = torch.zeros(count)
    minibatch = Minibatch({"x": number}, number, zeros, zeros.unsqueeze(-1), zeros, zeros)
    pieces = list(minibatch.micro_batches(most))
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 2
    assert len(pieces) == math.ceil(count / most)
    assert torch.equal(torch.cat([piece.action for piece in pieces]), number)
    assert torch.equal(torch.cat([piece.observation["x"] for piece in pieces]), number)  # type: ignore[index]


# ---------------------------------------------------------------- arguments

FLOATS, BOOLS = "floats", "bools"
Call = Callable[..., object]


def of_policies(**arguments: Tensor) -> object:
    """policy_statistics with the names of its arguments for what they hold."""
    logp = LogProbs(*(arguments[f"logp.{name}"] for name in ("theta", "proximal", "behavior", "importance")))
    policies = (Categorical(arguments[name]) for name in ("policy", "proximal", "behavior"))
    return policy_statistics(*policies, logp, clip=0.2, max_importance_ratio=100.0)


SAMPLE_CALLS: dict[str, tuple[Call, dict[str, str]]] = {
    "clip": (
        decoupled_clip_loss,
        {"logp": FLOATS, "logp_proximal": FLOATS, "logp_behavior": FLOATS, "advantage": FLOATS, "mask": BOOLS},
    ),
    "kl": (
        functools.partial(decoupled_kl_loss, kl_coefficient=1.0),
        {"logp": FLOATS, "logp_behavior": FLOATS, "advantage": FLOATS, "kl": FLOATS, "mask": BOOLS},
    ),
    "without kl": (
        functools.partial(decoupled_kl_loss, kl_coefficient=0.0),
        {"logp": FLOATS, "logp_behavior": FLOATS, "advantage": FLOATS, "kl": FLOATS},
    ),
    "half square": (half_squared_log_ratio, {"logp": FLOATS, "logp_proximal": FLOATS}),
    "cap": (
        functools.partial(capped_behavior, max_importance_ratio=2.0),
        {"logp": FLOATS, "logp_behavior": FLOATS},
    ),
    "clipped": (functools.partial(clipped_weight, clip=0.2), dict.fromkeys(("weight", "ratio", "log_prefix"), FLOATS)),
    "auxiliary": (auxiliary_loss, dict.fromkeys(("value", "auxiliary_value", "value_target", "kl"), FLOATS)),
    "gae": (
        functools.partial(gae, discount=0.9, gae_lambda=0.9),
        {"reward": FLOATS, "value": FLOATS, "next_value": FLOATS, "done": BOOLS, "terminated": BOOLS},
    ),
    "explained": (explained_variance, {"value": FLOATS, "target": FLOATS}),
    "clip fraction": (functools.partial(clip_fraction, clip=0.2), {"logp": FLOATS, "logp_proximal": FLOATS}),
    "value": (functools.partial(value_loss, coefficient=0.5), {"value": FLOATS, "target": FLOATS}),
}
COEFFICIENTS: dict[str, tuple[Call, tuple[str, ...], int]] = {
    "clip": (decoupled_clip_loss, ("clip", "max_importance_ratio"), 4),
    "kl": (decoupled_kl_loss, ("kl_coefficient", "max_importance_ratio"), 4),
    "auxiliary": (auxiliary_loss, ("clone_coefficient",), 4),
    "clip fraction": (clip_fraction, ("clip",), 2),
}


def right(kinds: dict[str, str], shape: tuple[int, ...]) -> dict[str, Any]:
    return {name: torch.zeros(shape, dtype=torch.bool if kind == BOOLS else None) for name, kind in kinds.items()}


def reshaped(x: Tensor) -> list[Tensor]:
    """The tensor in shapes that are wrong, most of which would broadcast."""
    others = [x.unsqueeze(-1), x.unsqueeze(0), x[..., :1], x[..., :-1], x[0], x[:1], x.sum().to(x.dtype)]
    return [other for other in others if other.shape != x.shape]


def spoilt(x: Tensor, data: st.DataObject) -> tuple[Any, type[Exception]]:
    """The argument in a wrong shape, of a wrong dtype or of a wrong type, and the error that it should raise."""
    wrong = [x.numpy(), x.tolist(), x.long() if x.dtype == torch.bool else x.bool(), x.to(torch.complex64)]
    errors = [(other, ValueError) for other in reshaped(x)] + [(other, TypeError) for other in wrong]
    return data.draw(st.sampled_from(errors))


@given(st.sampled_from(sorted(SAMPLE_CALLS)), st.lists(st.integers(2, 4), min_size=2, max_size=3), st.data())
def test_right_arguments_pass_and_a_wrong_one_is_named(call: str, sizes: list[int], data: st.DataObject) -> None:
    function, kinds = SAMPLE_CALLS[call]
    shape = tuple(sizes)
    arguments = right(kinds, shape)
    function(**arguments)
    torch.func.vmap(lambda parts: function(**parts))(right(kinds, (2, *shape)))
    function(**{name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in arguments.items()})
    name = data.draw(st.sampled_from(sorted(kinds)))
    wrong, error = spoilt(arguments[name], data)
    with pytest.raises(error) as raised:
        function(**arguments | {name: wrong})
    first = next(iter(kinds))  # whose shape is that of the call, so that another is blamed
    blamed = [other for other in kinds if other != first] if name == first and error is ValueError else [name]
    assert any(str(raised.value).startswith(f"{x} ") for x in (*blamed, name)), raised.value
    assert "must" in str(raised.value)


@given(st.integers(2, 4), st.integers(2, 4), st.data())
def test_statistics_name_a_wrong_argument(runs: int, count: int, data: st.DataObject) -> None:
    logps = [f"logp.{name}" for name in ("theta", "proximal", "behavior", "importance")]
    arguments = {name: torch.zeros(runs, count) for name in logps}
    arguments |= {name: torch.zeros(runs, count, 3) for name in ("policy", "proximal", "behavior")}
    of_policies(**arguments)
    name = data.draw(st.sampled_from(["logp.proximal", "logp.behavior", "logp.importance", "proximal", "behavior"]))
    wrong = data.draw(st.sampled_from(reshaped(arguments[name])[:4]))
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        of_policies(**arguments | {name: wrong})
    with pytest.raises(ValueError, match=r"^logp\.theta has shape"):
        of_policies(**arguments | {name: torch.zeros(count) for name in logps})


@given(st.sampled_from(sorted(COEFFICIENTS)), st.integers(2, 5), st.integers(2, 5), st.data())
def test_coefficients_are_numbers_or_one_for_each_run(call: str, runs: int, count: int, data: st.DataObject) -> None:
    function, names, tensors = COEFFICIENTS[call]
    samples = [torch.zeros(runs, count)] * tensors
    required: dict[str, Any] = {"kl_coefficient": 1.0} if call == "kl" else {}
    name = data.draw(st.sampled_from(names))
    for shape in ((), (1,), (1, 1), (runs, 1)):
        function(*samples, **required | {name: torch.ones(shape)})
    function(*samples, **required | {name: data.draw(st.sampled_from([1, 0.5, math.inf, np.float32(0.5)]))})
    for shape in ((runs,), (count,), (runs, count), (1, count), (1, runs, 1)):
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            function(*samples, **required | {name: torch.ones(shape)})
    for number in (-0.5, math.nan, *([0.0] if name == "max_importance_ratio" else [])):
        with pytest.raises(ValueError, match=f"^{name} is {number}, but must be"):
            function(*samples, **required | {name: number})
    with pytest.raises(TypeError, match=f"^{name} is a builtins.str"):
        function(*samples, **required | {name: "0.2"})


# ---------------------------------------------------------------- the rest


@given(hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-500, 500)))
def test_effective_sample_size_is_a_share(log_weight: np.ndarray) -> None:
    share = effective_sample_size(torch.from_numpy(log_weight)).item()
    assert 1 / len(log_weight) - 1e-5 <= share <= 1 + 1e-5


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "env.num_envs": st.integers(),
            "policy.clip": st.floats(allow_nan=False),
            "optimizer.adam_betas": st.tuples(st.floats(0, 1), st.floats(0, 1)),
            "optimizer.max_grad_norm": st.none() | st.floats(allow_nan=False),
            "policy.objective": st.sampled_from(["clip", "kl"]),
            "device": st.text(),
            "env.options": st.dictionaries(
                st.text(), st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
            ),
        },
    )
)
@settings(max_examples=40)
def test_configurations_survive_being_written(changes: dict[str, object]) -> None:
    config = override(TrainConfig(), changes)
    assert from_dict(to_dict(config)) == config
