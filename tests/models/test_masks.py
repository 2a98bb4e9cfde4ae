"""Masked policies: exactly the distributions over the legal choices, in every quantity that training uses."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from anybatch.config.masks import ActionMask
from anybatch.config.schema import ModelConfig
from anybatch.errors import EnvError
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import Agent, build_agent
from anybatch.models.distributions import Categorical
from anybatch.models.masks import ILLEGAL, Masking
from anybatch.sampling.numpy_policy import NumpyPolicy

VECTOR = gym.spaces.Box(-1, 1, (3,))
ACTIONS: dict[str, tuple[gym.spaces.Space[Any], tuple[int, ...]]] = {
    "discrete": (gym.spaces.Discrete(5), (5,)),
    "multi-discrete": (gym.spaces.MultiDiscrete([2, 3, 4]), (2, 3, 4)),
}


def masks(sizes: tuple[int, ...], count: int) -> Tensor:
    """Random masks with at least one legal choice a part; the first row has exactly one."""
    parts = []
    for size in sizes:
        part = torch.rand(count, size) < 0.5
        part[torch.arange(count), torch.randint(size, (count,))] = True
        part[0] = torch.arange(size) == size - 1
        parts.append(part)
    return torch.cat(parts, -1).to(torch.int8)


def agent(kind: str, space: gym.spaces.Space[Any] = VECTOR, **changes: Any) -> Agent:
    action_space, sizes = ACTIONS[kind]
    observation_space = gym.spaces.Dict({"observation": space, "action_mask": ActionMask(sizes)})
    built = build_agent(ModelConfig(policy_gain=3.0, **changes), observation_space, action_space, auxiliary_head=True)
    with torch.no_grad():
        built.policy.head.bias.normal_()  # type: ignore[union-attr, operator]
    return built


def observations(kind: str, count: int) -> dict[str, Tensor]:
    return {"observation": torch.rand(count, 3), "action_mask": masks(ACTIONS[kind][1], count)}


def legal_part(params: Tensor, mask: Tensor, sizes: tuple[int, ...]) -> list[Categorical]:
    """The distributions of one sample over its legal choices alone."""
    pairs = zip(params.split(list(sizes), -1), mask.split(list(sizes), -1), strict=True)
    return [Categorical(part[legal.bool()].double()) for part, legal in pairs]


@pytest.mark.parametrize("kind", ACTIONS)
def test_all_quantities_are_those_of_the_legal_choices_alone(kind: str) -> None:
    space, sizes = ACTIONS[kind]
    spec, mask = ActionSpec(space), masks(sizes, 40)
    raw, other = torch.randn(2, 40, sum(sizes)) * 3
    ours, theirs = (spec.distribution(x.masked_fill(mask == 0, ILLEGAL)) for x in (raw, other))
    actions = ours.sample()
    for row in range(40):
        p, q = (legal_part(x[row], mask[row], sizes) for x in (raw, other))
        choices = actions[row].reshape(-1).tolist()
        ends = np.cumsum((0, *sizes))
        places = [int(mask[row, ends[i] : ends[i] + c].sum()) for i, c in enumerate(choices)]  # among the legal ones
        expected = {
            "log_prob": sum(float(part.log_prob(torch.tensor(place))) for part, place in zip(p, places, strict=True)),
            "entropy": sum(float(part.entropy()) for part in p),
            "kl": sum(float(a.kl(b)) for a, b in zip(p, q, strict=True)),
        }
        got = {"log_prob": ours.log_prob(actions)[row], "entropy": ours.entropy()[row], "kl": ours.kl(theirs)[row]}
        for name, value in expected.items():
            assert float(got[name]) == pytest.approx(value, abs=2e-5), (name, row)
    # a single legal choice: certain, without entropy, and the same under every policy
    assert float(ours.log_prob(actions)[0]) == float(ours.entropy()[0]) == float(ours.kl(theirs)[0]) == 0


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_illegal_actions_are_never_chosen_and_move_no_weight(kind: str, architecture: str) -> None:
    live = agent(kind, architecture=architecture)
    observation = observations(kind, 500)
    params, value = live(observation)
    assert value.isfinite().all() and torch.equal(params, live.policy(observation))
    assert torch.equal(params, live.all_heads(observation)[0])
    assert bool(((params == ILLEGAL) == (observation["action_mask"] == 0)).all())
    distribution = live.action_spec.distribution(params)
    ends = torch.tensor(np.cumsum((0, *ACTIONS[kind][1]))[:-1])
    for choices in (distribution.sample(), distribution.mode()):
        places = choices.reshape(500, -1) + ends
        assert bool(observation["action_mask"].gather(1, places).all())
    # the extreme noises as well
    for level in (0.0, 1 - 2.0**-20):
        noise = torch.full((500, len(ends)), level)
        assert bool(observation["action_mask"].gather(1, distribution.transform(noise).reshape(500, -1) + ends).all())
    loss = distribution.log_prob(distribution.sample()).sum() + distribution.entropy().sum()
    loss = loss + distribution.kl(live.action_spec.distribution(params.detach() + torch.randn_like(params))).sum()
    loss.backward()
    bias = live.policy.head.bias.grad  # type: ignore[union-attr]
    assert bool(torch.isfinite(bias).all())
    only_last = {**observation, "action_mask": torch.zeros_like(observation["action_mask"])}
    only_last["action_mask"][:, [int(e) for e in np.cumsum(ACTIONS[kind][1]) - 1]] = 1
    live.zero_grad()
    forced = live.action_spec.distribution(live.policy(only_last))
    (forced.log_prob(forced.sample()).sum() + forced.entropy().sum()).backward()
    assert float(live.policy.head.bias.grad.abs().max()) == 0  # type: ignore[union-attr]


def test_the_networks_do_not_see_the_mask() -> None:
    live = agent("discrete")
    observation = observations("discrete", 10)
    everything = {**observation, "action_mask": torch.ones_like(observation["action_mask"])}
    assert torch.equal(live.value(observation), live.value(everything))
    legal = observation["action_mask"] == 1
    assert torch.equal(live.policy(observation)[legal], live.policy(everything)[legal])
    # beside an entry "observation" the encoder is that of the observation alone
    plain = build_agent(ModelConfig(policy_gain=3.0), VECTOR, gym.spaces.Discrete(5), auxiliary_head=True)
    assert plain.state_dict().keys() == live.state_dict().keys()
    several = gym.spaces.Dict({"a": VECTOR, "b": VECTOR, "mask": ActionMask((5,))})
    masking = Masking.of(several)
    assert masking is not None and masking.encoder_space(several) == gym.spaces.Dict({"a": VECTOR, "b": VECTOR})
    with pytest.raises(EnvError, match="contains only the mask 'mask'"):
        Masking.of(gym.spaces.Dict({"mask": ActionMask((5,))}))


@pytest.mark.parametrize("kind", ACTIONS)
def test_numpy_acts_with_the_same_mask(kind: str) -> None:
    live = agent(kind)
    policy = NumpyPolicy.of(live.policy, 50)
    assert policy is not None
    observation = observations(kind, 50)
    noise = live.action_spec.noise((50,))
    params, action = policy({key: x.numpy() for key, x in observation.items()}, noise.numpy())
    expected = live.policy(observation).detach()
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(action, live.action_spec.distribution(expected).transform(noise))


@torch.no_grad()
def test_masked_policies_are_exported() -> None:
    live = agent("discrete").policy
    observation = observations("discrete", 4)
    exported = torch.export.export(live, (observation,)).module()
    assert torch.equal(exported(observation), live(observation))
