"""Normalisation of advantages over iterations and of rewards over the run."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anybatch.distributed.collectives import moments
from anybatch.normalize import AdvantageNormalizer, RewardNormalizer, _before


def test_span_1_is_the_current_iteration_alone() -> None:
    # 1 2 3 6: mean 3, population variance 3.5
    normalizer = AdvantageNormalizer()
    normalizer.update(100.0, 5000.0, 10**6)
    normalizer.update(3.0, 3.5, 4)
    assert normalizer.moments() == (3.0, 3.5)
    assert normalizer.decay == 0
    data = torch.tensor([1.0, 2, 3, 6])
    torch.testing.assert_close(normalizer(data), (data - 3) / math.sqrt(3.5))


def test_what_has_no_weight_changes_nothing() -> None:
    normalizer = AdvantageNormalizer()
    normalizer.update(math.nan, 0.0, 0)  # the mean of no samples
    assert normalizer(torch.ones(2), torch.zeros(2).bool()).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"cannot be normalised before update\(mean, var, count\) has added some"):
        normalizer(torch.ones(2))
    normalizer.update(math.nan, math.inf, 10)
    assert all(map(math.isnan, normalizer.moments()))  # the iteration itself was not finite
    normalizer.update(5.0, 4.0, 10)  # and with span 1 has no weight any more
    assert normalizer.moments() == (5.0, 4.0)
    normalizer.update(math.nan, 0.0, 0)
    assert normalizer.moments() == (5.0, 4.0)
    several = AdvantageNormalizer(torch.tensor([1.0, 3.0], dtype=torch.float64))
    several.update(1.0, 4.0, torch.tensor([2.0, 2.0]))
    several.update(math.nan, math.nan, torch.tensor([2.0, 0.0]))
    several.update(0.0, 1.0, torch.tensor([2.0, 0.0]))
    mean, var = several.moments()
    assert mean.tolist() == [0.0, 1.0] and var.tolist() == [1.0, 4.0]  # type: ignore[attr-defined]


def test_data_on_another_device_than_the_moments() -> None:
    normalizer, rewards = AdvantageNormalizer(), RewardNormalizer(2)
    normalizer.update(1.0, 4.0, 10)
    assert normalizer(torch.tensor([3.0, 1.0])).tolist() == [1.0, 0.0]
    # tensors without data stand for those of a GPU: PyTorch mixes only 0-dimensional CPU tensors with them
    assert normalizer(torch.zeros(5, device="meta")).shape == (5,)
    assert _before(rewards._moments.var, torch.zeros(2, 3, device="meta")).device.type == "meta"


def test_two_iterations_by_hand() -> None:
    # span 3: beta = 2/4 = .5. First: mean 1, variance 2, 4 samples, so weight .5 * 4 = 2 when the second arrives with
    # mean 4, variance 6 and 1 sample. Weighted mean (2*1 + 1*4)/3 = 2; second moments 2+1 = 3 and 6+16 = 22:
    # (2*3 + 22)/3 - 2*2 = 28/3 - 4 = 16/3
    normalizer = AdvantageNormalizer(3.0)
    assert normalizer.decay == 0.5
    normalizer.update(1.0, 2.0, 4)
    normalizer.update(4.0, 6.0, 1)
    assert normalizer.moments() == pytest.approx((2.0, 16 / 3))


@pytest.mark.parametrize("span", [1.0, 1.5, 4.0, 255.0])
def test_weighted_reference(span: float) -> None:
    generator = np.random.default_rng(0)
    normalizer, beta = AdvantageNormalizer(span), 1 - 2 / (span + 1)
    history: list[np.ndarray] = []
    for iteration in range(30):
        data = generator.normal(3 * iteration, 1 + iteration % 5, generator.integers(1, 50))
        history.append(data)
        normalizer.update(data.mean(), data.var(), len(data))
        ages = range(iteration, -1, -1)
        weights = np.concatenate([np.full(len(x), beta**age) for x, age in zip(history, ages, strict=True)])
        values = np.concatenate(history)
        mean = np.average(values, weights=weights)
        var = np.average((values - mean) ** 2, weights=weights)
        assert normalizer.moments() == pytest.approx((mean, var), rel=1e-9, abs=1e-9)


def test_one_sample_is_finite() -> None:
    normalizer = AdvantageNormalizer()
    data = torch.tensor([[7.0]])
    normalizer.update(*moments(data))
    assert normalizer.moments() == (7.0, 0.0)
    assert torch.equal(normalizer(data), torch.zeros(1, 1))


@pytest.mark.parametrize("constant", [0.0, 0.1, -3.3, 1e6 + 0.1, 1e-20, 1e30])
@pytest.mark.parametrize("span", [1.0, 3.7, 100.0])
def test_a_constant_for_50_updates_normalises_to_0(constant: float, span: float) -> None:
    normalizer = AdvantageNormalizer(span)
    for iteration in range(50):
        data = torch.full((3, 1 + 7 * (iteration % 11)), constant)
        normalizer.update(*moments(data))
        assert normalizer.moments()[1] >= 0
        assert torch.equal(normalizer(data), torch.zeros_like(data))


def test_entries_that_are_not_valid_become_0() -> None:
    normalizer = AdvantageNormalizer()
    normalizer.update(1.0, 4.0, 3)
    data = torch.tensor([3.0, math.nan, math.inf, -1.0])
    normalized = normalizer(data, valid=torch.tensor([True, False, False, True]))
    torch.testing.assert_close(normalized, torch.tensor([1.0, 0, 0, -1]))
    assert normalized.dtype == torch.float32


def test_advantage_state_round_trip() -> None:
    normalizer = AdvantageNormalizer(5.0)
    normalizer.update(1.0, 2.0, 3)
    state = {name: tensor.clone() for name, tensor in normalizer.state_dict().items()}
    before = normalizer.moments()
    restored = AdvantageNormalizer(5.0)
    restored.load_state_dict(state)
    assert restored.moments() == before
    normalizer.update(-1.0, 0.5, 7)
    assert restored.moments() == before  # a copy does not move with the original
    restored.update(-1.0, 0.5, 7)
    assert restored.moments() == normalizer.moments() != before


@pytest.mark.parametrize("span", [0.999, 0.0, -1.0])
def test_span_below_1_is_refused(span: float) -> None:
    with pytest.raises(ValueError, match=str(span)):
        AdvantageNormalizer(span)


@pytest.mark.parametrize("span", [math.inf, math.nan])
def test_span_that_is_not_finite_is_refused(span: float) -> None:
    with pytest.raises(ValueError):
        AdvantageNormalizer(span)


def test_a_span_beyond_fp32_is_finite() -> None:
    assert AdvantageNormalizer(1e308).decay == 1  # (1e308 - 1) / (1e308 + 1)


def test_span_and_decay() -> None:
    # the paper: span = 2/(1-beta) - 1, so beta = 1 - 2/(span+1): 64 -> 63/65
    assert AdvantageNormalizer(64.0).decay == pytest.approx(63 / 65)
    for span in (1.0, 2.5, 256.0):
        assert 2 / (1 - AdvantageNormalizer(span).decay) - 1 == pytest.approx(span)


def reward_reference(reward: np.ndarray, first: np.ndarray, carried: np.ndarray, discount: float) -> np.ndarray:
    returns = np.empty_like(reward, dtype=np.float64)
    for t in range(reward.shape[1]):
        carried = reward[:, t] + discount * np.where(first[:, t], 0.0, carried)
        returns[:, t] = carried
    return returns


def test_rewards_by_hand() -> None:
    # discount .5. Rewards 1, 2 and 4, where 4 begins a new episode: the terminal reward 2 counts towards the return
    # it ends, 2 + .5*1 = 2.5; then 4 + 0. Returns 1, 2.5, 4: mean 2.5, variance (2.25+0+2.25)/3 = 1.5.
    normalizer = RewardNormalizer(1, discount=0.5)
    reward, first = torch.tensor([[1.0, 2, 4]]), torch.tensor([[True, False, True]])
    torch.testing.assert_close(normalizer(reward, first), reward / math.sqrt(1.5))
    # the next rollout goes on from the running return 4: 1 + .5*4 = 3. Returns 1 2.5 4 3: mean 2.625,
    # variance (2.640625 + .015625 + 1.890625 + .140625)/4 = 1.171875
    out = normalizer(torch.tensor([[1.0]]), torch.tensor([[False]]))
    assert out.item() == pytest.approx(1 / math.sqrt(1.171875), rel=1e-6)
    # and this one does not, as an episode begins: return 1; 1 2.5 4 3 1: mean 2.3, variance 1.36
    out = normalizer(torch.tensor([[1.0]]), torch.tensor([[True]]))
    assert out.item() == pytest.approx(1 / math.sqrt(1.36), rel=1e-6)


def test_reward_bound_and_shape() -> None:
    normalizer = RewardNormalizer(2, discount=0.99, clip=3.0)
    reward = torch.zeros(2, 500)
    reward[0, 7], reward[1, 9] = 1000.0, -1000.0
    first = torch.ones(2, 500, dtype=torch.bool)
    out = normalizer(reward, first)  # std about 45: 1000/45 = 22 is clipped to 3
    assert (out[0, 7], out[1, 9]) == (3.0, -3.0)
    assert out.dtype == torch.float32
    assert out.shape == (2, 500)
    assert (out != 0).sum() == 2
    assert RewardNormalizer(1).clip == 10.0
    assert RewardNormalizer(1).discount == 0.99


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_rewards_without_variance_stay_finite(value: float) -> None:
    normalizer = RewardNormalizer(3)
    for _ in range(5):
        out = normalizer(torch.full((3, 8), value), torch.ones(3, 8, dtype=torch.bool))
        assert torch.isfinite(out).all()
        assert (out == 0).all() if value == 0 else (out <= 10).all()


def test_several_rollouts_have_the_statistics_of_one() -> None:
    generator = np.random.default_rng(1)
    reward = generator.exponential(2.0, (4, 60)).astype(np.float32)
    first = generator.random((4, 60)) < 0.1
    split, whole = RewardNormalizer(4), RewardNormalizer(4)
    edges = [0, 1, 14, 15, 40, 60]
    for start, stop in itertools.pairwise(edges):
        last = split(torch.from_numpy(reward[:, start:stop].copy()), torch.from_numpy(first[:, start:stop].copy()))
    everything = whole(torch.from_numpy(reward), torch.from_numpy(first))
    torch.testing.assert_close(last, everything[:, 40:])
    returns = reward_reference(reward, first, np.zeros(4), 0.99)
    expected = np.clip(reward / np.sqrt(returns.var() + 1e-8), -10, 10)
    np.testing.assert_allclose(everything.numpy(), expected, rtol=1e-5)


def test_reward_state_round_trip() -> None:
    def rollout(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(3, 9, generator=generator), torch.rand(3, 9, generator=generator) < 0.2

    original, restored = RewardNormalizer(3), RewardNormalizer(3)
    original(*rollout(0))
    restored.load_state_dict({name: tensor.clone() for name, tensor in original.state_dict().items()})
    fresh = RewardNormalizer(3)(*rollout(1))
    assert torch.equal(original(*rollout(1)), again := restored(*rollout(1)))
    assert not torch.equal(fresh, again)
    assert torch.equal(original(*rollout(2)), restored(*rollout(2)))


def test_large_offsets_do_not_lose_the_variance() -> None:
    # returns around 1e6 with a spread of 1: fp32 sums of squares would lose it
    generator = np.random.default_rng(2)
    normalizer = RewardNormalizer(8)
    reward = (1e6 + generator.normal(0, 1, (8, 200))).astype(np.float32)
    out = normalizer(torch.from_numpy(reward), torch.ones(8, 200, dtype=torch.bool))
    scale = float((normalizer.state_dict()["squares"] / 1600).sqrt())
    assert scale == pytest.approx(reward.astype(np.float64).std(), rel=1e-6)
    assert (out == 10).all()


def test_the_return_is_accumulated_in_float64() -> None:
    # two rewards of 1: the running return is 1 + .99
    normalizer = RewardNormalizer(1)
    normalizer(torch.ones(1, 2), torch.tensor([[True, False]]))
    assert normalizer.state_dict()["return"].item() == pytest.approx(1.99, rel=1e-12)


def test_moments_alone() -> None:
    mean, var, count = moments(torch.tensor([[1.0, 2], [3, 6]]))
    assert (float(mean), float(var), float(count)) == (3.0, 3.5, 4.0)
    assert mean.dtype == torch.float64


def test_stacked_runs_are_normalised_as_single_ones() -> None:
    spans, generator = (1.0, 7.0), torch.Generator().manual_seed(0)
    stacked = AdvantageNormalizer(torch.tensor(spans, dtype=torch.float64)), RewardNormalizer(3, runs=2)
    single = [(AdvantageNormalizer(span), RewardNormalizer(3)) for span in spans]
    for _ in range(3):
        data = torch.randn(2, 3, 5, generator=generator) * 4 + 1
        first = torch.rand(2, 3, 5, generator=generator) < 0.3
        stacked[0].update(*moments(data, run_axis=True))
        advantage, reward = stacked[0](data), stacked[1](data, first)
        for run, (of_advantages, of_rewards) in enumerate(single):
            of_advantages.update(*moments(data[run]))
            torch.testing.assert_close(advantage[run], of_advantages(data[run]))
            torch.testing.assert_close(reward[run], of_rewards(data[run], first[run]))


def test_a_variance_below_0_is_0() -> None:
    normalizer = AdvantageNormalizer()
    normalizer.update(1.0, -1e-9, 10)  # E[x^2] - E[x]^2 of constant data, rounded
    assert normalizer.moments() == (1.0, 0.0)
    assert normalizer(torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("wrong", [{"num_envs": 0}, {"discount": 1.0}, {"discount": math.nan}, {"clip": -1.0}])
def test_reward_normalizer_names_a_wrong_number(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} is {wrong[name]}, but must be "):
        RewardNormalizer(**{"num_envs": 2, **wrong})


def test_advantage_normalizer_names_a_wrong_argument() -> None:
    normalizer, stacked = AdvantageNormalizer(), AdvantageNormalizer(torch.ones(2, dtype=torch.float64))
    data = torch.zeros(2, 3)
    normalizer.update(0.0, 1.0, 6)
    with pytest.raises(TypeError, match=r"^advantage is a numpy.ndarray, .* torch.as_tensor\(advantage\)"):
        normalizer(data.numpy())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^advantage is a tensor of torch\.int64"):
        normalizer(data.long())
    with pytest.raises(TypeError, match=r"^valid is a tensor of torch\.float32, but must be a bool tensor"):
        normalizer(data, data)
    with pytest.raises(ValueError, match=r"^valid has shape \(2, 1\), but must be \(2, 3\)"):
        normalizer(data, torch.ones(2, 1).bool())
    with pytest.raises(ValueError, match=r"^advantage has shape \(3, 2\), but must be \(2, ...\)"):
        stacked(data.T)
    with pytest.raises(ValueError, match=r"^mean has shape \(2, 3\), but must be a number"):
        normalizer.update(data, 1.0, 6)
    with pytest.raises(ValueError, match=r"^var has shape \(3,\), but must be a number or \(2,\)"):
        stacked.update(0.0, data[0], 6)
    stacked.update(0.0, torch.ones(2), 6)
    for right in (data, data.double(), data.bfloat16(), torch.tensor(0.0)):
        normalizer(right)


def test_reward_normalizer_names_a_wrong_argument() -> None:
    normalizer, reward, first = RewardNormalizer(2), torch.zeros(2, 3), torch.zeros(2, 3).bool()
    for wrong, error, words in (
        ((reward.T, first.T), ValueError, r"^reward has shape \(3, 2\), but must be \(2, T\)"),
        ((reward[:1], first[:1]), ValueError, r"^reward has shape \(1, 3\)"),
        ((reward[:, :0], first[:, :0]), ValueError, r"^reward has shape \(2, 0\), but must be .* at least 1$"),
        ((reward, first[:, :1]), ValueError, r"^first has shape \(2, 1\), but must be \(2, 3\)"),
        ((reward, first.float()), TypeError, "^first is a tensor of torch.float32, but must be a bool tensor"),
        ((reward.numpy(), first), TypeError, "^reward is a numpy.ndarray"),
    ):
        with pytest.raises(error, match=words):
            normalizer(*wrong)
    assert not normalizer.state_dict()["count"]  # nothing of them was added
    assert normalizer(torch.tensor([[1, 0, 2], [0, 0, 1]]), first).dtype == torch.float32
    with pytest.raises(ValueError, match=r"must be \(4, 2, T\)"):
        RewardNormalizer(2, runs=4)(reward, first)


def test_bf16_advantages_are_normalised_in_float64() -> None:
    # 257 of them, of 1 but for one of 2: counts and sums above 256 are not bf16 numbers. Mean 1 + 1/257
    data = torch.ones(257, dtype=torch.bfloat16)
    data[0] = 2
    normalizer = AdvantageNormalizer()
    normalizer.update(*moments(data))
    assert normalizer.moments()[0] == pytest.approx(1 + 1 / 257, rel=1e-12)
    assert normalizer(data).dtype == torch.float32
    assert normalizer(data).mean().item() == pytest.approx(0, abs=1e-6)
