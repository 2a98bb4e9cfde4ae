"""The gradient noise scale: exact algebra, recovery of known answers, its state, and its place in training."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from anybatch.config.chunks import shared_trajectories
from anybatch.diagnostics.noise_scale import (
    NoiseScale,
    adam_denominator,
    ratio,
    signal_and_noise,
    signal_of_distant_pairs,
    window_steps,
)
from anybatch.presets import ppo_ewma
from anybatch.runs.checkpoint import load_newest
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train

DIMENSIONS = 2000


def test_two_batch_sizes_give_both_unknowns() -> None:
    signal, noise = 0.3, 7.0
    sizes = 32.0, 512.0
    norms = [signal + noise / size for size in sizes]
    assert signal_and_noise(*norms, *sizes) == pytest.approx((signal, noise))


def test_k_gradients_and_their_mean_give_the_sample_variance() -> None:
    gradients = torch.randn(6, 10, dtype=torch.float64)
    mean = gradients.mean(0)
    _, noise = signal_and_noise(float(gradients.square().sum(1).mean()), float(mean.square().sum()), 4, 24)
    assert noise == pytest.approx(4 * float(gradients.var(0, correction=1).sum()))


def test_ratio() -> None:
    assert ratio(6.0, 2.0) == 3.0
    assert math.isnan(ratio(6.0, 0.0))
    assert math.isnan(ratio(6.0, -1.0))


class Problem:
    """Gradients of known mean and per-sample variance, which differs from component to component."""

    def __init__(self, scale: float, kind: type[Optimizer] = Adam, lr: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.zeros(DIMENSIONS // 2)), nn.Parameter(torch.zeros(2, DIMENSIONS // 4))]
        self.gradient = torch.randn(DIMENSIONS, generator=generator)
        self.variance = scale * (0.1 + torch.rand(DIMENSIONS, generator=generator) * 2)
        self.optimizer = kind(self.parameters, lr=lr)  # type: ignore[call-arg]
        self.generator = generator

    def step(self, estimate: NoiseScale, batch: int) -> None:
        noise = torch.randn(DIMENSIONS, generator=self.generator) * (self.variance / batch).sqrt()
        flat = self.gradient + noise
        for parameter, piece in zip(self.parameters, flat.split(DIMENSIONS // 2), strict=True):
            parameter.grad = piece.view_as(parameter)
        estimate.add(self.parameters, self.optimizer, batch)
        self.optimizer.step()

    def simple(self) -> float:
        return float(self.variance.sum() / self.gradient.square().sum())

    def preconditioned(self, batch: int) -> float:
        second_moment = self.gradient.square() + self.variance / batch  # what v_hat converges to
        return float((self.variance / second_moment).sum() / (self.gradient.square() / second_moment).sum())


@pytest.mark.parametrize("batch", [4, 64])
@pytest.mark.parametrize("scale", [3.0, 100.0])
def test_known_noise_scale_is_recovered(batch: int, scale: float) -> None:
    problem, estimate = Problem(scale), NoiseScale(8, adam=True)
    results = []
    for step in range(2000):
        problem.step(estimate, batch)
        if step > 400:  # by then Adam's v_hat has settled
            results.append(estimate.result())
    assert harmonic_mean([x["noise_scale"] for x in results]) == pytest.approx(problem.simple(), rel=0.03)
    expected = problem.preconditioned(batch)
    assert harmonic_mean([x["noise_scale_adam"] for x in results]) == pytest.approx(expected, rel=0.05)
    assert abs(math.log(problem.preconditioned(batch) / problem.simple())) > 0.1  # they are two different numbers


def test_a_noise_scale_far_above_the_window_is_recovered_from_many_windows() -> None:
    problem, estimate = Problem(2000.0, SGD), NoiseScale(64, adam=False)
    for _ in range(64 * 60):
        problem.step(estimate, 4)
    assert problem.simple() > 8 * 64 * 4 / 2
    assert estimate.result()["noise_scale"] == pytest.approx(problem.simple(), rel=0.1)


def test_without_signal_there_is_no_number_or_a_large_one() -> None:
    problem, estimate = Problem(1.0), NoiseScale(8, adam=True)
    problem.gradient.zero_()
    for _ in range(400):
        problem.step(estimate, 8)
    seen = estimate.result()
    for kind in ("noise_scale", "noise_scale_adam"):
        assert math.isnan(seen[kind]) or seen[kind] > 500
    assert abs(seen["gradient_correlation"]) < 0.01


def test_a_window_that_overflows_is_left_out() -> None:
    problem, other = Problem(scale=4.0), Problem(scale=4.0)
    estimate, undisturbed = (NoiseScale(8, device=torch.device("cpu"), adam=False) for _ in range(2))
    for _ in range(20):
        problem.step(estimate, 64)
        other.step(undisturbed, 64)
    for parameter in problem.parameters:  # squares above 3.4e38 are infinite in fp32
        parameter.grad = torch.full_like(parameter, 1e20)
    for _ in range(8):
        estimate.add(problem.parameters, problem.optimizer, 64)
    for _ in range(4):
        problem.step(estimate, 64)
    assert math.isfinite(estimate.result()["noise_scale"]) and math.isfinite(estimate.result()["gradient_correlation"])


def test_a_correlation_is_at_most_1() -> None:
    # the mean product of two pairs of neighbours is -5.8, and the mean square of three gradients 16.41 / 3 = 5.47
    estimate, weight = NoiseScale(3, device=torch.device("cpu"), adam=False), nn.Parameter(torch.zeros(1))
    for value in (2.0, -2.9, 2.0):
        weight.grad = torch.tensor([value])
        estimate.add([weight], SGD([weight], lr=0.0), 1)
    assert estimate.result()["gradient_correlation"] == -1.0


def test_columns_are_there_from_the_start() -> None:
    assert all(math.isnan(x) for x in NoiseScale(8, adam=True).result().values())
    assert list(NoiseScale(8, adam=True).result()) == ["noise_scale", "noise_scale_adam", "gradient_correlation"]
    assert list(NoiseScale(8, adam=False).result()) == ["noise_scale", "gradient_correlation"]


def test_successive_gradients_correlate_by_the_signal_s_share() -> None:
    problem, estimate = Problem(30.0, SGD), NoiseScale(8, adam=False)
    for _ in range(8 * 100):
        problem.step(estimate, 16)
    # weights stand still, so the correlation is |G|^2 / (|G|^2 + tr(Sigma)/B)
    share = 1 / (1 + problem.simple() / 16)
    assert 0.2 < share < 0.5
    assert estimate.result()["gradient_correlation"] == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("overshoot", [0.3, 1.0, 1.5])
def test_swinging_about_a_minimum_shows_in_the_correlation(overshoot: float) -> None:
    """SGD at rest on x^2/2 with step size a: successive gradients correlate by -a/2, and |G|^2 / (tr(Sigma)/B) is
    a/(2 - a), so that (1 - |r|)/|r| = (2 - a)/a is the noise scale in batches."""
    generator, estimate = torch.Generator().manual_seed(0), NoiseScale(8, adam=False)
    parameter = nn.Parameter(torch.zeros(DIMENSIONS))
    optimizer = SGD([parameter], lr=overshoot)
    signal = []
    for step in range(8 * 60):
        signal.append(float(parameter.detach().square().mean()))
        parameter.grad = parameter.detach() + torch.randn(DIMENSIONS, generator=generator)
        estimate.add([parameter], optimizer, 1)
        optimizer.step()
        assert step < 8 or estimate.result()["gradient_correlation"] < 0
    seen = estimate.result()
    assert seen["gradient_correlation"] == pytest.approx(-overshoot / 2, rel=0.05)
    assert math.isnan(seen["noise_scale"])  # the mean over a window is nearly 0
    assert sum(signal[100:]) / len(signal[100:]) == pytest.approx(overshoot / (2 - overshoot), rel=0.05)


def test_one_window_of_long_gradients_does_not_outweigh_the_rest() -> None:
    problem, estimate = Problem(3.0, SGD), NoiseScale(8, adam=False)
    noise = torch.randn(DIMENSIONS, generator=problem.generator) * 1e4
    for step in range(8 * 40):
        if step < 8:
            for parameter, piece in zip(problem.parameters, (noise * (-1) ** step).split(DIMENSIONS // 2), strict=True):
                parameter.grad = piece.view_as(parameter)
            estimate.add(problem.parameters, problem.optimizer, 16)
        else:
            problem.step(estimate, 16)
    assert estimate.result()["noise_scale"] == pytest.approx(problem.simple(), rel=0.1)


def test_parameters_without_gradient_are_left_out() -> None:
    problem, estimate = Problem(3.0), NoiseScale(2, adam=True)
    problem.parameters.append(nn.Parameter(torch.ones(3)))  # like the auxiliary value head in the policy phase
    problem.optimizer = Adam(problem.parameters, lr=0.0)
    for _ in range(2):
        noise = torch.randn(DIMENSIONS)
        for parameter, piece in zip(problem.parameters[:2], noise.split(DIMENSIONS // 2), strict=True):
            parameter.grad = piece.view_as(parameter)
        estimate.add(problem.parameters, problem.optimizer, 4)
        problem.optimizer.step()
    assert not math.isnan(sum(estimate.state_dict()["noise"].values()))


def test_a_layer_that_a_step_leaves_out_has_gradient_0() -> None:
    one, other = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer, estimate = Adam([one, other], lr=0.1), NoiseScale(3, adam=True)
    for gradient in ([4.0, -4.0], None, [8.0, 0.0]):
        one.grad = torch.tensor([6.0])
        other.grad = None if gradient is None else torch.tensor(gradient)
        estimate.add([one, other], optimizer, 1)
        if gradient is None:
            assert estimate.state_dict()["window"]["sum"].tolist() == [12.0, 4.0, -4.0]
            # Adam's last denominator: after one step v_hat is the squared gradient
            assert adam_denominator([one, other], optimizer).tolist() == pytest.approx([6.0, 4.0, 4.0])
        optimizer.step()
    assert estimate.state_dict()["window"] == {}
    fresh = nn.Parameter(torch.zeros(2))
    assert adam_denominator([fresh], Adam([fresh])).tolist() == [1.0, 1.0]


def test_adam_s_denominator_is_the_one_of_the_coming_step() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = Adam([parameter], lr=0.1, betas=(0.0, 0.9))
    for gradient in ([1.0, -2.0], [0.5, 0.0], [3.0, 1e-3]):
        parameter.grad = torch.tensor(gradient)
        expected = adam_denominator([parameter], optimizer)
        before = parameter.detach().clone()
        optimizer.step()  # beta1 = 0: the step is lr * gradient / denominator
        assert torch.allclose(before - parameter.detach(), 0.1 * parameter.grad / expected, rtol=1e-4, atol=1e-6)


def test_state_goes_on_in_the_middle_of_a_window() -> None:
    whole, problem = NoiseScale(8, adam=True), Problem(3.0, lr=1e-3)
    for _ in range(21):
        problem.step(whole, 4)
    assert whole.state_dict()["window"]["taken"] == 5
    resumed, other = NoiseScale(8, adam=True), copy.deepcopy(problem)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    other.generator.set_state(problem.generator.get_state())
    for _ in range(3):
        problem.step(whole, 4)
        other.step(resumed, 4)
    assert resumed.result() == whole.result()


def test_a_window_needs_two_steps() -> None:
    with pytest.raises(ValueError, match="second batch size"):
        NoiseScale(1, adam=False)


@pytest.mark.parametrize(
    ("minibatches", "center_of_mass", "steps"),
    [(8, 8.0, 8), (1, 0.0, 8), (3, 0.0, 9), (8, 2048.0, 64), (8, 20.5, 24), (100, 8.0, 100), (100, 2048.0, 100)],
)
def test_windows_are_whole_iterations(minibatches: int, center_of_mass: float, steps: int) -> None:
    assert window_steps(minibatches, center_of_mass) == steps


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("samples", [8, 64])
def test_windows_of_iterations_that_share_trajectories_have_8_at_least(shared: bool, samples: int) -> None:
    assert window_steps(samples, 8.0, shared_trajectories=shared) == samples * (8 if shared else 1)


def test_three_gradients_have_one_distant_pair() -> None:
    first, second, third = torch.randn(3, 10, dtype=torch.float64)
    rows = torch.stack([first, second, third])
    norm, mean = float(rows.square().sum(1).mean()), float(rows.mean(0).square().sum())
    neighbors = float((first @ second + second @ third) / 2)
    assert signal_of_distant_pairs(norm, mean, neighbors, 3) == pytest.approx(float(first @ third))


RHO = 0.9


def autocorrelated(iterations: int, envs: int, steps: int) -> torch.Tensor:
    """AR(1) samples of variance 1 around 0, (iterations, envs, steps, 100), which continue in the next iteration."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(iterations * steps, envs, 100, generator=generator)
    noise[1:] *= math.sqrt(1 - RHO**2)
    for before, now in pairwise(noise):
        now.add_(before, alpha=RHO)
    return noise.view(iterations, steps, envs, -1).transpose(1, 2)


def variance_of_mean(steps: int) -> float:
    """Variance of the mean of ``steps`` samples: (1/T) (1 + 2 sum_k (1 - k/T) rho^k)."""
    return (1 + 2 * sum((1 - k / steps) * RHO**k for k in range(1, steps))) / steps


def estimated(noise: torch.Tensor, size: int, iteration: int | None) -> dict[str, float]:
    """Estimates at weights that stand still, with the gradients 1 + 4 noise of ``size`` samples each."""
    parameter = nn.Parameter(torch.zeros(noise.shape[-1]))
    estimate = NoiseScale(8 * (iteration or 1), adam=False, iteration=iteration)
    for row in noise.flatten(0, -2):
        parameter.grad = 1.0 + 4.0 * row
        estimate.add([parameter], SGD([parameter], lr=0.0), size)
    return estimate.result()


def test_pieces_of_one_trajectory_and_many_trajectories_have_the_same_noise_scale() -> None:
    """Trajectories of 64 steps; the noise scale is 64 samples times 16 times the variance of a trajectory's mean."""
    pieces = autocorrelated(400, 1, 64).view(400, 8, 8, 100).mean(2)
    pieces = torch.stack([iteration[torch.randperm(8)] for iteration in pieces])  # as minibatches come
    trajectories = autocorrelated(1, 2048, 64).mean(2)
    one, many = estimated(pieces, 8, 8), estimated(trajectories, 64, None)
    expected = 64 * 16 * variance_of_mean(64)
    assert one["noise_scale"] == pytest.approx(expected, rel=0.1)
    assert many["noise_scale"] == pytest.approx(expected, rel=0.1)
    independent = estimated(pieces, 8, None)
    assert independent["noise_scale"] < 0.5 * expected
    # |G|^2 / E|g|^2 of pieces of 8 steps, and the covariance c of successive trajectories: var(128) = (var(64) + c) / 2
    covariance = 2 * variance_of_mean(128) - variance_of_mean(64)
    share = (1 + 16 * covariance) / (1 + 16 * variance_of_mean(8))
    assert one["gradient_correlation"] == pytest.approx(share, abs=0.02)
    assert share < 0.11
    assert independent["gradient_correlation"] > 0.2


def test_iterations_of_one_minibatch_continue_each_other() -> None:
    iterations = autocorrelated(2048, 1, 32).mean(2)
    expected = 32 * 16 * variance_of_mean(32)
    assert estimated(iterations, 32, 1)["noise_scale"] == pytest.approx(expected, rel=0.1)
    assert estimated(iterations, 32, None)["noise_scale"] < 0.9 * expected


@pytest.mark.parametrize(
    ("num_envs", "minibatches", "shared"), [(1, 8, True), (12, 8, True), (4, 4, False), (64, 2, True), (64, 8, False)]
)
def test_training_knows_when_minibatches_share_trajectories(num_envs: int, minibatches: int, shared: bool) -> None:
    assert shared_trajectories(num_envs, minibatches) == shared


def test_a_window_of_iterations_has_distant_pairs() -> None:
    with pytest.raises(ValueError, match="3 or more whole iterations"):
        NoiseScale(16, adam=False, iteration=8)


def test_a_window_of_another_kind_is_dropped() -> None:
    before, after = NoiseScale(8, adam=True), NoiseScale(8, adam=True, iteration=2)
    problem = Problem(3.0)
    for _ in range(11):
        problem.step(before, 4)
    after.load_state_dict(before.state_dict())
    assert after.result() == before.result()
    for _ in range(8):
        problem.step(after, 4)
    assert after.state_dict()["window"] == {}


# ---------------------------------------------------------------- in training


def config(**changes: Any) -> Any:
    defaults = {
        "num_envs": 4,
        "rollout_steps": 16,
        "minibatches": 4,
        "policy_epochs": 1,
        "value_epochs": 1,
        "total_env_steps": 640,
        "log.tensorboard": False,
        "checkpoint_seconds": 0.0,
        "env.options": {},
    }
    return ppo_ewma("gym:CartPole-v1", **{**defaults, **changes})


def test_training_logs_it_and_is_not_disturbed(tmp_path: Path) -> None:
    train(config(), tmp_path / "with", quiet=True)
    train(config(**{"log.noise_scale": False}), tmp_path / "without", quiet=True)
    seen, unseen = (read_progress(tmp_path / name / "progress.csv") for name in ("with", "without"))
    assert "noise_scale" not in unseen
    assert math.isnan(seen["noise_scale"][0])
    assert any(math.isfinite(x) for x in seen["noise_scale"])
    assert "noise_scale_adam" in seen
    assert all(
        math.isnan(a) == math.isnan(b) for a, b in zip(seen["clip_fraction"], unseen["clip_fraction"], strict=True)
    )
    assert seen["policy_loss"] == unseen["policy_loss"]  # bitwise


def test_a_resumed_run_logs_the_same(tmp_path: Path) -> None:
    train(config(), tmp_path / "whole", quiet=True)
    train(config(total_env_steps=320), tmp_path / "parts", quiet=True)
    state, _ = load_newest(tmp_path / "parts" / "checkpoints")
    assert "noise_scale" in state["state"]
    resume(tmp_path / "parts", total_env_steps=640, quiet=True)
    whole, parts = (read_progress(tmp_path / name / "progress.csv") for name in ("whole", "parts"))
    for name in ("noise_scale", "noise_scale_adam", "gradient_correlation"):
        assert [x for x in whole[name] if x == x] == [x for x in parts[name] if x == x]


@pytest.mark.slow
def test_one_environment_has_the_noise_scale_of_many(tmp_path: Path) -> None:
    """At step size 0, 8 samples a step. On seeds 4 to 6 the ratio was 0.9 to 1.3, and 0.44 to 0.46 where minibatches of
    one trajectory were taken for independent; the correlations differed by 0.03 to 0.05, and by 0.05 to 0.11."""
    scales, correlations = {}, {}
    for envs, steps in ((8, 8), (1, 64)):
        still = config(
            num_envs=envs, rollout_steps=steps, minibatches=8, step_size=1e-30, total_env_steps=64 * 300,
            **{"model.options": {"width": 16, "depth": 1}},
        )  # fmt: skip
        train(still, tmp_path / str(envs), seed=4, quiet=True)
        progress = read_progress(tmp_path / str(envs) / "progress.csv")
        scales[envs] = median(x for x in progress["noise_scale_adam"][150:] if math.isfinite(x))
        correlations[envs] = median(progress["gradient_correlation"][150:])
    assert 0.7 < scales[1] / scales[8] < 1.5
    assert abs(correlations[1] - correlations[8]) < 0.07


def test_bf16_gradients_are_added_in_fp32() -> None:
    """1,024 equal gradients of 1: no noise and a correlation of 1; bf16 sums would stay at 256, a noise of 94%."""
    steps, parameter = 1024, nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    noise = NoiseScale(steps, adam=False)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        noise.add([parameter], SGD([parameter], lr=1.0), 1)
    assert noise.result() == {"noise_scale": 0.0, "gradient_correlation": 1.0}
