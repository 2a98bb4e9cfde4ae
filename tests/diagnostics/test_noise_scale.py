"""The gradient noise scale: exact algebra, recovery of known answers, its state, and its place in training."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from anybatch.diagnostics.noise_scale import NoiseScale, adam_denominator, ratio, signal_and_noise, window_steps
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
