"""Passes over the data of the last iterations: several epochs, spread out in time (beyond the paper).

With E epochs at the batch where hyperparameters were tuned, the passes over a sample are about one E-th of an iteration
apart, and the policy moves in between. At a batch c times smaller the passes of an iteration come at once, over c
times fewer samples, and the policy is fitted to these few: it moves further from the proximal policy. Spread out over c
iterations, the passes over a sample are as far apart, in environment steps, as they were. The decoupled objectives
allow this: the importance weight says how old a sample is, and the proximal policy does not depend on it.

Behaviour log-probabilities, normalised advantages and value targets are kept as they were computed, as they are between
the epochs of an iteration. GePPO (Queeney et al. 2021, arXiv:2111.00072) trains on samples of the last few policies
too, to need fewer of them; it centres the clipping range on the present policy, as the decoupled objective with a
recent proximal policy does, and adapts its step size. Here the purpose is the same behaviour at another batch size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from anybatch.config.schema import OptimizerConfig
from anybatch.distributed.state import Slot, State, concatenate, rows
from anybatch.minibatches import Batch


def ages(epochs: int, window: float) -> list[int]:
    """Age in iterations of the data of each pass, ``floor(e * window / epochs)`` for pass e.

    With a window of 1 all passes are over the newest data. With a window of c at 1/c of the batch, pass e comes
    e/epochs of a tuned iteration after the first.

    >>> ages(3, 1), ages(3, 4), ages(3, 6)
    ([0, 0, 0], [0, 1, 2], [0, 2, 4])

    Args:
        epochs: passes over each sample, E.
        window: iterations over which they are spread, at least 1.
    """
    return [math.floor(epoch * window / epochs + 1e-9) for epoch in range(epochs)]


def passes(batches: Sequence[Batch], epochs: int, window: float) -> Iterator[tuple[int, Batch]]:
    """Passes of one iteration, the newest data first; those over data from before the first iteration are left out.

    Args:
        batches: newest first.
        epochs: passes over each sample.
        window: iterations over which they are spread.

    Yields:
        The number of the pass over this data, from 0, and the data.
    """
    for epoch, age in enumerate(ages(epochs, window)):
        if age < len(batches):
            yield epoch, batches[age]


class RecentBatches:
    """The batches of the last iterations that have passes to come; none if all passes are made at once.

    With E epochs spread over c iterations these are the last (E-1)/E of c iterations: (E-1)/E of the samples of the
    tuned iteration, on the device of the networks, and in every checkpoint.
    """

    worker_keys: frozenset[str] = frozenset({"batches"})

    def __init__(self, most: int = 0, device: torch.device | None = None) -> None:
        """Start empty.

        Args:
            most: number of batches to keep besides the present one.
            device: device of the batches, to which :meth:`load_state_dict` moves them.
        """
        self._kept: deque[Batch] = deque(maxlen=most)
        self._device = device

    @classmethod
    def of(cls, config: OptimizerConfig, device: torch.device | None = None) -> RecentBatches:
        """As many batches as the passes of ``config`` need."""
        return cls(kept_iterations(config), device)

    def and_newest(self, batch: Batch) -> list[Batch]:
        """The newest batch and those before it, newest first; the newest is kept for the next call.

        Batches of another size, from before a change of ``env.num_envs`` or ``rollout.steps``, are dropped.
        """
        if any(x.advantage.shape != batch.advantage.shape for x in self._kept):
            self._kept.clear()
        batches = [batch, *self._kept]
        self._kept.appendleft(batch)
        return batches

    def state_dict(self) -> State:
        """The kept batches; an absent ``first`` or ``state`` is None."""
        return {"batches": [dict(vars(batch)) for batch in self._kept]}

    def load_state_dict(self, state: State) -> None:
        """Restore what :meth:`state_dict` returned; the newest of them, if now fewer are kept."""
        batches = [Batch(**values).map(lambda x: x.to(self._device)) for values in state["batches"]]
        self._kept = deque(batches[: self._kept.maxlen], maxlen=self._kept.maxlen)

    def merge(self, workers: Sequence[State]) -> State:
        """State over the environments of all workers."""
        return {"batches": [concatenate(batches) for batches in zip(*(x["batches"] for x in workers), strict=True)]}

    def split(self, merged: State, slot: Slot) -> State:
        """State of one worker."""
        return {"batches": rows(merged["batches"], slot.envs)}


def kept_iterations(config: OptimizerConfig) -> int:
    """Number of iterations, besides the present one, whose data is still needed."""
    return max(max(ages(epochs, config.epoch_window)) for epochs in (config.policy_epochs, config.value_epochs))
