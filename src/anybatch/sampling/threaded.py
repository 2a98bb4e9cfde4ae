"""Asynchronous sampling on one machine: a thread steps the environments while the learner optimises.

Rollout i is what iteration i trains on. The sampler acts with a copy of the weights that it takes over whole, between
two rollouts, so one rollout is of one policy. It may begin rollout i once weights trained for at least i - max_lag
iterations are published, and waits until then: that bounds both the age of the data and the rollouts that wait, at most
max_lag of them beside the one that is being sampled. Without ``deterministic`` it takes the newest weights there are;
with it those after iteration max(0, i - max_lag), as :class:`anybatch.sampling.sources.Delayed` does, and one seed
gives one result: the actions have a generator of their own. (An encoder that draws random numbers itself, for dropout
say, shares PyTorch's global generator with the learner, and gives that up.)

EnvPool and PyTorch release Python's global lock, so the two threads run side by side. Environments written in Python
hold it, and so does acting with a small network in NumPy, for some microseconds a step; the option ``vectorization
async`` steps environments in processes of their own.
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
from anybatch.sampling.rollout import Rollout, Sampled, Sampler
from anybatch.sampling.sources import NEW_EPISODES
from anybatch.system.signals import Interrupted, Interrupts

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 5.0


class CollectWith(Protocol):
    """Samples one rollout with the weights of a given agent."""

    def __call__(self, agent: Agent, *, version: int, interrupts: Interrupts) -> Rollout:
        """``version``: iterations that ``agent`` was trained for; ``interrupts``: stops it between two steps."""


class Asynchronous:
    """Samples beside learning, at most ``max_lag`` iterations ahead; ``max_lag`` 0 is the same as synchronous.

    A checkpoint does not wait for the sampler: it holds the rollouts that wait, and where the environments stood when
    the rollout in progress began, which is then sampled once more. Where the environments' state cannot be saved it
    holds no rollouts either, and sampling begins anew.
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
    ) -> None:
        """Prepare; the thread starts with the first :meth:`next`.

        Args:
            collect: samples one rollout from where ``sampler`` stands.
            sampler: the environments, which belong to the thread once it runs.
            agent: what is trained; read in :meth:`next` alone.
            max_lag: most iterations between the weights that acted and those being trained.
            deterministic: act with weights exactly that old (younger only at the start).
            interrupts: lets a stop request through while the learner waits.
            device: where rollouts are kept.
        """
        self._collect = collect
        self._sampler = sampler
        self._agent = agent
        self._actor = copy.deepcopy(agent).requires_grad_(False)
        self._max_lag = max_lag
        self._deterministic = deterministic
        self._interrupts = interrupts
        self._device = device
        self._handed_out = Sampled()
        self._thread: threading.Thread | None = None
        self._stop = Interrupts(patience=0.0)  # of the sampler
        # everything below is shared by the two threads, and touched while holding this
        self._changed = threading.Condition()
        self._published: dict[int, dict[str, Any]] = {}
        self._waiting: deque[tuple[Rollout, Sampled]] = deque()
        self._first: int | None = None  # the rollout that sampling began with
        self._current = 0  # the rollout that is being sampled, or is next
        self._began: dict[str, Any] = sampler.state_dict()  # the sampler when that rollout began
        self._failure: BaseException | None = None

    def next(self, iteration: int) -> Rollout:
        """Publish the present weights, and wait for the rollout of this iteration.

        Raises:
            Interrupted: a stop was requested, and sampling takes long.
            EnvError, DivergenceError, ...: what ended the sampler, once no finished rollout is left.
        """
        weights = copy.deepcopy(self._agent.state_dict())
        with self._changed:
            self._publish(iteration, weights)
            while not self._waiting:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_POLL_SECONDS)
                self._interrupts.check()
            rollout, sampled = self._waiting.popleft()
        self._handed_out.add(sampled)
        return rollout

    def drain(self) -> Sampled:
        """What belongs to the rollouts handed out since the last call; those that wait are counted later."""
        sampled, self._handed_out = self._handed_out, Sampled()
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
            return [f"{NEW_EPISODES}, and what was sampled ahead of training (up to {self._max_lag} rollouts) is lost"]
        self._began = state["sampler"]
        self._waiting = deque(
            (Rollout.from_state_dict(one["rollout"], self._device), Sampled(**one["sampled"]))
            for one in state["waiting"]
        )
        self._first, self._current, self._published = state["first"], state["current"], dict(state["published"])
        return []

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
        """Let the sampler have a copy that nobody writes to, whole; start it if it does not run yet."""
        if self._first is None:
            self._first = self._current = iteration
        self._published[iteration] = weights
        wanted = self._wanted()
        self._published = {version: kept for version, kept in self._published.items() if version >= wanted}
        if self._thread is None:
            # a daemon: an environment that hangs must not keep the program from ending
            self._thread = threading.Thread(target=self._run, name="anybatch-sampler", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _wanted(self) -> int:
        """The weights for the current rollout, as the iterations they were trained for."""
        assert self._first is not None
        return max(self._first, self._current - self._max_lag) if self._deterministic else max(self._published)

    def _run(self) -> None:
        """The sampler thread."""
        try:
            while True:
                version = self._take_over_weights()
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

    def _take_over_weights(self) -> int:
        """Wait until the current rollout may begin, and return which weights the actor now has."""
        with self._changed:
            while max(self._published) < self._current - self._max_lag:
                self._stop.check()
                self._changed.wait()
            self._stop.check()
            version = self._wanted()
            self._actor.load_state_dict(self._published[version])
            return version
