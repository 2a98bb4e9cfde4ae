"""Division of trajectories into pieces of equal length, for iterations with fewer trajectories than minibatches."""

from __future__ import annotations

import math

from anybatch.errors import ConfigError


def time_chunks(num_envs: int, steps: int, minibatches: int) -> int:
    """Smallest number of pieces per trajectory that gives every minibatch equally many pieces.

    It is 1 (whole trajectories) if ``minibatches`` divides ``num_envs``, and 8 pieces of 32 steps for 1 environment,
    256 steps and 8 minibatches.

    Raises:
        ConfigError: the pieces would not have equal length.
    """
    chunks = _fewest_chunks(num_envs, minibatches)
    if steps % chunks:
        raise ConfigError(
            f"optimizer.minibatches {minibatches} cannot divide {num_envs} environments of {steps} steps evenly: each "
            f"trajectory would be cut into {chunks} pieces, which does not divide rollout.steps; choose minibatches "
            f"that divide env.num_envs, or rollout.steps that is a multiple of {chunks}"
        )
    return chunks


def auxiliary_time_chunks(policy_iterations: int, num_envs: int, steps: int, minibatches: int) -> int:
    """:func:`time_chunks` for the auxiliary phase, whose data are the trajectories of all N_pi iterations.

    Raises:
        ConfigError: the pieces would not have equal length.
    """
    trajectories = policy_iterations * num_envs
    chunks = _fewest_chunks(trajectories, minibatches)
    if steps % chunks:
        raise ConfigError(
            f"aux.minibatches {minibatches} cannot divide a phase's {trajectories} trajectories of {steps} steps "
            f"evenly: each would be cut into {chunks} pieces, which does not divide rollout.steps; choose "
            f"aux.minibatches that divide {trajectories} (aux.policy_iterations times the environments), or "
            f"rollout.steps that is a multiple of {chunks}"
        )
    return chunks


def _fewest_chunks(trajectories: int, minibatches: int) -> int:
    return minibatches // math.gcd(trajectories, minibatches)
