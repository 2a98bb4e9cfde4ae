"""Statistics of an iteration."""

from __future__ import annotations

import math

import pytest
import torch

from anybatch.config.schema import PolicyConfig
from anybatch.diagnostics.statistics import (
    Averages,
    PolicySamples,
    clip_fraction,
    effective_sample_size,
    policy_statistics,
)
from anybatch.models.distributions import Categorical
from anybatch.objectives import LogProbs


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_clip_fraction_by_hand() -> None:
    # ratios .5/.4 = 1.25, .44/.4 = 1.1, .3/.4 = .75, .36/.4 = .9: two of four lie outside [.8, 1.2]
    logp, prox = logs(0.5, 0.44, 0.3, 0.36), logs(0.4, 0.4, 0.4, 0.4)
    assert clip_fraction(logp, prox, 0.2).item() == 0.5
    assert clip_fraction(logp, prox, 0.05).item() == 1.0
    assert clip_fraction(logp, prox, math.inf).item() == 0.0
    assert clip_fraction(logp, logp, 0.0).item() == 0.0


def test_effective_sample_size_by_hand() -> None:
    # weights 1 2 3: 36 / (3 * 14) = 6/7; scale does not matter; one huge weight leaves 1/B
    assert effective_sample_size(logs(1, 2, 3)).item() == pytest.approx(6 / 7, rel=1e-6)
    assert effective_sample_size(logs(1, 2, 3).double() + 500).item() == pytest.approx(6 / 7, rel=1e-6)
    assert effective_sample_size(torch.zeros(10)).item() == pytest.approx(1)
    assert effective_sample_size(torch.tensor([0.0, 0.0, 0.0, 900.0])).item() == pytest.approx(0.25)


def test_policy_statistics_by_hand() -> None:
    # One state, two actions. theta (.5, .5), prox (.4, .6), behav (.2, .8); actions 0 and 1 were sampled.
    # KL[prox, theta] = .4 ln .8 + .6 ln 1.2 = .020136; KL[behav, theta] = .2 ln .4 + .8 ln 1.6 = .192745
    theta, prox, behav = (Categorical(logs(*p).expand(2, 2)) for p in ((0.5, 0.5), (0.4, 0.6), (0.2, 0.8)))
    action = torch.tensor([0, 1])
    logp, logp_prox, logp_behav = (d.log_prob(action) for d in (theta, prox, behav))
    logps = LogProbs(logp, logp_prox, logp_behav, importance=logp_behav)
    seen = policy_statistics(theta, prox, behav, logps, clip=0.2, max_importance_ratio=2.0)
    # theta/prox: 1.25 and .8333: one outside. theta/behav: 2.5, above the cap 2, and .625.
    # sample size (2.5 + .625)^2 / (2 (6.25 + .390625)) = .735294; largest |log| ln 2.5
    expected = {
        "clip_fraction": 0.5,
        "kl_proximal": 0.4 * math.log(0.8) + 0.6 * math.log(1.2),
        "kl_behavior": 0.2 * math.log(0.4) + 0.8 * math.log(1.6),
        "importance_capped": 0.5,
        "effective_sample_size": 3.125**2 / (2 * 6.640625),
        "max_log_ratio": math.log(2.5),
    }
    for name, value in expected.items():
        assert seen[name].item() == pytest.approx(value, rel=1e-5), name


def samples(theta: Categorical, prox: Categorical, behav: Categorical, action: torch.Tensor) -> PolicySamples:
    logp, logp_prox, logp_behav = (d.log_prob(action) for d in (theta, prox, behav))
    logps = LogProbs(logp, logp_prox, logp_behav, importance=logp_behav)
    return PolicySamples(theta.params, prox.params, behav.params, logps)


def test_averages_over_pieces_and_steps() -> None:
    averages = Averages(Categorical, PolicyConfig())
    # first gradient step in two pieces of 1/4 and 3/4: x = 1/4 * 4 + 3/4 * 8 = 7; second: x = 1
    averages.add({"x": torch.tensor(4.0)}, 0.25)
    averages.add({"x": torch.tensor(8.0)}, 0.75)
    averages.end_gradient_step()
    averages.add({"x": torch.tensor(1.0)}, 1.0)
    averages.end_gradient_step()
    assert averages.result() == {"x": pytest.approx(4.0), "gradient_steps": 2}


def test_averages_of_statistics_that_not_every_step_has() -> None:
    averages = Averages(Categorical, PolicyConfig())
    averages.add({"value_loss": torch.tensor(3.0)}, 1.0)  # a step of the value function alone
    averages.add({"entropy": torch.tensor(0.5)}, 1.0)
    averages.end_gradient_step()
    result = averages.result()
    assert (result["value_loss"], result["entropy"], result["gradient_steps"]) == (3.0, 0.5, 1)


def test_what_the_policies_said_is_averaged_over_gradient_steps() -> None:
    """Two steps of four samples, the first in two pieces, give the mean of what each step would give alone."""
    config = PolicyConfig(clip=0.05, max_importance_ratio=1.1)
    averages, alone = Averages(Categorical, config), []
    for cuts in (slice(0, 3), slice(3, 4)), (slice(0, 4),):
        theta, prox, behav = (Categorical(torch.randn(4, 3)) for _ in range(3))
        action = torch.randint(0, 3, (4,))
        whole = samples(theta, prox, behav, action)
        alone.append(policy_statistics(theta, prox, behav, whole.logp, clip=0.05, max_importance_ratio=1.1))
        for cut in cuts:
            parts = (Categorical(d.params[cut]) for d in (theta, prox, behav))
            averages.add({"x": torch.tensor(0.0)}, 0.5, samples(*parts, action[cut]).tensors())
        averages.end_gradient_step()
    result = averages.result()
    for name in alone[0].keys() - {"max_log_ratio"}:
        assert result[name] == pytest.approx(float(alone[0][name] + alone[1][name]) / 2, rel=1e-5), name
    assert result["max_log_ratio"] == pytest.approx(float(alone[0]["max_log_ratio"]))  # of the first step alone
    assert alone[0]["max_log_ratio"] != alone[1]["max_log_ratio"]


def test_stacked_runs_have_their_own_statistics() -> None:
    """Two runs with their own clipping parameters and caps give what each gives alone."""
    clips, caps = (0.05, 0.3), (1.1, 2.0)
    configs = [PolicyConfig(clip=clip, max_importance_ratio=cap) for clip, cap in zip(clips, caps, strict=True)]
    alone = [Averages(Categorical, config) for config in configs]
    numbers = {"clip": torch.tensor(clips)[:, None], "max_importance_ratio": torch.tensor(caps)[:, None]}
    together = Averages(Categorical, PolicyConfig(**numbers))  # type: ignore[arg-type]
    for _ in range(3):
        params, action, losses = torch.randn(3, 2, 5, 4), torch.randint(0, 4, (2, 5)), torch.rand(2)
        theta, prox, behav = (Categorical(x) for x in params)
        together.add({"x": losses}, 1.0, samples(theta, prox, behav, action).tensors())
        together.end_gradient_step()
        for run, averages in enumerate(alone):
            theta, prox, behav = (Categorical(x[run]) for x in params)
            averages.add({"x": losses[run]}, 1.0, samples(theta, prox, behav, action[run]).tensors())
            averages.end_gradient_step()
    result = together.result()
    for run, averages in enumerate(alone):
        for name, value in averages.result().items():
            found = result[name] if name == "gradient_steps" else result[name][run]
            assert found == pytest.approx(value, rel=1e-5), name


def test_effective_sample_size_of_several_steps() -> None:
    # weights 1 2 3: 6/7; equal weights: 1
    assert effective_sample_size(logs(1, 2, 3, 5, 5, 5).view(2, 3)).tolist() == pytest.approx([6 / 7, 1])
