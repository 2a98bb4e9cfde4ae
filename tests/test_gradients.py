"""The gradients of a minibatch, operation by operation and by compiled programs."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
import torch._inductor.cpp_builder
from gymnasium import spaces
from torch import Tensor, nn

from anybatch.config.schema import ModelConfig
from anybatch.errors import ConfigError
from anybatch.gradients import TESTED, CompiledGradients, Losses, add_gradients, check_compiler
from anybatch.minibatches import Minibatch
from anybatch.models.agent import build_agent
from anybatch.optimizers import gradients_of

ROOT = Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)


def minibatch(observation: Tensor) -> Minibatch:
    number = torch.arange(len(observation)).float()
    return Minibatch(observation, number, number, number, number, value_target=number)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a processor with bf16")
def test_programs_of_convolutions_in_bf16() -> None:
    """On a CPU, where the library would run on oneDNN's own tensors, which Inductor does not know.

    Gradients have the layout of their parameters, which the fused optimisers rely on, and add up over parts.
    """
    images, options = spaces.Box(0, 255, (8, 8, 3), np.uint8), {"channels": 4}
    agent = build_agent(ModelConfig(options=options), images, spaces.Discrete(3), precision="bf16")
    observation = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    parameters = list(agent.parameters())

    def losses_of(part: Minibatch) -> Losses:
        params, value = agent(part.inputs)
        loss = params.square().mean() + (value - part.value_target).square().mean()
        return loss, {"loss": loss.detach()}, [params.detach(), part.action]

    def run(add: Callable[[Minibatch, float, float | None], Any], max_norm: float | None) -> tuple[Any, list[Tensor]]:
        for x in parameters:
            x.grad = None
        outcome = add(minibatch(observation), 0.5, max_norm)
        outcome = add(minibatch(observation), 0.5, None) if max_norm is None else outcome
        return outcome, gradients_of(parameters)

    compiled = CompiledGradients(losses_of, [agent], parameters, {})
    for max_norm in (None, 0.1):
        expected, gradients = run(partial(add_gradients, losses_of, parameters), max_norm)
        outcome, ours = run(compiled, max_norm)
        assert outcome.terms.keys() == {"loss"}
        for x, y in zip([outcome.terms["loss"], *outcome.kept], [expected.terms["loss"], *expected.kept], strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
        for parameter, x, y in zip(parameters, ours, gradients, strict=True):
            assert x.stride() == parameter.stride()
            # bf16 has 8 bits, and sums over 64 pixels and 4 samples are rounded in another order
            torch.testing.assert_close(x, y, rtol=0.05, atol=0.02 * float(y.abs().max()))


def test_a_network_that_cannot_be_recorded_is_refused() -> None:
    layer = nn.Linear(2, 1)

    def losses_of(part: Minibatch) -> Losses:
        loss = layer(part.observation).mean()
        return (loss if float(loss) > 0 else -loss), {}, []

    compiled = CompiledGradients(losses_of, [layer], list(layer.parameters()), {})
    with pytest.raises(ConfigError, match=r"a gradient step of this network cannot be compiled \("):
        compiled(minibatch(torch.ones(3, 2)), 1.0)
    assert not torch.compiler.is_compiling()


def test_a_missing_compiler_is_named() -> None:
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(ConfigError, match=r"compile is true, but no C\+\+ compiler was found: install g\+\+"):
        check_compiler(torch.device("cpu"))


def test_another_version_of_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and pinned[1].startswith(f"{TESTED}.")
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: "g++")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_compiler(torch.device("cpu"))
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.warns(
        UserWarning, match=r"compile is true, which was tested only with PyTorch .*, but this is 2\.9\.1"
    ):
        check_compiler(torch.device("cpu"))
    monkeypatch.delattr(torch.compiler, "_is_compiling_flag")
    with (
        pytest.warns(UserWarning, match="tested"),
        pytest.raises(
            ConfigError, match=r"PyTorch 2\.9\.1 lacks a feature that it needs \(.*_is_compiling_flag.*\): install"
        ),
    ):
        check_compiler(torch.device("cpu"))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are recorded but not compiled, which takes seconds."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options=None: graph)


@pytest.mark.usefixtures("recorded")
def test_frozen_weights_have_no_gradient_in_a_program() -> None:
    # input 1, weights 2 (frozen) and 3: the gradients are those of 3 and 2, of which the frozen one has none, and the
    # norm of the other alone is clipped to 1
    network = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(2)])
    with torch.no_grad():
        network[0].weight.fill_(2.0)
        network[1].weight.fill_(3.0)
    network[0].requires_grad_(False)
    parameters = list(network.parameters())

    def losses(part: Minibatch) -> Losses:
        return network(torch.ones(1, 1)).sum(), {}, []

    for max_norm, expected in ((None, 2.0), (1.0, 1.0)):
        for gradients in (
            partial(add_gradients, losses, parameters),
            CompiledGradients(losses, [network], parameters, {}),
        ):
            for parameter in parameters:
                parameter.grad = None
            gradients(minibatch(torch.zeros(1)), 1.0, max_norm)
            assert parameters[0].grad is None
            assert parameters[1].grad is not None and parameters[1].grad.item() == pytest.approx(expected)


@pytest.mark.usefixtures("recorded")
def test_a_module_with_two_names_stays_as_it_is() -> None:
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
            self.first = self.layers[0]

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers(x)
            return result

    network = Alias()
    parameters = list(network.parameters())
    before = [id(x) for x in network.first.parameters()]

    def losses(part: Minibatch) -> Losses:
        return network(part.observation).sum(), {}, []

    both = []
    for gradients in (partial(add_gradients, losses, parameters), CompiledGradients(losses, [network], parameters, {})):
        for parameter in parameters:
            parameter.grad = None
        gradients(minibatch(torch.ones(4, 2)), 1.0, None)
        both.append([x.grad for x in parameters])
    torch.testing.assert_close(*both)
    assert [id(x) for x in network.first.parameters()] == before
    assert [id(x) for x in network.layers[0].parameters()] == before
