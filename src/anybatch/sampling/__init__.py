"""Sampling: acting in the environments, and the sources that deliver rollouts to the training loop."""

from __future__ import annotations

from anybatch.sampling.memory import PolicyMemory
from anybatch.sampling.ray import RayActors
from anybatch.sampling.replay import RecentBatches
from anybatch.sampling.rollout import EpisodeTracker, Rollout, Sampled, Sampler, collect
from anybatch.sampling.sources import Delayed, RolloutSource, Synchronous
from anybatch.sampling.threaded import Asynchronous

__all__ = [
    "Asynchronous",
    "Delayed",
    "EpisodeTracker",
    "PolicyMemory",
    "RayActors",
    "RecentBatches",
    "Rollout",
    "RolloutSource",
    "Sampled",
    "Sampler",
    "Synchronous",
    "collect",
]
