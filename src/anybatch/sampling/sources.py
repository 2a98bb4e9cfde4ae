"""Rollout sources: where the data of an iteration comes from, and how old it is.

Age is counted in iterations (section 5.1): a rollout acted on by weights that had been trained for v iterations, and
trained on when i iterations are done, is i - v iterations old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from anybatch.config.schema import TrainConfig
from anybatch.distributed.state import Slot, State, Stateful, concatenate, rows
from anybatch.sampling.rollout import Rollout, Sampled, Sampler

Collect = Callable[[int], Rollout]
"""Samples one rollout with the present weights, given the iterations that these have been trained for."""

NEW_EPISODES = "the checkpoint has no state that these environments can restore: they start new episodes"
"""Message of a resumed run whose environments begin anew."""

OTHER_SIZE = "waiting rollouts differ from new ones in the number of environments or steps, and are dropped"
"""Message of a resumed run whose rollouts have another size."""


def has_size(rollout: Rollout, sampler: Sampler, steps: int | None) -> bool:
    """Whether a rollout is of the sampler's environments and of so many steps; None allows every size."""
    return steps is None or rollout.reward.shape == (sampler.env.num_envs, steps)


class RolloutSource(Stateful, Protocol):
    """Delivers rollouts to the training loop; all its state belongs to one worker."""

    def next(self, iteration: int) -> Rollout:
        """The next rollout to train on; ``iteration`` is how many iterations the present weights were trained for."""

    def drain(self) -> Sampled:
        """Return counts and episodes of the rollouts sampled since the last call."""

    def close(self) -> bool:
        """Stop sampling; False if the environments hang in a step, and so must not be touched any more."""


def staleness(rollout: Rollout, iteration: int, config: TrainConfig) -> dict[str, float]:
    """Columns of the log that tell a rollout's age.

    ``staleness_iterations``, and ``staleness_env_steps``, the environment steps trained on in these iterations.

    Args:
        rollout: the next one to train on.
        iteration: iterations that the present weights have been trained for.
        config: supplies the environment steps of an iteration.
    """
    age = iteration - rollout.version
    return {"staleness_iterations": age, "staleness_env_steps": age * config.iteration_batch}


class Synchronous:
    """Sample, then learn, in turns: the data is always from the present weights."""

    def __init__(self, collect: Collect, sampler: Sampler) -> None:
        """``collect`` samples one rollout with the present weights, from where ``sampler`` stands."""
        self._collect = collect
        self._sampler = sampler

    def next(self, iteration: int) -> Rollout:
        """Sample a rollout with the present weights."""
        return self._collect(iteration)

    def drain(self) -> Sampled:
        return self._sampler.episodes.drain()

    worker_keys: frozenset[str] = frozenset({"sampler"})

    def state_dict(self) -> State:
        """State of the environments."""
        return {"sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: State) -> list[str]:
        """Restore the environments."""
        return [] if self._sampler.load_state_dict(state["sampler"]) else [NEW_EPISODES]

    def merge(self, workers: Sequence[State]) -> State:
        """State over the environments of all workers."""
        return {"sampler": self._sampler.merge([worker["sampler"] for worker in workers])}

    def split(self, merged: State, slot: Slot) -> State:
        """State of one worker."""
        return {"sampler": self._sampler.split(merged["sampler"], slot)}

    def close(self) -> bool:
        return True


class Delayed:
    """Artificial staleness (section 5.1): every rollout waits in a buffer for a fixed number of iterations.

    Rollout i acts with the weights after iteration max(0, i - delay): the buffer is filled with the first weights.
    """

    def __init__(
        self, collect: Collect, sampler: Sampler, delay: int, device: torch.device, steps: int | None = None
    ) -> None:
        """Start with an empty buffer.

        Args:
            collect: samples one rollout with the present weights, from where ``sampler`` stands.
            sampler: the environments.
            delay: iterations that a rollout waits, at least 0; 0 is the same as :class:`Synchronous`.
            device: where rollouts are kept.
            steps: T of new rollouts; those of a checkpoint with another number are dropped.
        """
        self._collect = collect
        self._sampler = sampler
        self._steps = steps
        self._delay = delay
        self._device = device
        self._waiting: deque[Rollout] = deque()

    def next(self, iteration: int) -> Rollout:
        """Sample until ``delay`` younger rollouts are waiting, then hand out the oldest."""
        while len(self._waiting) <= self._delay:
            self._waiting.append(self._collect(iteration))
        return self._waiting.popleft()

    def drain(self) -> Sampled:
        """Return counts and episodes of the rollouts sampled since the last call, warm-up included."""
        return self._sampler.episodes.drain()

    worker_keys: frozenset[str] = frozenset({"sampler", "waiting"})

    def state_dict(self) -> State:
        """State of the environments, and the waiting rollouts."""
        return {
            "sampler": self._sampler.state_dict(),
            "waiting": [rollout.state_dict() for rollout in self._waiting],
        }

    def load_state_dict(self, state: State) -> list[str]:
        """Restore the environments and the waiting rollouts, if these have the present size."""
        waiting = [Rollout.from_state_dict(rollout, self._device) for rollout in state["waiting"]]
        self._waiting = deque(x for x in waiting if has_size(x, self._sampler, self._steps))
        restored = self._sampler.load_state_dict(state["sampler"])
        return [OTHER_SIZE] * (len(self._waiting) < len(waiting)) + [NEW_EPISODES] * (not restored)

    def merge(self, workers: Sequence[State]) -> State:
        """State over the environments of all workers."""
        waiting = zip(*(worker["waiting"] for worker in workers), strict=True)
        return {
            "sampler": self._sampler.merge([worker["sampler"] for worker in workers]),
            "waiting": [concatenate(rollouts) for rollouts in waiting],
        }

    def split(self, merged: State, slot: Slot) -> State:
        """State of one worker."""
        return {
            "sampler": self._sampler.split(merged["sampler"], slot),
            "waiting": [rows(rollout, slot.envs) for rollout in merged["waiting"]],
        }

    def close(self) -> bool:
        return True
