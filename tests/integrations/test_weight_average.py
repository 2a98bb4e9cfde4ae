"""The average without a second model: EwmaProximal's numbers, and the model as it was after a forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from anybatch.errors import ConfigError
from anybatch.integrations.weight_average import WeightAverage
from anybatch.proximal import EwmaProximal


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_same_numbers_as_ewma_proximal(dtype: torch.dtype, device: str | None) -> None:
    model = network().to(dtype)
    average, reference = WeightAverage(model.named_parameters(), 3.0, device), EwmaProximal(model, 3.0)
    for step in range(10):
        with torch.no_grad():
            for x in model.parameters():
                x += 0.1 * torch.randn_like(x)
        for each in (average, reference):
            each.after_gradient_step()
        if step == 6:
            average.reset()
            reference.reset()
        assert all(map(torch.equal, average.average, reference.average))
    assert average.average[0].dtype == torch.float32
    assert average.terms == 1 + 3


def test_the_model_is_as_it_was_after_a_forward_pass_with_the_average() -> None:
    model, x = network(), torch.randn(5, 3)
    model.train()
    model[2].eval()
    average = WeightAverage(model.named_parameters(), 1.0)
    start = copy.deepcopy(model).eval()
    with torch.no_grad():
        model[0].weight += 1.0
    weights = [p.clone() for p in model.parameters()]
    loss = model(x).sum()
    with average.applied(model), torch.no_grad():
        assert torch.equal(model(x), start(x))
    loss.backward()  # through the weights of before
    assert all(map(torch.equal, model.parameters(), weights))
    assert [module.training for module in model] == [True, True, False, True]
    with pytest.raises(RuntimeError, match="inside"), average.applied(model):
        raise RuntimeError("inside")
    assert all(map(torch.equal, model.parameters(), weights))


@pytest.mark.parametrize("average_first", [True, False])
def test_autocast_does_not_mix_the_average_with_the_weights(average_first: bool) -> None:
    """Within one block autocast keeps the bf16 copies of the weights that it has met."""
    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.constant_(model.weight, 2.0)
    average = WeightAverage(model.named_parameters())
    nn.init.constant_(model.weight, 8.0)
    with torch.autocast("cpu", torch.bfloat16):
        before = None if average_first else model(x)
        with average.applied(model), torch.no_grad():
            assert model(x).item() == 2.0
        theta = model(x) if before is None else before
    assert theta.item() == 8.0
    theta.sum().backward()
    assert model.weight.grad is not None and model.weight.grad.item() == 1.0


def test_frozen_weights_are_left_out_and_saved_ones_checked() -> None:
    model = network()
    model[0].requires_grad_(False)
    average = WeightAverage(model.named_parameters())
    assert list(average.parameters) == ["3.weight", "3.bias"]
    with torch.no_grad():
        model[3].bias += 1.0
    average.after_gradient_step()
    again = WeightAverage(model.named_parameters())
    again.load_state_dict(average.state_dict())
    assert again.terms == 2
    assert all(map(torch.equal, again.average, average.average))
    with pytest.raises(ConfigError, match=r"different parameters: 0.bias, 0.weight"):
        again.load_state_dict(WeightAverage(network().named_parameters()).state_dict())
    saved = average.state_dict()
    with pytest.raises(ConfigError, match=r"average of 3.bias has shape \(1,\), but needs \(2,\)"):
        again.load_state_dict({**saved, "average": {**saved["average"], "3.bias": torch.zeros(1)}})


def test_refusals() -> None:
    for age in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=f"center_of_mass is {age}"):
            WeightAverage(network().named_parameters(), age)
    with pytest.raises(ConfigError, match="nothing to average"):
        WeightAverage(network().requires_grad_(False).named_parameters())
