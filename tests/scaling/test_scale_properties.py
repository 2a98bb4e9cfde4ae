"""Scaling there and back over random configurations, and invariance on problems where it can be proved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anybatch import scaling
from anybatch.config.io import to_dict
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.diagnostics.doctor import examine
from anybatch.diagnostics.noise_scale import NoiseScale
from anybatch.errors import ConfigError
from anybatch.optimizers import clip_gradients_, gradients_of, make_optimizer
from anybatch.presets import ppg_ewma, ppo_ewma
from anybatch.proximal import EwmaProximal
from anybatch.scaling.rules import proximal_age

# ---------------------------------------------------------------- there and back

POWERS = st.integers(0, 5).map(lambda x: 2**x)


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    workers = draw(st.sampled_from([1, 2, 4]))
    return ppg_ewma(
        **{
            "workers": workers,
            "env.num_envs": 32 * workers * draw(POWERS),
            "rollout.steps": 32 * draw(POWERS),
            "optimizer.minibatches": draw(st.sampled_from([1, 2, 4, 8])),
            "optimizer.step_size": draw(st.floats(1e-6, 1e-1)),
            "optimizer.kind": draw(st.sampled_from(["adam", "sgd"])),
            "policy.center_of_mass": draw(st.floats(0.01, 100)),
            "policy.proximal": draw(st.sampled_from(["ewma", "behavior"])),
            "advantage.span": draw(st.floats(1, 100)),
            "advantage.normalize": draw(st.booleans()),
            "aux.policy_iterations": draw(st.integers(1, 64)),
            "aux.minibatches": draw(POWERS),
            "aux.enabled": draw(st.booleans()),
        }
    )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result


def assert_close(a: TrainConfig, b: TrainConfig) -> None:
    left, right = flat(to_dict(a)), flat(to_dict(b))
    for name, value in left.items():
        numeric = isinstance(value, (float, list))
        assert right[name] == (pytest.approx(value, rel=1e-12) if numeric else value), name


@settings(max_examples=40)
@given(configs(), st.integers(0, 5).map(lambda x: 2**x), st.sampled_from(["sqrt", "linear", "none"]), st.booleans())
def test_there_and_back(config: TrainConfig, c: int, adam_step: Any, adam_betas: bool) -> None:
    rules: dict[str, Any] = {"adam_step": adam_step, "adam_betas": adam_betas}
    small, changes = scaling.scale(config, c, **rules)
    again, back = scaling.scale(small, 1 / c, workers=config.workers, **rules)
    assert_close(again, config)
    assert {change.field for change in changes} == {change.field for change in back}
    if small.workers > 1 or config.workers == 1:  # else it cannot know how full a worker was
        assert_close(scaling.scale(small, 1 / c, **rules)[0], config)


@settings(max_examples=40)
@given(configs(), POWERS, POWERS)
def test_two_steps_are_one(config: TrainConfig, first: int, second: int) -> None:
    if first * second <= 32:
        direct, _ = scaling.scale(config, first * second)
        assert_close(scaling.scale(scaling.scale(config, first)[0], second)[0], direct)


@settings(max_examples=40)
@given(configs(), POWERS)
def test_what_the_rules_hold(config: TrainConfig, c: int) -> None:
    small, _ = scaling.scale(config, c)
    assert small.optimization_batch * c == config.optimization_batch
    assert small.optimizer.minibatches == config.optimizer.minibatches
    if config.policy.proximal == "ewma":
        assert proximal_age(small) == pytest.approx(proximal_age(config))
    if config.advantage.normalize:
        assert small.advantage.span * small.iteration_batch == pytest.approx(
            config.advantage.span * config.iteration_batch
        )
    if config.aux.enabled:
        before, after = (x.iteration_batch * x.aux.policy_iterations for x in (config, small))
        assert before == after
        assert (
            after / small.aux.minibatches_per_epoch / small.workers
            == before / config.aux.minibatches_per_epoch / config.workers
        )
        validate(small)


@settings(max_examples=40)
@given(configs(), st.integers(1, 300), st.integers(1, 512), st.integers(1, 16))
def test_any_batch_is_scaled_or_refused(config: TrainConfig, envs: int, steps: int, many: int) -> None:
    try:
        new, changes = scaling.rescale(config, envs, steps, many)
    except ConfigError:  # no other kind of error
        return
    assert (new.env.num_envs, new.rollout.steps, new.optimizer.minibatches) == (envs, steps, many)
    validate(new)
    if config.policy.proximal == "ewma":
        assert proximal_age(new) == pytest.approx(proximal_age(config))
    assert all(change.before != change.after for change in changes)


# ---------------------------------------------------------------- invariance where it can be proved

REFERENCE = 64  # samples of a gradient step before scaling


class Vector(nn.Module):
    """Many independent one-dimensional problems; SGD and Adam treat each component on its own."""

    def __init__(self, replicas: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((replicas,), start))


@dataclass(frozen=True)
class Walk:
    theta: Tensor
    lag: Tensor  # theta - theta_prox


def config_for(**changes: Any) -> TrainConfig:
    defaults = {"env.num_envs": REFERENCE, "rollout.steps": 8, "optimizer.minibatches": 8, "policy_epochs": 1}
    return ppo_ewma(**{**defaults, "value_epochs": 1, "workers": 1, **changes})


def walk(
    config: TrainConfig,
    samples: int,
    *,
    slope: float,
    curvature: float,
    noise: float,
    start: float = 0.0,
    replicas: int = 10_000,
    seed: int = 0,
) -> Walk:
    """Descend slope*x + curvature*x^2/2 with gradients of variance noise^2/B, through the package's own parts."""
    generator = torch.Generator().manual_seed(seed)
    vector = Vector(replicas, start)
    optimizer = make_optimizer([vector.weight], config.optimizer)
    proximal = EwmaProximal(vector, config.policy.center_of_mass)
    batch = config.optimization_batch
    for _ in range(round(samples / batch)):
        randomness = torch.randn(replicas, generator=generator) * (noise / math.sqrt(batch))
        vector.weight.grad = slope + curvature * vector.weight.detach() + randomness
        optimizer.step()
        proximal.after_gradient_step()
    average = proximal.module.weight
    assert isinstance(average, Tensor)
    return Walk(vector.weight.detach().clone(), (vector.weight - average).detach())


def assert_same_distribution(a: Walk, b: Walk, rel: float) -> None:
    for x, y in ((a.theta, b.theta), (a.lag, b.lag)):
        spread = float(x.std())
        assert float(y.std()) == pytest.approx(spread, rel=rel)
        assert float(y.mean()) == pytest.approx(float(x.mean()), rel=rel, abs=0.05 * spread)


def test_constant_gradient_sgd_is_the_same_trajectory() -> None:
    config = config_for(optimizer_kind="sgd", **{"optimizer.step_size": 0.1})
    for samples in (REFERENCE * 50, REFERENCE * 120):
        walks = [
            walk(scaling.scale(config, c)[0], samples, slope=1.0, curvature=0.0, noise=0.0, replicas=1)
            for c in (1, 4, 16)
        ]
        for other in walks:
            assert float(other.theta) == pytest.approx(-0.1 * samples / REFERENCE, rel=1e-4)
    # far from its start the average lags by its centre of mass: 8 steps of 0.1, whatever the batch
    for other in walks:
        assert float(other.lag) == pytest.approx(-0.8, rel=1e-3)


@pytest.mark.parametrize("c", [4, 16])
def test_noisy_quadratic_sgd_has_the_same_distribution(c: int) -> None:
    config = config_for(optimizer_kind="sgd", **{"optimizer.step_size": 0.02})
    problem: dict[str, Any] = {"slope": 0.0, "curvature": 1.0, "noise": 8.0, "start": 3.0}
    for samples in (REFERENCE * 40, REFERENCE * 200):  # on the way down, and in the stationary state
        first = walk(config, samples, **problem)
        other = walk(scaling.scale(config, c)[0], samples, **problem, seed=1)
        assert_same_distribution(first, other, rel=0.05)
    step, curvature, variance = 0.02, 1.0, 8.0**2 / REFERENCE
    exact = math.sqrt(step * variance / (curvature * (2 - step * curvature)))
    assert float(first.theta.std()) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(("slope", "curvature", "start"), [(1.0, 0.0, 0.0), (0.0, 1.0, 1.0)])
def test_adam_with_the_square_root_rule_has_the_same_distribution(slope: float, curvature: float, start: float) -> None:
    config = config_for(**{"optimizer.step_size": 0.01})
    problem: dict[str, Any] = {"slope": slope, "curvature": curvature, "noise": 160.0, "start": start}
    first = walk(config, REFERENCE * 300, **problem)
    small, _ = scaling.scale(config, 16, adam_betas=True)
    assert_same_distribution(first, walk(small, REFERENCE * 300, **problem, seed=1), rel=0.06)


@pytest.mark.parametrize(("betas", "ratio"), [(False, 2.08), (True, 1.02)])
def test_a_momentum_of_fixed_length_moves_the_policy_further_from_the_average(betas: bool, ratio: float) -> None:
    """Squared distance of theta from the EWMA in pure noise, at 1/16 of the batch over that at the tuned one.

    A gradient n steps ago moved theta - theta_prox by ``(1-b) p (p^(n+1) - b^(n+1)) / (p - b)``, with b = beta_1 and p
    the decay of the EWMA. Squares sum to ``((1-b) p/(p-b))^2 (p^2/(1-p^2) - 2 p b/(1-p b) + b^2/(1-b^2))``: 1.783 for a
    centre of mass of 8, 59.37 for 128. Steps are 1/4 of the size: 59.37 / 16 / 1.783 = 2.08. With b^(1/16) the second
    sum is 29.22: 1.02.
    """
    config = config_for(**{"optimizer.step_size": 0.01})
    problem: dict[str, Any] = {"slope": 0.0, "curvature": 0.0, "noise": 160.0, "replicas": 4000}
    first = walk(config, REFERENCE * 200, **problem)
    other = walk(scaling.scale(config, 16, adam_betas=betas)[0], REFERENCE * 200, **problem, seed=1)
    assert float(other.lag.square().mean() / first.lag.square().mean()) == pytest.approx(ratio, rel=0.12)


def test_adam_with_another_rule_does_not() -> None:
    config = config_for(**{"optimizer.step_size": 0.01})
    problem: dict[str, Any] = {"slope": 1.0, "curvature": 0.0, "noise": 160.0, "replicas": 2000}
    first = walk(config, REFERENCE * 300, **problem)
    for rule, factor in (("linear", 1 / 4), ("none", 4)):
        small, _ = scaling.scale(config, 16, adam_step=rule, adam_betas=True)  # type: ignore[arg-type]
        other = walk(small, REFERENCE * 300, **problem, seed=1)
        assert float(other.theta.std() / first.theta.std()) == pytest.approx(factor, rel=0.15)
        assert float(other.theta.mean() / first.theta.mean()) == pytest.approx(factor, rel=0.25)


@pytest.mark.parametrize(("rule", "same"), [("sqrt", True), ("none", False)])
def test_adam_with_an_epsilon_like_its_gradients(rule: Any, same: bool) -> None:
    """Noise of a gradient is 160 / sqrt(64) = 20, as large as epsilon, and 80 at 1/16 of the batch."""
    config = config_for(**{"optimizer.step_size": 0.01, "adam_eps": 20.0})
    problem: dict[str, Any] = {"slope": 1.0, "curvature": 0.0, "noise": 160.0, "replicas": 4000}
    first = walk(config, REFERENCE * 300, **problem)
    small, _ = scaling.scale(config, 16, adam_betas=True, adam_eps=rule)
    other = walk(small, REFERENCE * 300, **problem, seed=1)
    # without the rule the denominator grows from 20 + 20 to 80 + 20 = 2.5 times instead of 4: steps 1.6 times too long
    assert float(other.theta.std() / first.theta.std()) == pytest.approx(1.0 if same else 1.6, rel=0.1)


@pytest.mark.parametrize(("rule", "share"), [("sqrt", 0.5), ("none", 1.0)])
def test_as_many_noisy_gradients_are_clipped(rule: Any, share: float) -> None:
    """Gradients of 3 parameters; the limit is the median norm at the tuned batch."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3))]
    noise, count = torch.randn(2000, 3, generator=generator) * 8.0, 0
    config = config_for(max_grad_norm=float(noise.norm(dim=1).median()) / REFERENCE**0.5)
    small, _ = scaling.scale(config, 16, max_grad_norm=rule)
    for gradient in noise / small.optimization_batch**0.5:
        parameters[0].grad = gradient.clone()
        clip_gradients_(gradients_of(parameters), small.optimizer.max_grad_norm)
        count += not torch.equal(parameters[0].grad, gradient)
    # norms of 4 times the length exceed a limit that stays with probability 0.99
    assert count / len(noise) == pytest.approx(share, abs=0.03)


def test_without_the_rule_for_the_ewma_the_proximal_policy_is_too_young() -> None:
    config = config_for(optimizer_kind="sgd", **{"optimizer.step_size": 0.1})
    small, _ = scaling.scale(config, 16, ewma=False)
    lag = walk(small, REFERENCE * 100, slope=1.0, curvature=0.0, noise=0.0, replicas=1).lag
    assert float(lag) == pytest.approx(-0.8 / 16, rel=1e-3)


# ---------------------------------------------------------------- past the critical batch


def noise_columns(config: TrainConfig, noise: float, start: float = 1.0, steps: int = 400) -> dict[str, list[float]]:
    """What training logs on the noisy quadratic x^2/2; the noise scale is noise^2 / mean(x^2) in samples."""
    vector = Vector(4000, start)
    optimizer = make_optimizer([vector.weight], config.optimizer)
    estimate = NoiseScale(8, adam=config.optimizer.kind == "adam")
    columns: dict[str, list[float]] = {}
    for step in range(steps):
        gradient = vector.weight.detach() + torch.randn(4000) * noise / math.sqrt(config.optimization_batch)
        vector.weight.grad = gradient
        estimate.add([vector.weight], optimizer, round(config.optimization_batch))
        optimizer.step()
        if step % 8 == 7:
            for name, value in estimate.result().items():
                columns.setdefault(name, []).append(value)
    return columns


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(("noise", "severity"), [(160.0, "ok"), (11.0, "warning"), (0.8, "error")])
def test_the_doctor_knows_the_critical_batch(kind: str, noise: float, severity: str) -> None:
    config = config_for(optimizer_kind=kind, **{"optimizer.step_size": 1e-5})
    assert config.optimization_batch == 64  # far below, near and far above noise^2
    (finding,) = [x for x in examine(noise_columns(config, noise), config) if x.check == "noise_scale"]
    assert finding.severity == severity
    assert ("past the critical batch" in finding.means) == (severity == "error")


def test_past_the_critical_batch_the_square_root_rule_fails_as_the_doctor_says() -> None:
    config = config_for(**{"optimizer.step_size": 0.01})
    problem: dict[str, Any] = {"slope": 1.0, "curvature": 0.0, "noise": 0.8, "replicas": 2000}
    first = walk(config, REFERENCE * 200, **problem)
    other = walk(scaling.scale(config, 16, adam_betas=True)[0], REFERENCE * 200, **problem)
    assert float(other.theta.mean() / first.theta.mean()) > 2  # sqrt(16) = 4 were there no noise at all


@pytest.mark.parametrize(("step_size", "severities"), [(0.02, "ok"), (1.0, "warning or error"), (1.5, "error")])
def test_at_rest_on_a_noisy_quadratic_the_doctor_says_where_invariance_ends(step_size: float, severities: str) -> None:
    """SGD rests at variance a s^2/(2 - a); a = step size times curvature, s^2 the gradient's variance.

    The batch divided by c gives s^2 c and a/c, so a s^2/(2 - a/c). And the signal x^2 is a/(2 - a) of the noise s^2,
    so the noise scale is (2 - a)/a batches: the batch is critical where a = 1.
    """
    config = config_for(optimizer_kind="sgd", **{"optimizer.step_size": step_size})
    problem: dict[str, Any] = {"slope": 0.0, "curvature": 1.0, "noise": 8.0, "replicas": 4000}
    first, other = (
        float(walk(scaling.scale(config, c)[0], REFERENCE * 150, **problem, seed=c).theta.std()) for c in (1, 8)
    )
    assert first / other == pytest.approx(math.sqrt((2 - step_size / 8) / (2 - step_size)), rel=0.05)  # 1.0, 1.37, 1.90
    (finding,) = [x for x in examine(noise_columns(config, 8.0, start=0.0), config) if x.check == "noise_scale"]
    assert finding.severity in severities
    if step_size >= 1.0:
        found = float(finding.seen.split("noise scale ")[1].split(" ")[0].replace(",", ""))
        assert found == pytest.approx(REFERENCE * (2 - step_size) / step_size, rel=0.1)
        assert "steps overshoot" in finding.change
