"""Division of trajectories into pieces of equal length, for iterations with fewer trajectories than minibatches."""

from __future__ import annotations

import math
from typing import Literal

from anybatch.errors import ConfigError

_ENOUGH_MINIBATCHES = 4


def time_chunks(
    num_envs: int, steps: int, minibatches: int, shuffle: Literal["trajectories", "samples"] = "trajectories"
) -> int:
    """Smallest number of pieces per trajectory that gives every minibatch equally many pieces.

    It is 1 (whole trajectories) if ``minibatches`` divides ``num_envs``, and 8 pieces of 32 steps for 1 environment,
    256 steps and 8 minibatches. Samples that are shuffled one by one are pieces of 1 step.

    Raises:
        ConfigError: the pieces would not have equal length.
    """
    if shuffle == "samples":
        if num_envs * steps % minibatches:
            raise ConfigError(
                f"optimizer.minibatches is {minibatches}, but must divide the {num_envs * steps} samples of "
                f"{num_envs} environments and {steps} steps"
            )
        return steps
    what = f"optimizer.minibatches {minibatches} cannot divide {num_envs} environments"
    return _fewest(num_envs, steps, minibatches, what, "optimizer.minibatches that divide env.num_envs")


def shared_trajectories(
    num_envs: int, minibatches: int, shuffle: Literal["trajectories", "samples"] = "trajectories"
) -> bool:
    """Whether trajectories correlate the gradients of an iteration's minibatches, or too many of successive iterations.

    Minibatches that do not divide the environments, or are of single samples, hold pieces of the same trajectories.
    Those that do are independent within an iteration, but a trajectory continues in one of the next iteration's: a
    pair of minibatches has 1/M of its trajectories in common. With M of at least 4 that counts as signal at most 1/7 of
    a gradient in a window of two iterations, less than the 1/5 that :mod:`anybatch.diagnostics.doctor` warns of.
    """
    pieces = num_envs % minibatches != 0 or (shuffle == "samples" and minibatches > 1)
    return pieces or minibatches < _ENOUGH_MINIBATCHES


def auxiliary_time_chunks(policy_iterations: int, num_envs: int, steps: int, minibatches: int) -> int:
    """:func:`time_chunks` for the auxiliary phase, whose data are the trajectories of all N_pi iterations."""
    trajectories = policy_iterations * num_envs
    what = f"aux.minibatches {minibatches} cannot divide a phase's {trajectories} trajectories"
    choice = f"aux.minibatches that divide {trajectories} (aux.policy_iterations times the environments)"
    return _fewest(trajectories, steps, minibatches, what, choice)


def _fewest(trajectories: int, steps: int, minibatches: int, what: str, choice: str) -> int:
    chunks = minibatches // math.gcd(trajectories, minibatches)
    if steps % chunks:
        raise ConfigError(
            f"{what} of {steps} steps evenly: each trajectory would be cut into {chunks} pieces, which is not a "
            f"divisor of rollout.steps; choose {choice}, or rollout.steps that is a multiple of {chunks}"
        )
    return chunks
