"""Policy optimisation that behaves the same at any batch size: PPO, PPO-EWMA, PPG and PPG-EWMA.

>>> import anybatch
>>> result = anybatch.train(anybatch.ppo_ewma("gym:CartPole-v1", num_envs=8), out="runs/cartpole")

Names are loaded when they are first used, so that importing the package is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from anybatch._version import __version__

if TYPE_CHECKING:
    from anybatch.config import TrainConfig
    from anybatch.evaluation import evaluate, load_policy
    from anybatch.presets import ppg, ppg_ewma, ppo, ppo_ewma
    from anybatch.proximal import EwmaProximal
    from anybatch.training import resume, train

_HOME = {
    "EwmaProximal": "proximal",
    "TrainConfig": "config",
    "evaluate": "evaluation",
    "load_policy": "evaluation",
    "ppg": "presets",
    "ppg_ewma": "presets",
    "ppo": "presets",
    "ppo_ewma": "presets",
    "resume": "training",
    "train": "training",
}

__all__ = [
    "EwmaProximal",
    "TrainConfig",
    "__version__",
    "evaluate",
    "load_policy",
    "ppg",
    "ppg_ewma",
    "ppo",
    "ppo_ewma",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'anybatch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"anybatch.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
