"""Rollout sources: where the data of an iteration comes from, and how old it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

from anybatch.rollout import Rollout, Sampled, Sampler

Collect = Callable[[], Rollout]


class RolloutSource(Protocol):
    """What the training loop needs of a source."""

    def next(self) -> Rollout:
        """The next rollout to train on."""

    def drain(self) -> Sampled:
        """What was sampled since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what :meth:`state_dict` gave; False if the environments start new episodes instead."""


class Synchronous:
    """Sample, then learn, in turns: the data is always from the present weights."""

    def __init__(self, collect: Collect, sampler: Sampler) -> None:
        """``collect`` samples one rollout with the present weights, from where ``sampler`` stands."""
        self._collect = collect
        self._sampler = sampler

    def next(self) -> Rollout:
        """Sample a rollout with the present weights."""
        return self._collect()

    def drain(self) -> Sampled:
        """What was sampled since the last call."""
        return self._sampler.episodes.drain()

    def state_dict(self) -> dict[str, Any]:
        """Where the environments stand."""
        return {"sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Put the environments back."""
        return self._sampler.load_state_dict(state["sampler"])


class Delayed:
    """Artificial staleness (section 5.1): every rollout waits in a buffer for a fixed number of iterations."""

    def __init__(self, collect: Collect, sampler: Sampler, delay: int) -> None:
        """``delay``: iterations that a rollout waits, at least 0; 0 is the same as :class:`Synchronous`."""
        self._collect = collect
        self._sampler = sampler
        self._delay = delay
        self._waiting: deque[Rollout] = deque()

    def next(self) -> Rollout:
        """Sample until ``delay`` younger rollouts are waiting, then hand out the oldest."""
        while len(self._waiting) <= self._delay:
            self._waiting.append(self._collect())
        return self._waiting.popleft()

    def drain(self) -> Sampled:
        """What was sampled since the last call, warm-up included."""
        return self._sampler.episodes.drain()

    def state_dict(self) -> dict[str, Any]:
        """Where the environments stand, and the rollouts that wait."""
        waiting = [{f.name: getattr(rollout, f.name) for f in fields(Rollout)} for rollout in self._waiting]
        return {"sampler": self._sampler.state_dict(), "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Put the environments and the waiting rollouts back."""
        self._waiting = deque(Rollout(**values) for values in state["waiting"])
        return self._sampler.load_state_dict(state["sampler"])
