"""Asynchronous sampling on one machine: a thread steps the environments while the learner optimises.

Iteration i trains on rollout i. The sampler copies the published weights between two rollouts only, so each rollout
comes from one policy. It begins rollout i when weights trained for at least i - max_lag iterations have been published.
That bounds the age of the data and the queue: at most max_lag rollouts wait while another one is sampled. By default
the sampler takes the newest weights. With ``deterministic`` it takes those after iteration max(0, i - max_lag), as
:class:`anybatch.sampling.sources.Delayed` does, and results depend on the seed alone, because the actions have their
own generator. (An encoder that draws random numbers, such as dropout, uses PyTorch's global generator, which both
threads share, and loses that guarantee.)

EnvPool and PyTorch release Python's global interpreter lock, so the two threads run in parallel. Environments written
in Python hold the lock, as does acting in NumPy for some microseconds a step; ``vectorization async`` steps
environments in separate processes.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from anybatch.distributed.state import Slot, State
from anybatch.models.agent import Agent
from anybatch.sampling.published import load_weights, weights_of
from anybatch.sampling.rollout import Rollout, Sampled, Sampler
from anybatch.sampling.sources import NEW_EPISODES, OTHER_SIZE, has_size
from anybatch.system.signals import Interrupted, Interrupts

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 5.0


class CollectWith(Protocol):
    """Samples one rollout with the weights of a given agent."""

    def __call__(self, agent: Agent, *, version: int, interrupts: Interrupts) -> Rollout:
        """Sample; ``version`` counts ``agent``'s iterations of training, ``interrupts`` is checked between steps."""


class Asynchronous:
    """Samples during learning, at most ``max_lag`` iterations ahead; ``max_lag`` 0 equals synchronous sampling.

    A checkpoint does not wait for the sampler: it holds the waiting rollouts and the state of the environments at the
    beginning of the unfinished rollout, which is sampled again on resuming. If the environments' state cannot be saved,
    the checkpoint holds no rollouts and sampling starts again with new episodes.
    """

    def __init__(
        self,
        collect: CollectWith,
        sampler: Sampler,
        agent: Agent,
        *,
        max_lag: int,
        deterministic: bool,
        interrupts: Interrupts,
        device: torch.device,
        steps: int | None = None,
    ) -> None:
        """Prepare; the thread starts with the first :meth:`next`.

        Args:
            collect: continues ``sampler`` for one rollout.
            sampler: the environments; only the thread uses them once it runs.
            agent: the networks being trained; read in :meth:`next` only.
            max_lag: upper bound on the iterations between the weights that acted and those being trained.
            deterministic: act with weights exactly that old (younger only at the start, and after a larger
                ``max_lag`` than that of the checkpoint).
            interrupts: checked while the learner waits.
            device: where rollouts are kept.
            steps: T of new rollouts; those of a checkpoint with another number are dropped.
        """
        self._steps = steps
        self._collect = collect
        self._sampler = sampler
        self._agent = agent
        self._actor = copy.deepcopy(agent).requires_grad_(False)
        self._max_lag = max_lag
        self._deterministic = deterministic
        self._interrupts = interrupts
        self._device = device
        self._returned = Sampled()
        self._thread: threading.Thread | None = None
        self._stop = Interrupts(patience=0.0)  # stops the sampler
        # protects everything below, which the two threads share
        self._changed = threading.Condition()
        self._published: dict[int, dict[str, Any]] = {}
        self._waiting: deque[tuple[Rollout, Sampled]] = deque()
        self._first: int | None = None  # number of the first rollout
        self._current = 0  # number of the rollout being sampled, or sampled next
        self._began: dict[str, Any] = sampler.state_dict()  # the sampler's state when that rollout began
        self._failure: BaseException | None = None

    def next(self, iteration: int) -> Rollout:
        """Publish the current weights, and wait for the rollout of this iteration.

        Raises:
            Interrupted: a stop was requested, and sampling takes too long.
            EnvError, DivergenceError, ...: the sampler's error, after its finished rollouts have been returned.
        """
        weights = copy.deepcopy(weights_of(self._agent))
        with self._changed:
            self._publish(iteration, weights)
            while not self._waiting:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_POLL_SECONDS)
                self._interrupts.check()
            rollout, sampled = self._waiting.popleft()
        self._returned.add(sampled)
        return rollout

    def drain(self) -> Sampled:
        """Return the counts of the rollouts returned by :meth:`next` since the last call."""
        sampled, self._returned = self._returned, Sampled()
        return sampled

    worker_keys: frozenset[str] = frozenset({"sampler", "waiting", "first", "current", "published"})

    def state_dict(self) -> State:
        """State of the environments when the running rollout began, and the waiting rollouts."""
        with self._changed:
            if self._began["env"] is None:
                return {"sampler": self._began}
            return {
                "sampler": self._began,
                "waiting": [{"rollout": r.state_dict(), "sampled": asdict(s)} for r, s in self._waiting],
                "first": self._first,
                "current": self._current,
                # the newest weights are published again on resuming; older ones are gone by then
                "published": dict(self._published) if self._deterministic else {},
            }

    def load_state_dict(self, state: State) -> list[str]:
        """Restore :meth:`state_dict`, before the first :meth:`next`."""
        if not self._sampler.load_state_dict(state["sampler"]):
            self._began = self._sampler.state_dict()
            return [f"{NEW_EPISODES}, and rollouts sampled ahead of training (up to {self._max_lag}) are lost"]
        self._began = state["sampler"]
        self._waiting = deque(
            (Rollout.from_state_dict(one["rollout"], self._device), Sampled(**one["sampled"]))
            for one in state["waiting"]
        )
        self._first, self._current, self._published = state["first"], state["current"], dict(state["published"])
        if all(has_size(rollout, self._sampler, self._steps) for rollout, _ in self._waiting):
            return []
        self._current -= len(self._waiting)  # they are sampled again
        self._waiting.clear()
        return [OTHER_SIZE]

    def merge(self, workers: Sequence[State]) -> State:
        """The environments of all workers; rollouts sampled ahead of training are dropped."""
        merged = self._sampler.merge([worker["sampler"] for worker in workers])
        return {"sampler": {**merged, "env": None, "observation": None}}

    def split(self, merged: State, slot: Slot) -> State:
        """State of one worker, which starts new episodes."""
        return {"sampler": self._sampler.split(merged["sampler"], slot)}

    def close(self) -> bool:
        """Stop the sampler between two steps; False if it is still in one after a few seconds."""
        with self._changed:
            self._stop.request()
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(_JOIN_SECONDS)
        return not self._thread.is_alive()

    def _publish(self, iteration: int, weights: dict[str, Any]) -> None:
        """Publish a copy of the weights that nothing writes to; start the sampler if it is not running."""
        if self._first is None:
            self._first = self._current = iteration
        self._published[iteration] = weights
        if iteration >= self._current - self._max_lag:  # else the sampler, ahead by a larger max_lag of before, waits
            oldest = self._version_to_act_with()
            self._published = {version: kept for version, kept in self._published.items() if version >= oldest}
        if self._thread is None:
            # a daemon, because an environment that hangs must not keep the program alive
            self._thread = threading.Thread(target=self._run, name="anybatch-sampler", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _version_to_act_with(self) -> int:
        """Version of the weights for the current rollout: the iterations they were trained for."""
        if not self._deterministic:
            return max(self._published)
        # a checkpoint of a smaller max_lag has only younger ones
        return min(version for version in self._published if version >= self._current - self._max_lag)

    def _run(self) -> None:
        """The sampler thread."""
        try:
            while True:
                version = self._load_weights()
                rollout = self._collect(self._actor, version=version, interrupts=self._stop)
                sampled, began = self._sampler.episodes.drain(), self._sampler.state_dict()
                with self._changed:
                    self._waiting.append((rollout, sampled))
                    self._current += 1
                    self._began = began
                    self._changed.notify_all()
        except Interrupted:
            pass
        except BaseException as failure:  # the learner raises it
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _load_weights(self) -> int:
        """Wait until the current rollout may begin, load its weights, and return their version."""
        with self._changed:
            while max(self._published) < self._current - self._max_lag:
                self._stop.check()
                self._changed.wait()
            self._stop.check()
            version = self._version_to_act_with()
            load_weights(self._actor, self._published[version])
            return version
