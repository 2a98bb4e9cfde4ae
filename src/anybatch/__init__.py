"""Policy optimisation that behaves the same at any batch size: PPO, PPO-EWMA, PPG and PPG-EWMA.

>>> import anybatch
>>> config = anybatch.ppo_ewma("gym:CartPole-v1", num_envs=8, total_env_steps=50_000)
>>> result = anybatch.train(config, out="runs/cartpole")

Names are loaded when they are first used, so that importing the package is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anybatch._lazy import lazy_attributes
from anybatch._version import __version__

if TYPE_CHECKING:
    from anybatch.advantages import gae
    from anybatch.config import TrainConfig
    from anybatch.objectives import decoupled_clip_loss, decoupled_kl_loss
    from anybatch.presets import ppg, ppg_ewma, ppo, ppo_ewma
    from anybatch.proximal import EwmaProximal
    from anybatch.runs import evaluate, load_policy
    from anybatch.scaling import rescale
    from anybatch.training import resume, train

__all__ = [
    "EwmaProximal",
    "TrainConfig",
    "__version__",
    "decoupled_clip_loss",
    "decoupled_kl_loss",
    "evaluate",
    "gae",
    "load_policy",
    "ppg",
    "ppg_ewma",
    "ppo",
    "ppo_ewma",
    "rescale",
    "resume",
    "train",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "EwmaProximal": "proximal",
        "TrainConfig": "config",
        "decoupled_clip_loss": "objectives",
        "decoupled_kl_loss": "objectives",
        "evaluate": "runs",
        "gae": "advantages",
        "load_policy": "runs",
        "ppg": "presets",
        "ppg_ewma": "presets",
        "ppo": "presets",
        "ppo_ewma": "presets",
        "rescale": "scaling",
        "resume": "training",
        "train": "training",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
