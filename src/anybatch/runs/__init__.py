"""A training run: building it, its folder, checkpoints, logs, evaluation and videos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anybatch._lazy import lazy_attributes

if TYPE_CHECKING:
    from anybatch.runs.evaluation import Evaluation, LoadedPolicy, evaluate, initial_policy, load_policy, unseen_levels
    from anybatch.runs.folder import read_config
    from anybatch.runs.progress import read_progress
    from anybatch.runs.video import record

__all__ = [
    "Evaluation",
    "LoadedPolicy",
    "evaluate",
    "initial_policy",
    "load_policy",
    "read_config",
    "read_progress",
    "record",
    "unseen_levels",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Evaluation": "evaluation",
        "LoadedPolicy": "evaluation",
        "evaluate": "evaluation",
        "initial_policy": "evaluation",
        "load_policy": "evaluation",
        "read_config": "folder",
        "read_progress": "progress",
        "record": "video",
        "unseen_levels": "evaluation",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
