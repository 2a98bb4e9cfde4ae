"""Optimisers of policy and value."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from anybatch.config.schema import OptimizerConfig
from anybatch.errors import ConfigError
from anybatch.optimizers import clip_gradients_, gradients_of, make_optimizer, stepper


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
