"""Proximal policies: behaviour, recent, and the exponentially-weighted moving average."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.errors import ConfigError
from anybatch.minibatches import Minibatch
from anybatch.proximal import BehaviorProximal, EwmaProximal, RecentProximal, sum_of_powers


class Scalar(nn.Module):
    """One parameter theta; maps an observation (B, 1) to theta * observation."""

    def __init__(self, theta: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([theta], dtype=dtype))

    def forward(self, observation: Tensor) -> Tensor:
        return self.theta * observation


class Normed(nn.Module):
    """A layer with buffers of a floating-point and of an integer kind, as batch normalisation has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, observation: Tensor) -> Tensor:
        return self.norm(observation)


def minibatch(observation: Tensor, behavior_params: Tensor | None = None) -> Minibatch:
    count = len(observation)
    zeros = torch.zeros(count)
    params = torch.zeros(count, 2) if behavior_params is None else behavior_params
    return Minibatch(observation, zeros.long(), zeros, params, zeros, zeros)


def set_theta(module: Scalar, theta: float) -> None:
    with torch.no_grad():
        module.theta.fill_(theta)


def averaged(ewma: EwmaProximal) -> float:
    (parameter,) = ewma.module.parameters()
    return float(parameter.detach())


def test_0_to_1_with_beta_8_9_gives_9_17() -> None:
    # (theta_1 + beta theta_0)/(1 + beta) = 1/(1 + 8/9) = 9/17; a plain lerp would give 1/9, and forgetting theta_0, 1
    source = Scalar(0.0)
    ewma = EwmaProximal(source)
    assert ewma.beta == pytest.approx(8 / 9)
    assert averaged(ewma) == 0
    set_theta(source, 1.0)
    ewma.after_gradient_step()
    assert averaged(ewma) == pytest.approx(9 / 17, rel=1e-6)
    # once more at 1: (1 + beta)/(1 + beta + beta^2) = (17/9)/(217/81) = 153/217
    ewma.after_gradient_step()
    assert averaged(ewma) == pytest.approx(153 / 217, rel=1e-6)


def test_center_of_mass_0_follows_exactly() -> None:
    source = Scalar(0.3)
    ewma = EwmaProximal(source, center_of_mass=0.0)
    for step in range(20):
        set_theta(source, math.sin(step) * 1e3)
        ewma.after_gradient_step()
        assert averaged(ewma) == float(source.theta.detach())


def test_reset_forgets_the_past() -> None:
    source = Scalar(5.0)
    ewma = EwmaProximal(source, center_of_mass=8.0)
    for _ in range(10):
        ewma.after_gradient_step()
    set_theta(source, 0.0)
    ewma.reset()
    assert averaged(ewma) == 0
    set_theta(source, 1.0)
    ewma.after_gradient_step()
    assert averaged(ewma) == pytest.approx(9 / 17, rel=1e-6)  # as from the beginning


def test_a_boundary_between_iterations_changes_nothing() -> None:
    source = Scalar(1.0)
    with_boundaries, without = EwmaProximal(source), EwmaProximal(source)
    for step in range(12):
        if step % 3 == 0:
            with_boundaries.before_iteration()
        set_theta(source, float(step))
        before = averaged(with_boundaries)
        with_boundaries.before_iteration()
        assert averaged(with_boundaries) == before
        for ewma in (with_boundaries, without):
            ewma.after_gradient_step()
    assert averaged(with_boundaries) == averaged(without)
    ours, theirs = with_boundaries.state_dict(), without.state_dict()
    assert ours["terms"] == theirs["terms"]
    for a, b in zip(ours["module"].values(), theirs["module"].values(), strict=True):
        assert torch.equal(a, b)


def test_buffers_follow_the_source() -> None:
    source = Normed()
    ewma = EwmaProximal(source, center_of_mass=8.0)
    for _ in range(3):
        source(torch.randn(16, 2) * 3 + 5)
        ewma.after_gradient_step()
        for name, buffer in source.named_buffers():
            assert torch.equal(dict(ewma.module.named_buffers())[name], buffer), name
    assert dict(ewma.module.named_buffers())["norm.num_batches_tracked"] == 3


def test_the_source_is_untouched_and_no_gradient_flows() -> None:
    source = Scalar(2.0)
    ewma = EwmaProximal(source)
    assert ewma.module is not source
    set_theta(source, 4.0)
    ewma.after_gradient_step()
    assert float(source.theta.detach()) == 4.0
    assert source.theta.requires_grad
    assert not any(p.requires_grad for p in ewma.module.parameters())
    params = ewma.params(minibatch(torch.ones(3, 1)))
    assert not params.requires_grad
    # (4 + 8/9 * 2)/(17/9) = 52/17
    torch.testing.assert_close(params, torch.full((3, 1), 52 / 17))


def test_ewma_state_round_trip_goes_on_identically() -> None:
    def advance(source: Scalar, ewma: EwmaProximal, steps: range) -> None:
        for step in steps:
            set_theta(source, math.cos(step))
            ewma.after_gradient_step()

    source = Scalar(1.0)
    ewma = EwmaProximal(source, center_of_mass=5.0)
    advance(source, ewma, range(7))
    state = copy.deepcopy(ewma.state_dict())
    other = Scalar(-9.0)
    restored = EwmaProximal(other, center_of_mass=5.0)
    restored.load_state_dict(state)
    assert averaged(restored) == averaged(ewma)
    advance(source, ewma, range(7, 15))
    advance(other, restored, range(7, 15))
    assert averaged(restored) == averaged(ewma)
    # the number of terms counts: without it the first new value would weigh 1 - beta instead of 1/w
    fresh_source = Scalar(float(state["module"]["theta"]))
    fresh = EwmaProximal(fresh_source, center_of_mass=5.0)
    advance(fresh_source, fresh, range(7, 15))
    assert averaged(fresh) != averaged(ewma)


@pytest.mark.parametrize("center_of_mass", [8.0, 2048.0])
def test_fp32_stays_accurate_over_20000_steps(center_of_mass: float) -> None:
    generator = torch.Generator().manual_seed(0)
    path = 1 + torch.randn(20_000, generator=generator, dtype=torch.float64).cumsum(0) * 1e-2
    source = Scalar(1.0)
    ewma = EwmaProximal(source, center_of_mass)
    beta = center_of_mass / (1 + center_of_mass)
    numerator, weight, furthest = 1.0, 1.0, 0.0
    for step, theta in enumerate(path.tolist(), 1):
        set_theta(source, theta)
        ewma.after_gradient_step()
        numerator, weight = theta + beta * numerator, 1 + beta * weight
        if step % 1000 == 0:
            reference = numerator / weight
            furthest = max(furthest, abs(reference - theta))
            assert averaged(ewma) == pytest.approx(reference, rel=2e-5, abs=2e-5)
    assert furthest > 1e-2  # otherwise there would be nothing to get wrong


def expected_lag(center_of_mass: float, step: int) -> float:
    """Mean age of the step + 1 terms, in steps: sum k beta^k / sum beta^k over k = 0 .. step."""
    beta, ages = center_of_mass / (1 + center_of_mass), range(step + 1)
    return sum(k * beta**k for k in ages) / sum(beta**k for k in ages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("center_of_mass", [1.0, 8.0, 128.0])
def test_the_lag_on_a_straight_line_is_the_center_of_mass(dtype: torch.dtype, center_of_mass: float) -> None:
    """theta_t = t for 1,280 steps: bf16 cannot hold every integer above 256, so its own rounding is averaged too."""
    source, beta = Scalar(0.0, dtype), center_of_mass / (1 + center_of_mass)
    ewma = EwmaProximal(source, center_of_mass)
    numerator, weight = 0.0, 1.0
    for step in range(1, 1281):
        set_theta(source, float(step))
        ewma.after_gradient_step()
        numerator, weight = source.theta.item() + beta * numerator, 1 + beta * weight
        if step in (5, 200, 1280):
            (average,) = ewma.average
            assert average.item() == pytest.approx(numerator / weight, rel=1e-5)
            if dtype is not torch.bfloat16 or step <= 256:
                assert step - average.item() == pytest.approx(expected_lag(center_of_mass, step), rel=1e-3)
    rounding = 1.0 if dtype is torch.bfloat16 else 0.01  # of the source, whose spacing at 1,280 is 8
    assert step - average.item() == pytest.approx(center_of_mass, rel=0.01, abs=rounding)
    n = 201  # the closed form of the docstring
    closed = center_of_mass - n * beta**n / (1 - beta**n)
    assert closed == pytest.approx(expected_lag(center_of_mass, 200), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_network_is_the_average_in_its_own_dtype(dtype: torch.dtype) -> None:
    source = Scalar(1.0, dtype)
    ewma = EwmaProximal(source, 128.0)
    set_theta(source, 2.0)
    ewma.after_gradient_step()
    (average,), (parameter,) = ewma.average, ewma.module.parameters()
    assert average.dtype == torch.float32
    assert parameter.dtype == dtype
    assert torch.equal(parameter, average.to(dtype))
    assert ewma.params(minibatch(torch.ones(3, 1, dtype=dtype))).dtype == dtype
    # beta = 128/129: (2 + beta)/(1 + beta) = 386/257
    assert average.item() == pytest.approx(386 / 257, rel=1e-6)
    ewma.reset()
    assert average.item() == parameter.item() == 2


def test_low_precision_state_keeps_the_fp32_average() -> None:
    source = Scalar(0.0, torch.bfloat16)
    ewma = EwmaProximal(source, 50.0)
    for step in range(1, 40):
        set_theta(source, float(step))
        ewma.after_gradient_step()
    state = copy.deepcopy(ewma.state_dict())
    assert state["module"]["theta"].dtype == torch.float32
    assert state["module"]["theta"].bfloat16() != state["module"]["theta"]  # it would be lost
    restored = EwmaProximal(source, 50.0)
    restored.load_state_dict(state)
    for x in (ewma, restored):
        set_theta(source, 40.0)
        x.after_gradient_step()
    assert torch.equal(ewma.average[0], restored.average[0])
    assert torch.equal(*(next(x.module.parameters()) for x in (ewma, restored)))


class Mixed(nn.Module):
    """Parameters in bf16 and fp32, one of them under two names, an integer one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(2, 2, dtype=torch.bfloat16)
        self.tied = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        self.tied.weight = self.low.weight
        self.high = nn.Linear(2, 2)
        self.codes = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.ones(2))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for x in (*self.parameters(), *self.buffers()):
                x.fill_(value)


def test_mixed_dtypes_tied_parameters_integers_and_buffers() -> None:
    source = Mixed()
    source.fill(0)
    ewma = EwmaProximal(source, 8.0)
    source.fill(1)
    ewma.after_gradient_step()
    assert [x.dtype for x in ewma.average] == [torch.float32] * 4  # two weights and two biases
    for average in ewma.average:
        torch.testing.assert_close(average, torch.full_like(average, 9 / 17))
    module = ewma.module
    assert isinstance(module, Mixed)
    assert module.tied.weight is module.low.weight
    assert any(x is module.high.weight for x in ewma.average)  # fp32 parameters have no second copy
    assert [x.dtype for x in module.state_dict().values()] == [x.dtype for x in source.state_dict().values()]
    assert (module.codes == 1).all() and module.steps == 1 and (module.scale == 1).all()
    state = copy.deepcopy(ewma.state_dict())
    restored = EwmaProximal(source, 8.0)
    restored.load_state_dict(state)
    assert all(map(torch.equal, restored.average, ewma.average))
    assert state["module"]["tied.weight"].dtype == torch.float32


def test_replaced_parameters_buffers_and_layers_are_followed() -> None:
    source = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    ewma = EwmaProximal(source, 8.0)
    weights = [source[0].weight.item()]
    for replace in (
        lambda: setattr(source[0], "weight", nn.Parameter(torch.tensor([[7.0]]))),
        lambda: source.__setitem__(0, nn.Linear(1, 1, bias=False)),
        lambda: setattr(source[1], "running_mean", torch.tensor([3.0])),
    ):
        replace()
        weights.append(source[0].weight.item())
        ewma.after_gradient_step()
    powers = [(8 / 9) ** age for age in (3, 2, 1, 0)]
    expected = sum(w * p for w, p in zip(weights, powers, strict=True)) / sum(powers)
    assert ewma.average[0].item() == pytest.approx(expected, rel=1e-5)
    assert ewma.module[1].running_mean == 3  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("kind", [EwmaProximal, RecentProximal])
def test_a_network_that_cannot_be_copied_is_named(kind: type[Any]) -> None:
    source = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))  # its weight is computed, no parameter
    with pytest.raises(
        ConfigError, match=r"model.encoder in it, cannot be copied .* use torch.nn.utils.parametrizations"
    ):
        kind(source)
    kind(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x: x.double(),
            r"0\.weight of the policy is .*float64 on cpu, but its average was created for .* on cpu: create",
        ),
        (lambda x: x.half(), r"0\.weight of the policy is .*float16 on cpu"),
        (lambda x: x.to("meta"), r"0\.weight of the policy is .* on meta, but its average was created for .* on cpu"),
        (lambda x: x.__setitem__(0, nn.Linear(1, 2)), r"0\.weight of the policy is \(2, 1\)"),
        (lambda x: x.append(nn.Linear(2, 2)), r"1\.bias, 1\.weight of the policy was added or removed"),
        (lambda x: x[0].register_parameter("bias", None), r"0\.bias of the policy was added or removed"),
    ],
)
def test_a_policy_that_was_moved_cast_or_rebuilt_is_refused(change: Any, words: str, dtype: torch.dtype) -> None:
    source = nn.Sequential(nn.Linear(2, 2, dtype=dtype))
    ewma = EwmaProximal(source)
    change(source)
    with pytest.raises(ValueError, match=words):
        ewma.after_gradient_step()


def test_an_average_that_was_cast_with_its_policy_is_refused() -> None:
    source = Scalar(1.0)
    ewma = EwmaProximal(source)
    source.bfloat16()
    ewma.module.bfloat16()
    with pytest.raises(ValueError, match=r"theta of the policy is \(1,\), torch.bfloat16 on cpu"):
        ewma.after_gradient_step()
    source.float()
    with pytest.raises(ValueError, match="was cast"):
        ewma.after_gradient_step()


@pytest.mark.parametrize(
    "center_of_mass", [-0.1, -1.0, math.inf, math.nan, None, "8", torch.tensor([8.0, -1.0], dtype=torch.float64)]
)
def test_bad_center_of_mass_is_refused(center_of_mass: Any) -> None:
    with pytest.raises(ConfigError, match=r"center_of_mass is .*, but must be a finite number of gradient steps"):
        EwmaProximal(Scalar(), center_of_mass)


def test_stacked_runs_are_averaged_as_single_ones() -> None:
    centers = (0.0, 8.0, 500.0, 1e17)
    single = [Scalar(float(run)) for run in range(len(centers))]
    stacked = Scalar()
    stacked.theta = nn.Parameter(torch.arange(float(len(centers)))[:, None])
    together = EwmaProximal(stacked, torch.tensor(centers, dtype=torch.float64))
    alone = [EwmaProximal(module, center) for module, center in zip(single, centers, strict=True)]
    for step in range(40):
        for run, (module, ewma) in enumerate(zip(single, alone, strict=True)):
            set_theta(module, math.sin(step + run))
            ewma.after_gradient_step()
        with torch.no_grad():
            stacked.theta.copy_(torch.cat([module.theta for module in single])[:, None])
        together.after_gradient_step()
        if step == 20:
            for ewma in (together, *alone):
                ewma.reset()
    (average,) = together.module.parameters()
    torch.testing.assert_close(average.detach()[:, 0], torch.tensor([averaged(ewma) for ewma in alone]))


def test_sum_of_powers() -> None:
    assert sum_of_powers(0.0, 5) == 1
    assert sum_of_powers(0.5, 4) == pytest.approx(1.875)
    assert sum_of_powers(1 - 1e-12, 1000) == pytest.approx(1000, rel=1e-6)
    assert sum_of_powers(0.9, 10**9) == pytest.approx(10)


def test_a_center_of_mass_beyond_floating_point_is_a_plain_average() -> None:
    source = Scalar(0.0)
    ewma = EwmaProximal(source, center_of_mass=1e17)
    set_theta(source, 1.0)
    ewma.after_gradient_step()
    assert averaged(ewma) == pytest.approx(0.5)


def test_recent_is_the_policy_before_the_iteration() -> None:
    source = Scalar(1.0)
    recent = RecentProximal(source)
    batch = minibatch(torch.ones(2, 1))
    set_theta(source, 2.0)
    recent.before_iteration()
    for theta in (3.0, 4.0):
        set_theta(source, theta)
        recent.after_gradient_step()
        params = recent.params(batch)
        assert torch.equal(params, torch.full((2, 1), 2.0))
        assert not params.requires_grad
    recent.before_iteration()
    assert torch.equal(recent.params(batch), torch.full((2, 1), 4.0))
    set_theta(source, 7.0)
    recent.reset()
    assert torch.equal(recent.params(batch), torch.full((2, 1), 7.0))
    assert recent.module is not source
    assert source.theta.requires_grad


def test_recent_takes_the_restored_policy() -> None:
    source = Scalar(1.0)
    recent = RecentProximal(source)
    set_theta(source, 6.0)
    recent.load_state_dict(recent.state_dict())
    assert torch.equal(recent.params(minibatch(torch.ones(1, 1))), torch.full((1, 1), 6.0))


def test_behavior_returns_what_was_recorded() -> None:
    recorded = torch.randn(5, 2)
    behavior = BehaviorProximal()
    behavior.before_iteration()
    behavior.after_gradient_step()
    behavior.reset()
    behavior.load_state_dict(behavior.state_dict())
    assert torch.equal(behavior.params(minibatch(torch.ones(5, 1), recorded)), recorded)


def test_the_recent_policy_has_buffers_that_checkpoints_leave_out() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("count", torch.zeros(2), persistent=False)
    recent = RecentProximal(module)
    module.count.fill_(7.0)  # type: ignore[union-attr, operator]
    recent.before_iteration()
    assert dict(recent.module.named_buffers())["count"].tolist() == [7.0, 7.0]
