"""Environments of every family behind one interface with one autoreset convention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anybatch._lazy import lazy_attributes

if TYPE_CHECKING:
    from anybatch.envs.base import Steps, VectorEnv, derive_seeds
    from anybatch.envs.factory import make
    from anybatch.envs.installed import EnvFamily, catalog
    from anybatch.envs.procgen import list_procgen, normalized_return
    from anybatch.envs.registry import environment_id, find_environment
    from anybatch.envs.tensor import TensorEnv, TensorSteps, TensorVectorEnv

__all__ = [
    "EnvFamily",
    "Steps",
    "TensorEnv",
    "TensorSteps",
    "TensorVectorEnv",
    "VectorEnv",
    "catalog",
    "derive_seeds",
    "environment_id",
    "find_environment",
    "list_procgen",
    "make",
    "normalized_return",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "EnvFamily": "installed",
        "Steps": "base",
        "TensorEnv": "tensor",
        "TensorSteps": "tensor",
        "TensorVectorEnv": "tensor",
        "VectorEnv": "base",
        "catalog": "installed",
        "derive_seeds": "base",
        "environment_id": "registry",
        "find_environment": "registry",
        "list_procgen": "procgen",
        "make": "factory",
        "normalized_return": "procgen",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
