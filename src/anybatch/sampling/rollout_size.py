"""Memory of a rollout, so that one that cannot fit is refused before anything is made."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import torch

from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.models.normalizer import vectors_of
from anybatch.sampling.replay import kept_iterations
from anybatch.system.memory import free_memory

_RAW_BYTES = 8  # of a feature that is normalised: as it was, and its deviation from the mean
_BYTES_BESIDE_OBSERVATION = 48  # action, rewards, values, log-probabilities, advantages and flags of a sample


def check_size(
    config: TrainConfig, num_envs: int, device: torch.device, space: gymnasium.Space[Any] | None = None
) -> None:
    """Refuse a rollout that is larger than the memory.

    Args:
        config: the configuration.
        num_envs: environments of this worker.
        device: where rollouts are kept.
        space: of a single observation; None counts only what any environment needs.

    Raises:
        ConfigError: it does not fit; with the bytes that it needs.
    """
    observation = 0 if space is None else _bytes(space)
    rollouts = 1 + config.rollout.source.lag + kept_iterations(config.optimizer)
    normalized = vectors_of(space) if space is not None and config.observation.normalize else {}
    raw = _RAW_BYTES * sum(math.prod(shape) for shape, _ in normalized.values())
    need = num_envs * config.rollout.steps * ((observation + _BYTES_BESIDE_OBSERVATION) * rollouts + raw)
    on_gpu = device.type == "cuda"
    limit = torch.cuda.get_device_properties(device).total_memory if on_gpu else free_memory()
    if need > limit:
        raise ConfigError(
            f"env.num_envs {num_envs:,} and rollout.steps {config.rollout.steps:,} need {need / 1e9:,.1f} GB for "
            f"rollouts, but {'the GPU has' if on_gpu else 'there are'} only {limit / 1e9:,.1f} GB: choose smaller "
            "values"
        )


def _bytes(space: gymnasium.Space[Any]) -> int:
    """Bytes of an observation."""
    if isinstance(space, gymnasium.spaces.Dict):
        return sum(_bytes(leaf) for leaf in space.values())
    return math.prod(space.shape or ()) * (space.dtype.itemsize if space.dtype is not None else 1)
