"""Recurrent encoders: PyTorch's own layers on whole sequences, resets, pieces, and the states of two networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym
import pytest
import torch
from torch import Tensor, nn

from anybatch.config.masks import ActionMask
from anybatch.config.schema import ModelConfig
from anybatch.models.agent import Agent, build_agent
from anybatch.models.masks import ILLEGAL
from anybatch.models.recurrent import RecurrentEncoder
from anybatch.observations import Sequences
from anybatch.sampling.numpy_policy import NumpyPolicy

KINDS = ("gru", "lstm")
K, L, F, H = 3, 7, 4, 5


class Identity(nn.Module):
    out_features = F

    def forward(self, x: Tensor) -> Tensor:
        return x


def sequences(state_size: int, first: Tensor | None = None) -> Sequences:
    starts = torch.zeros(K * L, dtype=torch.bool) if first is None else first
    return Sequences(torch.randn(K * L, F), starts, torch.randn(K * L, state_size), L)


@pytest.mark.parametrize("kind", KINDS)
def test_unrolling_is_pytorchs_layer(kind: Literal["gru", "lstm"]) -> None:
    encoder = RecurrentEncoder(Identity(), kind, H)
    layer = (nn.GRU if kind == "gru" else nn.LSTM)(F, H, batch_first=True)
    with torch.no_grad():
        for name, parameter in encoder.cell.named_parameters():
            getattr(layer, f"{name}_l0").copy_(parameter)
    inputs = sequences(encoder.state_size)
    start = inputs.state.view(K, L, -1)[:, 0].unsqueeze(0)
    hidden: Any = start if kind == "gru" else (start[..., :H].contiguous(), start[..., H:].contiguous())
    expected, last = layer(inputs.observation.view(K, L, F), hidden)  # type: ignore[union-attr]
    features, state = encoder.unroll(inputs)
    torch.testing.assert_close(features, expected.flatten(0, 1))
    torch.testing.assert_close(state, (last if kind == "gru" else torch.cat(last, -1)).squeeze(0))
    assert torch.equal(encoder(inputs), features)


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_begins_with_a_state_of_zero(kind: Literal["gru", "lstm"]) -> None:
    encoder = RecurrentEncoder(Identity(), kind, H)
    first = torch.zeros(K, L, dtype=torch.bool)
    first[0, 0] = first[1, 3] = True
    inputs = sequences(encoder.state_size, first.flatten())
    features = encoder(inputs).view(K, L, H)
    zeros = replace(inputs, state=torch.zeros_like(inputs.state), first=torch.zeros_like(inputs.first))
    torch.testing.assert_close(features[0], encoder(zeros).view(K, L, H)[0])
    x = inputs.observation.view(K, L, F)  # type: ignore[union-attr]
    rest = Sequences(x[1, 3:], first.new_zeros(L - 3), torch.zeros(L - 3, encoder.state_size), L - 3)
    torch.testing.assert_close(features[1, 3:], encoder(rest))
    # what was before the beginning has no effect, also not on gradients
    x = x.clone().requires_grad_()
    encoder(replace(inputs, observation=x.flatten(0, 1))).view(K, L, H)[1, 3:].sum().backward()
    assert x.grad is not None and float(x.grad[1, :3].abs().max()) == 0 < float(x.grad[1, 3:].abs().min())


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_continue_from_the_stored_state(kind: Literal["gru", "lstm"]) -> None:
    """A trajectory of 6 steps is 3 pieces of 2 whose states were stored; gradients end where a piece begins."""
    encoder = RecurrentEncoder(Identity(), kind, H)
    x, first = torch.randn(6, F, requires_grad=True), torch.tensor([True, False, False, False, True, False])
    states, state = [], torch.zeros(1, encoder.state_size)
    for t in range(6):
        states.append(state)
        _, state = encoder.unroll(Sequences(x[t : t + 1], first[t : t + 1], state, 1))
    stored = torch.cat(states).detach()
    whole = encoder(Sequences(x, first, stored, 6))
    pieces = encoder(Sequences(x, first, stored, 2))
    torch.testing.assert_close(pieces, whole)
    (through,) = torch.autograd.grad(whole[3].sum(), x, retain_graph=True)
    (cut,) = torch.autograd.grad(pieces[3].sum(), x)
    assert float(through[1].abs().max()) > 0 == float(cut[1].abs().max())


def agent(architecture: str, kind: str = "lstm", mask: bool = False) -> Agent:
    box = gym.spaces.Box(-1, 1, (F,))
    space = gym.spaces.Dict({"action_mask": ActionMask((3,)), "observation": box}) if mask else box
    config = ModelConfig(architecture=architecture, recurrent=kind, recurrent_width=H)  # type: ignore[arg-type]
    return build_agent(config, space, gym.spaces.Discrete(3))


@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_acting_step_by_step_is_unrolling(architecture: str) -> None:
    live = agent(architecture)
    assert live.state_size == 2 * H * (2 if architecture == "dual" else 1)
    x, first = torch.randn(K, L, F), torch.rand(K, L) < 0.3
    states, outputs, state = [], [], torch.randn(K, live.state_size)
    for t in range(L):
        states.append(state)
        params, value, state = live.step(Sequences(x[:, t], first[:, t], state, 1))
        outputs.append((params, value))
        torch.testing.assert_close(live.value(Sequences(x[:, t], first[:, t], states[-1], 1)), value)
    inputs = Sequences(x.flatten(0, 1), first.flatten(), torch.stack(states, 1).flatten(0, 1), L)
    params, value = live(inputs)
    torch.testing.assert_close(params.view(K, L, 3), torch.stack([p for p, _ in outputs], 1))
    torch.testing.assert_close(value.view(K, L), torch.stack([v for _, v in outputs], 1))
    torch.testing.assert_close(live.policy(inputs), params)
    torch.testing.assert_close(live.value(inputs), value)
    trained = {id(x) for x in (*live.policy_parameters(), *live.value_parameters())}
    assert trained == {id(x) for x in live.parameters()}
    if architecture == "detach":
        live.zero_grad()
        live.value(inputs).sum().backward()
        assert all(x.grad is None for x in live.policy.encoder.parameters())


def test_masks_apply_to_sequences() -> None:
    live = agent("dual", "gru", mask=True)
    mask = torch.tensor([[1, 0, 1]] * (K * L), dtype=torch.int8)
    observation = {"action_mask": mask, "observation": torch.randn(K * L, F)}
    inputs = Sequences(observation, torch.zeros(K * L, dtype=torch.bool), torch.zeros(K * L, live.state_size), L)
    params, value = live(inputs)
    assert bool((params[:, 1] == ILLEGAL).all()) and bool((params[:, [0, 2]] > -10).all())
    assert value.shape == (K * L,)
    assert torch.equal(live.step(replace(inputs, steps=1))[0][:, 1], params[:, 1])


def test_numpy_leaves_recurrent_policies_to_pytorch() -> None:
    assert NumpyPolicy.of(agent("shared").policy, 1) is None


def test_width_follows_the_encoder() -> None:
    live = build_agent(
        ModelConfig(recurrent="gru", options={"width": 24}), gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    )
    assert live.state_size == 24
