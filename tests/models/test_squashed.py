"""Squashed Gaussians against numerical integration and torch's transformed distributions."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as reference

from anybatch.errors import ConfigError
from anybatch.models.actions import ActionSpec
from anybatch.models.distributions import DiagonalGaussian
from anybatch.models.squashed import TanhGaussian, log_slope

SPACE = gym.spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))


def params(mean: float, log_std: float) -> torch.Tensor:
    return torch.tensor([mean, log_std], dtype=torch.float64)


@pytest.mark.parametrize("log_std", [-2.0, 0.0, 1.0])
@pytest.mark.parametrize("mean", [-1.5, 0.0, 0.7])
def test_density_and_entropy_by_integration(mean: float, log_std: float) -> None:
    """Over actions a = tanh(u) in (-1, 1) the density integrates to 1, and -E[log p] is the entropy."""
    policy = TanhGaussian(params(mean, log_std), (1,))
    # midpoints in u, so that the ends of the range, where the density may be infinite, are resolved
    edges = torch.linspace(mean - 12 * np.exp(log_std), mean + 12 * np.exp(log_std), 200_001, dtype=torch.float64)
    u, width = (edges[1:] + edges[:-1]) / 2, edges[1:].tanh() - edges[:-1].tanh()
    logp = TanhGaussian(params(mean, log_std).expand(len(u), 2), (1,)).log_prob(u[:, None])
    inside = width > 0
    mass = logp.exp()[inside] * width[inside]
    assert float(mass.sum()) == pytest.approx(1, abs=1e-3)
    entropy = float(-(mass * logp[inside]).sum())
    assert float(policy.entropy()) == pytest.approx(entropy, abs=5e-3)
    assert float(policy.entropy()) < np.log(2)  # of the uniform distribution on [-1, 1]


def test_log_prob_is_that_of_torch() -> None:
    values = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    policy = TanhGaussian(values, (2,))
    u = policy.sample(torch.Generator().manual_seed(1))
    normal = reference.Normal(values[:, :2], values[:, 2:].exp())
    theirs = reference.TransformedDistribution(normal, reference.TanhTransform(cache_size=1))
    expected = theirs.log_prob(theirs.transforms[0](u)).sum(-1)
    torch.testing.assert_close(policy.log_prob(u), expected)


def test_no_actions_have_no_densities() -> None:
    assert TanhGaussian(torch.zeros(0, 4), (2,)).log_prob(torch.zeros(0, 2)).shape == (0,)


def test_saturated_actions_are_finite_and_keep_a_gradient() -> None:
    # tanh(30) is 1 in float32, so log(1 - tanh(u)^2) would be -inf; it is 2 log 2 - 2 * 30 = -58.6137
    assert float(log_slope(torch.tensor(30.0))) == pytest.approx(-58.613706, abs=1e-5)
    assert float(log_slope(torch.tensor(-30.0))) == pytest.approx(-58.613706, abs=1e-5)
    values = torch.tensor([[100.0, 0.0]], requires_grad=True)
    policy = TanhGaussian(values, (1,))
    (policy.log_prob(torch.tensor([[101.0]])) + policy.entropy()).sum().backward()
    assert values.grad is not None and torch.isfinite(values.grad).all()
    # d/dmean: (u - mean) / std^2 = 1 of the density, and -2 of the entropy, whose slope falls by 2 for each unit
    assert values.grad[0, 0] == pytest.approx(1 - 2, abs=1e-3)


def test_kl_is_that_of_the_normals_and_of_the_squashed_actions() -> None:
    p, q = TanhGaussian(params(0.3, -0.5), (1,)), TanhGaussian(params(-0.2, 0.1), (1,))
    assert p.kl(q) == DiagonalGaussian(p.params, (1,)).kl(DiagonalGaussian(q.params, (1,)))
    u = p.params.new_tensor(np.random.default_rng(0).normal(0.3, np.exp(-0.5), (400_000, 1)))
    ratio = [TanhGaussian(x.params.expand(len(u), 2), (1,)).log_prob(u) for x in (p, q)]
    assert float((ratio[0] - ratio[1]).mean()) == pytest.approx(float(p.kl(q)), abs=5e-3)


def test_entropy_gradient_by_differences() -> None:
    values = torch.tensor([[0.4, -0.3, -0.5, 0.6]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: TanhGaussian(x, (2,)).entropy(), (values,))


def test_actions_for_the_environment() -> None:
    spec = ActionSpec(SPACE, squash=True)
    # tanh(0) = 0 is the centre (0, 5); tanh(0.5493) = 0.5; saturated numbers reach the bounds
    sent = spec.to_env(torch.tensor([[0.0, 0.0], [0.54930614, -0.54930614], [40.0, -40.0]]))
    np.testing.assert_allclose(sent, [[0, 5], [1, 2.5], [2, 0]], rtol=1e-6)
    assert isinstance(spec.distribution(torch.zeros(4)), TanhGaussian)
    discrete = ActionSpec(gym.spaces.Discrete(3), squash=True)
    assert not discrete.squashed


def test_squashing_needs_bounds() -> None:
    with pytest.raises(ConfigError, match=r"squash is true, but the action space is .*lacks finite bounds"):
        ActionSpec(gym.spaces.Box(-np.inf, np.inf, (2,)), squash=True)
