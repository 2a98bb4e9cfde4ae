"""The MuJoCo suite: the batch ladder of ``ppo-ewma-mujoco`` on four tasks, by evaluations without lag.

The step size is that of the preset, chosen on the seeds 900 to 903 (``benchmarks/mujoco_tasks.py``, queue ``tune``).
Runs are a fifth of the usual million steps, so that all batch sizes fit into four hours of one core.
"""

from __future__ import annotations

from anybatch.config.io import override
from anybatch.presets import ppo_ewma_mujoco
from anybatch.reproduce.evaluations import Evaluations
from anybatch.reproduce.suites.suite import Suite, cut, shortened

_TASKS = {
    "half-cheetah": ("HalfCheetah", (-280.0, 1800.0)),
    "hopper": ("Hopper", (20.0, 2800.0)),
    "walker2d": ("Walker2d", (0.0, 3000.0)),
    "inverted-double-pendulum": ("InvertedDoublePendulum", (60.0, 9350.0)),
}
"""Label, and returns that count as 0 and 1: of a random policy, and of ``ppo-mujoco`` after 1M steps or the highest."""


def mujoco() -> Suite:
    """All batches from 64 environments to 1, with all rules and without each; 8 seeds."""
    return Suite(
        name="mujoco",
        about="HalfCheetah, Hopper, Walker2d and InvertedDoublePendulum with ppo-ewma-mujoco, evaluations without lag",
        labels={name: label for name, (label, _) in _TASKS.items()},
        ranges={name: limits for name, (_, limits) in _TASKS.items()},
        invariance={
            name: override(
                ppo_ewma_mujoco(f"envpool:{label}-v4"),
                {"total_env_steps": 204_800, "device": "cpu", "log.noise_scale": False},
            )
            for name, (label, _) in _TASKS.items()
        },
        divisors=(1, 4, 16, 64),
        seeds={"default": 8, "noise-gap": 1},
        points=10,
        final_points=2,
        stacked=True,
        evaluations=Evaluations(points=10, episodes=4),
        first_seeds={"default": 3001},
    )


def mujoco_smoke() -> Suite:
    """A few iterations of one task, to check that it runs."""
    return shortened(cut(mujoco(), ("hopper",), seeds=2, steps=8192))
