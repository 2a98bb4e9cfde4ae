"""The networks as TorchScript and as exported programs, in fp32; an IMPALA policy in bf16 cannot be traced."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from anybatch.config.schema import ModelConfig
from anybatch.models.agent import Policy, build_agent
from anybatch.observations import Observation, map_observation

IMAGE = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
VECTOR = gym.spaces.Box(-1, 1, (3,))
POLICIES = {
    "impala": (IMAGE, gym.spaces.Discrete(15)),
    "mlp": (VECTOR, gym.spaces.Box(-1, 1, (2,))),
    "dictionary": (gym.spaces.Dict({"camera": IMAGE, "joints": VECTOR}), gym.spaces.MultiBinary(3)),
}


def policy_of(name: str) -> Policy:
    return build_agent(ModelConfig(), *POLICIES[name], precision="fp32").policy


def samples(name: str, count: int) -> Observation:
    space = POLICIES[name][0]
    space.seed(count)
    if isinstance(space, gym.spaces.Dict):
        drawn = [space.sample() for _ in range(count)]
        return {key: torch.from_numpy(np.stack([one[key] for one in drawn])) for key in space}
    return torch.from_numpy(np.stack([space.sample() for _ in range(count)]))


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_torchscript(name: str, tmp_path: Path) -> None:
    policy = policy_of(name)
    torch.jit.trace(policy, (samples(name, 2),), strict=False).save(tmp_path / "policy.pt")
    others = samples(name, 5)
    torch.testing.assert_close(torch.jit.load(tmp_path / "policy.pt")(others), policy(others))


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_exported_program(name: str, tmp_path: Path) -> None:
    policy, example = policy_of(name), samples(name, 2)
    shapes = map_observation(lambda _: {0: torch.export.Dim("batch")}, example)
    torch.export.save(torch.export.export(policy, (example,), dynamic_shapes=(shapes,)), tmp_path / "policy.pt2")
    others = samples(name, 5)
    loaded = torch.export.load(tmp_path / "policy.pt2").module()
    torch.testing.assert_close(loaded(others), policy(others))
