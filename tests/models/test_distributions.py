"""Distributions and action spaces, against numbers worked by hand."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from anybatch.errors import EnvError
from anybatch.models.actions import ActionSpec
from anybatch.models.distributions import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical

LOG2 = math.log(2)


def close(actual: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected).to(actual.dtype), atol=tolerance, rtol=tolerance)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_categorical_by_hand() -> None:
    # p = (1/2, 1/4, 1/4): logits may be any shift of log p. log p(1) = -2 log 2.
    # H = 1/2 log 2 + 2 * 1/4 * 2 log 2 = 1.5 log 2.
    # Against q = (1/4, 1/4, 1/2): KL = 1/2 log 2 + 0 - 1/4 log 2 = 1/4 log 2.
    p = Categorical(torch.tensor([0.5, 0.25, 0.25]).log() + 3.0)
    q = Categorical(torch.tensor([0.25, 0.25, 0.5]).log() - 1.0)
    close(p.log_prob(torch.tensor(1)), -2 * LOG2)
    close(p.entropy(), 1.5 * LOG2)
    close(p.kl(q), 0.25 * LOG2)
    assert p.mode().item() == 0


def test_categorical_extreme_logits_stay_finite() -> None:
    # p = (1, 0) and q = (0, 1) up to e^-20000: log p(1) = -20000, H = 0, KL = 20000.
    p, q = Categorical(torch.tensor([1e4, -1e4])), Categorical(torch.tensor([-1e4, 1e4]))
    close(p.log_prob(torch.tensor([1]).squeeze()), -2e4)
    close(p.entropy(), 0.0)
    close(p.kl(q), 2e4)
    params = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    loss = Categorical(params).kl(Categorical(params.flip(0))).sum() + Categorical(params).entropy().sum()
    (gradient,) = torch.autograd.grad(loss, params)
    assert torch.isfinite(gradient).all()
    drawn = Categorical(torch.tensor([-1e4, 1e4, -1e4]).expand(200_000, 3)).sample(generator())
    assert (drawn == 1).all()  # a choice of probability 0 is never drawn, at either end


def test_kl_is_accurate_for_close_policies() -> None:
    # In float64 sum p log(p/q) has digits enough; p near q in float32 leaves it none. d = 1e-4 gives KL about 1e-9.
    logits = torch.randn(100, 15, dtype=torch.float64, generator=generator())
    other = logits + 1e-4 * torch.randn(100, 15, dtype=torch.float64, generator=generator(1))
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    ours = Categorical(log_p.float()).kl(Categorical(log_q.float()))
    assert exact.max() < 1e-7
    torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=1e-12)


def test_kl_gradient_is_that_of_the_formula() -> None:
    p = (2 * torch.randn(20, 5, dtype=torch.float64, generator=generator())).requires_grad_()
    q = (2 * torch.randn(20, 5, dtype=torch.float64, generator=generator(1))).requires_grad_()
    naive = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()
    expected = torch.autograd.grad(naive, (p, q))
    actual = torch.autograd.grad(Categorical(p).kl(Categorical(q)).sum(), (p, q))
    torch.testing.assert_close(actual, expected)


def test_multicategorical_by_hand() -> None:
    # (1/2, 1/2) x (1/2, 1/4, 1/4): log p(1, 2) = -log 2 - 2 log 2; H = log 2 + 1.5 log 2.
    # KL against (1/2, 1/2) x (1/4, 1/4, 1/2) = 0 + 1/4 log 2.
    p = MultiCategorical(torch.tensor([0.5, 0.5, 0.5, 0.25, 0.25]).log(), (2, 3))
    q = MultiCategorical(torch.tensor([0.5, 0.5, 0.25, 0.25, 0.5]).log(), (2, 3))
    close(p.log_prob(torch.tensor([1, 2])), -3 * LOG2)
    close(p.entropy(), 2.5 * LOG2)
    close(p.kl(q), 0.25 * LOG2)
    assert p.mode().tolist()[1] == 0


def test_bernoulli_by_hand() -> None:
    # p(1) = (1/2, 3/4), log-odds (0, log 3). log p(1, 0) = log 1/2 + log 1/4 = -3 log 2.
    # H = log 2 + (2 log 2 - 3/4 log 3). KL against (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2) = 3/4 log 3 - log 2.
    p, q = Bernoulli(torch.tensor([0.0, math.log(3)])), Bernoulli(torch.zeros(2))
    close(p.log_prob(torch.tensor([1, 0])), -3 * LOG2)
    close(p.entropy(), 3 * LOG2 - 0.75 * math.log(3))
    close(p.kl(q), 0.75 * math.log(3) - LOG2)
    assert p.mode().tolist() == [0, 1]
    extreme = Bernoulli(torch.tensor([1e4, -1e4]))
    close(extreme.log_prob(torch.tensor([0, 1])), -2e4)
    close(extreme.kl(q), 2 * LOG2)
    assert (Bernoulli(torch.tensor([1e4, -1e4]).expand(1000, 2)).sample() == torch.tensor([1, 0])).all()


def test_gaussian_by_hand() -> None:
    # Means 1 and 0, standard deviations 1 and 2, against standard normals.
    # log p(1, 0) = -log 2 - log(2 pi); H = 2 * (1/2 + 1/2 log(2 pi)) + log 2.
    # KL[p, q]: first 1/2 * 1^2 = 1/2; second log(1/2) + 4/2 - 1/2 = 3/2 - log 2.
    # KL[q, p]: first 1/2; second log 2 + 1/8 - 1/2.
    p = DiagonalGaussian(torch.tensor([1.0, 0.0, 0.0, LOG2]), (2,))
    q = DiagonalGaussian(torch.zeros(4), (2,))
    close(p.log_prob(torch.tensor([1.0, 0.0])), -LOG2 - math.log(2 * math.pi))
    close(p.entropy(), 1 + math.log(2 * math.pi) + LOG2)
    close(p.kl(q), 2 - LOG2)
    close(q.kl(p), LOG2 + 0.125)
    close(p.mode(), [1.0, 0.0])


@pytest.mark.parametrize("batch", [1, 7])
def test_categorical_sampling_frequencies(batch: int) -> None:
    probabilities = torch.tensor([0.4, 0.05, 0.25, 0.001, 0.299])
    params = probabilities.log().expand(40_000 // batch, batch, 5)
    drawn = Categorical(params).sample(generator(3))
    assert drawn.dtype == torch.int64
    assert drawn.shape == params.shape[:-1]
    counts = torch.bincount(drawn.flatten(), minlength=5).float()
    assert chi_square(counts, probabilities) < 18.5  # 99.9th percentile with 4 degrees of freedom


def test_other_sampling_frequencies() -> None:
    bits = Bernoulli(torch.tensor([0.0, math.log(3)]).expand(20_000, 2)).sample(generator(1))
    close(bits.float().mean(0), [0.5, 0.75], 0.012)  # 3.9 standard errors of 0.0031
    pair = MultiCategorical(torch.tensor([0.5, 0.5, 0.5, 0.25, 0.25]).log().expand(20_000, 5), (2, 3))
    joint = pair.sample(generator(2)) @ torch.tensor([3, 1])
    counts = torch.bincount(joint, minlength=6).float()
    assert chi_square(counts, torch.tensor([2.0, 1, 1, 2, 1, 1]) / 8) < 20.5  # 5 degrees of freedom
    normal = DiagonalGaussian(torch.tensor([1.0, -1.0, 0.0, LOG2]).expand(20_000, 4), (2,)).sample(generator(3))
    close(normal.mean(0), [1.0, -1.0], 0.06)
    close(normal.std(0), [1.0, 2.0], 0.04)


def test_stacked_runs_draw_what_single_runs_draw() -> None:
    params = torch.randn(3, 17, 4, generator=generator())
    for make in (Categorical, Bernoulli, lambda p: DiagonalGaussian(p, (2,)), lambda p: MultiCategorical(p, (2, 2))):
        stacked = make(params).sample([generator(seed) for seed in range(3)])
        single = torch.stack([make(params[seed]).sample(generator(seed)) for seed in range(3)])
        assert torch.equal(stacked, single)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(4),
        gym.spaces.MultiDiscrete([2, 3]),
        gym.spaces.MultiBinary(3),
        gym.spaces.Box(-1, 1, (2, 2)),
    ],
)
def test_vmap_of_grad_equals_a_loop(space: gym.Space[object]) -> None:
    spec = ActionSpec(space)
    params = torch.randn(3, 5, spec.num_params, generator=generator())
    other = torch.randn(3, 5, spec.num_params, generator=generator(1))
    actions = spec.distribution(params).sample(generator(2))
    assert actions.shape == (3, 5, *spec.shape)
    assert actions.dtype == spec.dtype

    def loss(p: Tensor, q: Tensor, action: Tensor) -> Tensor:
        mine, theirs = spec.distribution(p), spec.distribution(q)
        return (mine.log_prob(action) + mine.entropy() + theirs.kl(mine)).sum()

    gradient = torch.func.grad(loss)
    together = torch.func.vmap(gradient)(params, other, actions)
    one_by_one = torch.stack([gradient(*row) for row in zip(params, other, actions, strict=True)])
    torch.testing.assert_close(together, one_by_one)
    assert together.abs().sum() > 0


def test_sampling_before_log_prob_keeps_the_gradient() -> None:
    params = torch.zeros(2, 3, requires_grad=True)
    distribution = Categorical(params)
    with torch.no_grad():
        action = distribution.sample()
    assert distribution.log_prob(action).requires_grad


def test_discrete_spaces_to_env() -> None:
    discrete = ActionSpec(gym.spaces.Discrete(3, start=5))
    assert discrete.to_env(torch.tensor([0, 2])).tolist() == [5, 7]
    assert (discrete.num_params, discrete.shape, discrete.dtype) == (3, (), torch.int64)
    space = gym.spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [0, 0]]))
    grid = ActionSpec(space)
    assert (grid.num_params, grid.shape) == (14, (4,))
    sent = grid.to_env(torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]))
    assert sent.tolist() == [[[1, 3], [3, 4]], [[0, 1], [0, 0]]]
    assert sent[0] in space
    bits = gym.spaces.MultiBinary((2, 2))
    sent = ActionSpec(bits).to_env(torch.tensor([[1, 0, 0, 1]]))
    assert sent[0].tolist() == [[1, 0], [0, 1]]
    assert sent[0] in bits


def test_box_to_env_maps_and_clips() -> None:
    # [0, 10]: -1 -> 0, 0 -> 5, 0.5 -> 7.5, 3 -> clipped to 10. Unbounded passes through; (-inf, 1] only clips.
    space = gym.spaces.Box(np.array([0, -np.inf, -np.inf], np.float32), np.array([10, np.inf, 1], np.float32))
    spec = ActionSpec(space)
    assert (spec.num_params, spec.shape, spec.dtype) == (6, (3,), torch.float32)
    sent = spec.to_env(torch.tensor([[-1.0, 4, 0.5], [0, -4, 2], [0.5, 0, 0], [3, 0, 0]]))
    assert sent.tolist() == [[0, 4, 0.5], [5, -4, 1], [7.5, 0, 0], [10, 0, 0]]
    assert all(row in space for row in sent)
    assert sent.dtype == np.float32
    odd = gym.spaces.Box(np.float32(-0.1), np.float32(0.7), (1,))
    assert all(row in odd for row in ActionSpec(odd).to_env(torch.linspace(-3, 3, 101)[:, None]))


def test_unsupported_space_is_one_clear_sentence() -> None:
    with pytest.raises(EnvError, match="supported are Discrete, MultiDiscrete"):
        ActionSpec(gym.spaces.Text(3))
    with pytest.raises(EnvError, match="4,294,967,296 values in a dimension"):
        ActionSpec(gym.spaces.Box(-(2**31), 2**31 - 1, (2,), dtype=np.int32))


def test_a_box_of_integers_is_a_multidiscrete() -> None:
    # -2..1 and 0..3: four values each; 0..255 needs more choices than its own dtype can count
    space = gym.spaces.Box(np.array([[-2, 0]], np.int8), np.array([[1, 3]], np.int8), dtype=np.int8)
    spec = ActionSpec(space, squash=True)
    assert (spec.num_params, spec.shape, spec.dtype, spec.continuous, spec.squashed) == (
        8,
        (2,),
        torch.int64,
        False,
        False,
    )
    sent = spec.to_env(torch.tensor([[0, 0], [3, 2]]))
    assert sent.tolist() == [[[-2, 0]], [[1, 2]]]
    assert all(row in space for row in sent)
    whole = gym.spaces.Box(0, 255, (1,), dtype=np.uint8)
    sent = ActionSpec(whole).to_env(torch.tensor([[0], [255]]))
    assert sent.tolist() == [[0], [255]]
    assert sent[1] in whole
