"""Optimisers of policy and value."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from anybatch.config.io import override
from anybatch.config.schema import OptimizerConfig
from anybatch.errors import ConfigError
from anybatch.optimizers import Optimizers, clip_gradients_, followed, gradients_of, make_optimizer, stepper
from anybatch.runs.progress import read_progress
from anybatch.training import train
from small_runs import tiny_ppo


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_narrower_than_fp32_are_refused(kind: str, dtype: torch.dtype) -> None:
    """Their Adam would keep its averages in them: with beta_2 = .999 the second one never moves in bf16."""
    config = OptimizerConfig(kind=kind)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"a parameter of the network is {dtype}, but must be float32"):
        make_optimizer([Parameter(torch.zeros(2)), Parameter(torch.zeros(2, dtype=dtype))], config)
    for allowed in (torch.float32, torch.float64):
        make_optimizer([Parameter(torch.zeros(2, dtype=allowed))], config)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_stepper_steps_as_the_optimizer_does(kind: str) -> None:
    """To the last bit: with another step size, after steps of the optimiser itself, and with a gradient missing."""
    config = OptimizerConfig(kind=kind, step_size=0.1)  # type: ignore[arg-type]
    pairs = []
    for fast in (False, True):
        torch.manual_seed(0)
        parameters = [Parameter(torch.randn(3, 2)), Parameter(torch.randn(4))]
        optimizer = make_optimizer(parameters, config)
        for iteration in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + iteration)
            step = stepper(optimizer) if fast else optimizer.step
            for number in range(3):
                for x in parameters:
                    x.grad = torch.randn_like(x)
                if (iteration, number) == (2, 1):
                    parameters[0].grad = None
                step()
        pairs.append((parameters, optimizer.state_dict()["state"]))
    (expected, state), (parameters, fast_state) = pairs
    assert all(map(torch.equal, parameters, expected))
    assert state.keys() == fast_state.keys()
    for index in state:
        assert state[index].keys() == fast_state[index].keys()
        for name, x in state[index].items():
            assert x is None or torch.equal(fast_state[index][name], x), name
    if kind == "adam":
        assert [float(x["step"]) for x in fast_state.values()] == [11, 12]


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_that_of_pytorch(max_norm: float) -> None:
    parameters = [Parameter(torch.zeros(3, 2)), Parameter(torch.zeros(4)), Parameter(torch.zeros(1))]
    for x in parameters[:2]:
        x.grad = torch.randn_like(x)
    ours = [x.clone() for x in gradients_of(parameters)]
    clip_gradients_(ours, max_norm)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert len(ours) == 2
    assert all(map(torch.equal, ours, gradients_of(parameters)))


@pytest.mark.parametrize("run_axis", [False, True])
def test_no_limit_leaves_gradients_whose_norm_overflows(run_axis: bool) -> None:
    gradients = [torch.tensor([[1e20, 1.0]])]  # 1e40 is beyond float32
    clip_gradients_(gradients, math.inf, run_axis=run_axis)
    assert torch.equal(gradients[0], torch.tensor([[1e20, 1.0]]))


def test_step_size_by_kl_divergence() -> None:
    """Target 0.01: divided by 1.5 above 0.02, multiplied by 1.5 below 0.005, and kept in between."""
    assert followed(1.0, 0.0201, 0.01, 1.5) == pytest.approx(1 / 1.5)
    assert followed(2.0, 0.0049, 0.01, 1.5) == 3.0
    assert all(followed(2.0, kl, 0.01, 1.5) == 2.0 for kl in (0.005, 0.01, 0.02))
    assert all(followed(2.0, kl, 0.01, 1.5) == 2.0 for kl in (0.0, math.nan))  # tells nothing
    assert followed(3.0, math.inf, 0.01, 1.5) == 2.0
    assert followed(90.0, 0.001, 0.01, 1.5) == 100.0
    assert followed(0.012, 1.0, 0.01, 1.5) == 0.01


def test_every_iteration_uses_the_step_size_that_follows_from_the_one_before(tmp_path: Path) -> None:
    config = override(
        tiny_ppo(),
        {"total_env_steps": 160, "kl_target": 1e-4, "schedule": "linear", "step_size": 1e-2, "minibatches": 4},
    )
    train(config, tmp_path / "run", quiet=True)
    columns = read_progress(tmp_path / "run" / "progress.csv")
    factor, factors = 1.0, set()
    for iteration, (kl, step_size) in enumerate(zip(columns["kl_proximal"], columns["step_size"], strict=True)):
        assert step_size == pytest.approx(1e-2 * (1 - 8 * iteration / 160) * factor, rel=1e-6)
        factor = followed(factor, kl, 1e-4, 1.5)
        factors.add(factor)
    assert len(factors) > 2


def test_no_pass_follows_one_that_was_too_far(tmp_path: Path) -> None:
    epochs = {"policy_epochs": 5, "value_epochs": 5, "step_size": 3e-2, "total_env_steps": 80}
    steps = {}
    for kl_stop in (1e-12, 1e-3, 1e9):
        train(override(tiny_ppo(), {**epochs, "kl_stop": kl_stop}), tmp_path / str(kl_stop), quiet=True)
        steps[kl_stop] = np.diff(read_progress(tmp_path / str(kl_stop) / "progress.csv")["gradient_steps"], prepend=0)
    # 2 minibatches: the second step of the first pass is off the sampling policy already
    assert set(steps[1e-12]) == {2}
    assert set(steps[1e9]) == {10}
    assert set(steps[1e-3]) - {2, 10}


def test_step_size_by_effective_sample_size(tmp_path: Path) -> None:
    source = {"kind": "delayed", "delay": 2}
    changes = {"rollout.source": source, "proximal": "recent", "follow_ess": True, "step_size": 3e-2}
    train(override(tiny_ppo(), {**changes, "total_env_steps": 96}), tmp_path / "run", quiet=True)
    columns = read_progress(tmp_path / "run" / "progress.csv")
    shares, step_sizes = columns["effective_sample_size"], columns["step_size"]
    assert min(shares) < 0.99
    assert step_sizes == pytest.approx([3e-2, *(3e-2 * share**0.5 for share in shares[:-1])], rel=1e-5)


def test_adapted_step_sizes_are_saved_and_end_with_the_option() -> None:
    weight = Parameter(torch.zeros(2))
    agent: Any = SimpleNamespace(policy_parameters=lambda: [weight], value_parameters=lambda: [weight])

    def step_size(optimizers: Optimizers) -> float:
        optimizers.set_progress(0.0)
        return float(optimizers.optimizers["joint"].param_groups[0]["lr"])

    adaptive = OptimizerConfig(step_size=0.3, policy_epochs=3, value_epochs=3, kl_target=0.01, follow_ess=True)
    first = Optimizers(agent, adaptive)
    first.follow({"kl_proximal": 1.0, "effective_sample_size": 0.25})
    assert step_size(first) == pytest.approx(0.3 / 1.5 * 0.5)
    for config, expected in ((adaptive, 0.1), (replace(adaptive, kl_target=None, follow_ess=False), 0.3)):
        other = Optimizers(agent, config)
        other.load_state_dict(first.state_dict())
        assert step_size(other) == pytest.approx(expected)
