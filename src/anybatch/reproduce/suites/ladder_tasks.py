"""The ladder suite: the claim of batch size-invariance on thirteen tasks from six families, by evaluations without lag.

An iteration of the default batch is 0.25% of a run (0.5% on MiniGrid), since advantages and value targets are computed
once an iteration and learning takes several. Step sizes follow a rule: half of the smallest step size whose area under
the curve at the default batch is within 0.05 of the best, on the seeds 901 to 904, which no reported number uses; see
``benchmarks/ladder_step_sizes.py`` and ``results/ladder-step-sizes``. CartPole and FrozenLake with PPG take those of
PPO-EWMA.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from anybatch.config.schema import TrainConfig
from anybatch.presets import PAPER
from anybatch.reproduce.evaluations import Evaluations
from anybatch.reproduce.suites.suite import Suite, cut, shortened

ENV_STEPS = 409_600
"""Environment steps of a run, except those of MiniGrid."""

_SHARED: dict[str, Any] = {
    "total_env_steps": ENV_STEPS,
    "num_envs": 64,
    "workers": 1,
    "rollout.steps": 16,
    "optimizer.minibatches": 4,
    "optimizer.shuffle": "samples",  # samples of one trajectory are alike, and would be a larger part of small batches
    "optimizer.policy_epochs": 1,
    "optimizer.value_epochs": 1,
    "model.encoder": "mlp",
    "model.options": {"width": 32, "depth": 2},
    "model.architecture": "dual",
    "advantage.discount": 0.99,
    "advantage.gae_lambda": 0.9,  # looks 9 steps ahead, within a rollout of 16
    "objective": "kl",
    "device": "cpu",
    "env.threads": 1,
    "log.tensorboard": False,
    "log.noise_scale": False,
}

_PHASES: dict[str, Any] = {"aux.policy_iterations": 4, "aux.minibatches": 4, "aux.epochs": 2}
_CONTINUOUS: dict[str, Any] = {"observation.normalize": True, "entropy_coefficient": 0.0}
_SHORT: dict[str, Any] = {"env.options": {"max_episode_steps": 200}}
_MINIGRID: dict[str, Any] = {
    "total_env_steps": 204_800,  # a run with the convolution of one-hot channels is ten times as slow
    "model.encoder": "small-conv",
    "model.options": {"channels": 8, "width": 32, "depth": 1, "categories": 11},
}


@dataclass(frozen=True)
class Task:
    """A task of the suite."""

    label: str
    family: str
    env: str
    low: float
    """Approximate return of a random policy, which counts as 0."""
    high: float
    """Return that counts as 1: the highest possible one, or that of good policies where there is no such limit."""
    step_size: float
    changes: dict[str, Any] = field(default_factory=dict)


TASKS: dict[str, Task] = {
    "cartpole": Task("CartPole", "classic control", "CartPole-v1", 20, 200, 0.002, _SHORT),
    "acrobot": Task("Acrobot", "classic control", "Acrobot-v1", -500, -80, 0.0005),
    "pendulum": Task("Pendulum", "classic control", "Pendulum-v1", -1250, -150, 0.002, _CONTINUOUS),
    "lunar-lander": Task(
        "LunarLander",
        "Box2D",
        "LunarLander-v3",
        -180,
        250,
        0.0005,
        {"env.options": {"max_episode_steps": 500}},
    ),
    "catch": Task("Catch", "bsuite", "Catch-v0", -0.6, 1, 0.002),
    "pixel-catch": Task(
        "Catch (pixels)",
        "bsuite",
        "Catch-v0",
        -0.85,
        1,
        0.004,
        {
            "env.options": {"height": 12, "width": 12},
            "model.encoder": "small-conv",
            "model.options": {"channels": 8, "width": 32},
        },
    ),
    "frozen-lake": Task("FrozenLake", "toy text", "FrozenLake-v1", 0.015, 0.74, 0.002),
    "minigrid": Task("MiniGrid Empty", "MiniGrid", "MiniGrid-Empty-Random-6x6-v0", 0.1, 0.97, 0.0005, _MINIGRID),
    "reacher": Task("Reacher", "MuJoCo", "Reacher-v4", -43, -4, 0.004, _CONTINUOUS),
    "inverted-pendulum": Task(
        "InvertedPendulum",
        "MuJoCo",
        "InvertedPendulum-v4",
        6,
        200,
        0.001,
        _CONTINUOUS | _SHORT,
    ),
    "catch-ppg": Task("Catch (PPG)", "bsuite", "Catch-v0", -0.6, 1, 0.002, _PHASES),
    "cartpole-ppg": Task("CartPole (PPG)", "classic control", "CartPole-v1", 20, 200, 0.002, _SHORT | _PHASES),
    "frozen-lake-ppg": Task("FrozenLake (PPG)", "toy text", "FrozenLake-v1", 0.015, 0.74, 0.002, _PHASES),
}


_FULL_ONLY = (
    "pixel-catch",
    "lunar-lander",
    "minigrid",
    "reacher",
    "inverted-pendulum",
    "cartpole-ppg",
    "frozen-lake-ppg",
)


def config_of(task: Task, step_size: float | None = None) -> TrainConfig:
    """PPO-EWMA, or PPG-EWMA where a phase is given, at the default batch."""
    step = step_size or task.step_size
    preset = "ppg-ewma" if "aux.policy_iterations" in task.changes else "ppo-ewma"
    steps = {"step_size": step}
    if preset == "ppg-ewma":
        steps["aux.step_size"] = step
    return PAPER[preset](f"envpool:{task.env}", **{**_SHARED, **task.changes, **steps})


def ladder_quick() -> Suite:
    """Batches down to 4 environments, ablations at the smallest one, on the tasks that are fast to simulate."""
    suite = cut(_suite(), tuple(name for name in TASKS if name not in _FULL_ONLY))
    seeds = {"default": 6, "noise-gap": 1}
    duration = "about 14 minutes, an estimate"
    about = "six tasks of EnvPool from three families, small networks, evaluations without lag"
    return replace(suite, about=about, divisors=(1, 4, 16), ablation_divisors=(16,), seeds=seeds, duration=duration)


def ladder_full() -> Suite:
    """All batches down to 1 environment, ablations at the smallest one, on all tasks."""
    seeds = {"default": 8, "noise-gap": 2}
    return replace(_suite(), ablation_divisors=(64,), seeds=seeds, duration="about 2 hours, an estimate")


def ladder_smoke() -> Suite:
    """A few iterations of everything, to check that it runs."""
    return shortened(cut(ladder_quick(), ("cartpole", "pendulum", "catch-ppg"), seeds=2, steps=4096))


def _suite() -> Suite:
    return Suite(
        name="ladder",
        about="thirteen tasks of EnvPool from six families, small networks, evaluations without lag",
        labels={name: task.label for name, task in TASKS.items()},
        ranges={name: (task.low, task.high) for name, task in TASKS.items()},
        invariance={name: config_of(task) for name, task in TASKS.items()},
        divisors=(1, 4, 16, 64),
        seeds={},
        points=20,
        final_points=4,
        stacked=True,
        evaluations=Evaluations(points=20, episodes=4),
        first_seeds={"default": 2003},
    )
