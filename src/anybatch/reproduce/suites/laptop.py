"""The laptop suite: environments of EnvPool, small networks, all figures within a quarter of an hour.

Hyperparameters were chosen on seeds 901 to 983, which no reported number uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anybatch.config.schema import TrainConfig
from anybatch.presets import PAPER
from anybatch.reproduce.suites.suite import Suite, cut, shortened
from anybatch.scaling import scale

_TASKS: dict[str, tuple[str, str, tuple[float, float]]] = {
    "catch": ("Catch", "Catch-v0", (-0.6, 1.0)),
    "tall-catch": ("tall Catch", "Catch-v0", (-0.6, 1.0)),
    "catch-ppg": ("Catch (PPG)", "Catch-v0", (-0.6, 1.0)),
    "acrobot": ("Acrobot", "Acrobot-v1", (-500.0, -80.0)),
}
"""Label and environment, approximate return of a random policy and highest possible return."""

_SHARED: dict[str, Any] = {
    "num_envs": 64,
    "workers": 1,
    "rollout.steps": 32,
    "optimizer.minibatches": 8,
    "optimizer.policy_epochs": 1,
    "optimizer.value_epochs": 1,
    "model.encoder": "mlp",
    "model.options": {"width": 32, "depth": 2},
    "model.architecture": "dual",
    "advantage.discount": 0.99,
    "objective": "kl",
    "device": "cpu",
    "env.threads": 1,
    "log.tensorboard": False,
    "log.noise_scale": False,
}

_PHASES: dict[str, Any] = {"aux.policy_iterations": 4, "aux.minibatches": 16, "aux.epochs": 3, "aux.step_size": 1e-2}

INVARIANCE: dict[str, dict[str, Any]] = {
    "catch": {"step_size": 4e-2, "total_env_steps": 40_000},
    "tall-catch": {"step_size": 5e-2, "total_env_steps": 50_000, "env.options": {"height": 16}},
    "catch-ppg": {"step_size": 4e-2, "total_env_steps": 40_000, **_PHASES},
}
"""Changes for the batch ladder; PPO-EWMA, or PPG-EWMA where a phase is given."""

_STALE: dict[str, Any] = {
    "num_envs": 16,
    "objective": "clip",
    "policy_epochs": 3,
    "value_epochs": 3,
    "proximal": "recent",
    "total_env_steps": 120_000,
}

STALENESS: dict[str, dict[str, Any]] = {
    "catch": {**_STALE, "step_size": 1e-3, "clip": 0.1},
    "acrobot": {**_STALE, "step_size": 1e-3, "clip": 0.2},
}


def laptop() -> Suite:
    """Every figure on small tasks; 16 or 20 seeds for figures with tests."""
    return Suite(
        name="laptop",
        about="EnvPool's Catch, as it is and 16 rows tall, and Acrobot; networks of two layers of 32",
        labels={task: label for task, (label, _, _) in _TASKS.items()},
        ranges={task: limits for task, (_, _, limits) in _TASKS.items()},
        invariance={task: _config(task, changes) for task, changes in INVARIANCE.items()},
        staleness={task: _config(task, changes, preset="ppo") for task, changes in STALENESS.items()},
        algorithms={name: _algorithm(name) for name in PAPER},
        betas=("catch",),
        grid="catch",
        scaling_up={task: scale(_config(task, INVARIANCE[task]), 8)[0] for task in ("catch", "tall-catch")},
        divisors=(1, 4, 16, 64),
        delays=(0, 1, 4, 16),
        grid_factors=(1, 4, 16, 64),
        multiples=(1, 2, 4, 8, 16),
        seeds={"default": 16, "invariance": 20, "linear-step": 20, "ewma-grid": 4, "scaling-up": 8},
        # hyperparameters of these were revised after a first round on multiples of 1000
        first_seeds={"default": 1000, **dict.fromkeys(("invariance", "linear-step", "advantage-std"), 1009)},
        points=40,
        final_points=4,
        stacked=True,
        duration="11 minutes, see results/laptop",
    )


def laptop_smoke() -> Suite:
    """A few iterations of everything in under a minute, to check that it runs."""
    suite = cut(laptop(), ("catch", "catch-ppg", "acrobot"), seeds=2, steps=2048)
    algorithms = {name: {"catch": configs["catch"]} for name, configs in suite.algorithms.items()}
    return shortened(replace(suite, algorithms=algorithms))


def _config(task: str, changes: Mapping[str, Any], preset: str = "") -> TrainConfig:
    preset = preset or ("ppg-ewma" if "aux.policy_iterations" in changes else "ppo-ewma")
    return PAPER[preset](f"envpool:{_TASKS[task][1]}", **{**_SHARED, **changes})


def _algorithm(name: str) -> dict[str, TrainConfig]:
    """An algorithm on both tasks, with the step size of the batch ladder, and the phases of the PPG task."""
    phases = _PHASES if name.startswith("ppg") else {}
    return {task: _config(task, {**INVARIANCE[task], **phases}, preset=name) for task in ("catch", "tall-catch")}
