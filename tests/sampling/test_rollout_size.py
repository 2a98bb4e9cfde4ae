"""The memory of a rollout, computed before anything is made."""

from __future__ import annotations

import gymnasium
import pytest
import torch

from anybatch.errors import ConfigError
from anybatch.presets import ppo
from anybatch.sampling import rollout_size
from anybatch.sampling.rollout_size import check_size


@pytest.mark.parametrize(("normalize", "need"), [(False, 1024), (True, 1536)])
def test_hand_worked(normalize: bool, need: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 environments of 8 steps: 16 samples of 16 + 48 bytes, and 8 bytes for each of 4 features if normalised."""
    config = ppo("gym:CartPole-v1", num_envs=2, rollout_steps=8, minibatches=1, **{"observation.normalize": normalize})
    space = gymnasium.spaces.Box(-1, 1, (4,))
    monkeypatch.setattr(rollout_size, "free_memory", lambda: need)
    check_size(config, 2, torch.device("cpu"), space)
    monkeypatch.setattr(rollout_size, "free_memory", lambda: need - 1)
    with pytest.raises(ConfigError, match=r"env.num_envs 2 and rollout.steps 8 need 0.0 GB for rollouts"):
        check_size(config, 2, torch.device("cpu"), space)
