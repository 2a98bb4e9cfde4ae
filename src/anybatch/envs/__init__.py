"""Environments of every family, behind one interface with one autoreset convention."""

from __future__ import annotations

from anybatch.envs.base import Observation, Steps, VectorEnv, derive_seeds
from anybatch.envs.make import describe, list_envs, make, spaces

__all__ = ["Observation", "Steps", "VectorEnv", "derive_seeds", "describe", "list_envs", "make", "spaces"]
