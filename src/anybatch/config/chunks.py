"""Pieces that trajectories are cut into where there are fewer of them than minibatches."""

from __future__ import annotations

import math

from anybatch.errors import ConfigError


def time_chunks(num_envs: int, steps: int, minibatches: int) -> int:
    """Pieces that each trajectory is cut into: the fewest that can be dealt out evenly.

    1 (whole trajectories) where ``minibatches`` divides ``num_envs``; 8 pieces of 32 steps for 1 environment, 256
    steps and 8 minibatches.

    Raises:
        ConfigError: the pieces would not have equal length.
    """
    chunks = _fewest_chunks(num_envs, minibatches)
    if steps % chunks:
        raise ConfigError(
            f"optimizer.minibatches {minibatches} cannot share out {num_envs} environments of {steps} steps evenly: "
            f"each trajectory would be cut into {chunks} pieces, which does not divide rollout.steps; choose "
            f"minibatches that divide env.num_envs, or rollout.steps that is a multiple of {chunks}"
        )
    return chunks


def auxiliary_time_chunks(policy_iterations: int, num_envs: int, steps: int, minibatches: int) -> int:
    """:func:`time_chunks` for the auxiliary phase, which deals out the trajectories of all N_pi iterations.

    Raises:
        ConfigError: the pieces would not have equal length.
    """
    trajectories = policy_iterations * num_envs
    chunks = _fewest_chunks(trajectories, minibatches)
    if steps % chunks:
        raise ConfigError(
            f"aux.minibatches {minibatches} cannot share out a phase's {trajectories} trajectories of {steps} steps "
            f"evenly: each would be cut into {chunks} pieces, which does not divide rollout.steps; choose "
            f"aux.minibatches that divide {trajectories} (aux.policy_iterations times the environments), or "
            f"rollout.steps that is a multiple of {chunks}"
        )
    return chunks


def _fewest_chunks(trajectories: int, minibatches: int) -> int:
    return minibatches // math.gcd(trajectories, minibatches)
