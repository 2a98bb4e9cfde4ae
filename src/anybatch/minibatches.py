"""Stages of an iteration's data, and minibatches of whole trajectories or of equal chunks of them.

A rollout becomes a batch when its advantages are estimated, and a batch is dealt out to minibatches. Each stage is a
dataclass that adds fields to the one before. R stacked runs have a run axis in front of every other axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor

from anybatch.config.chunks import time_chunks
from anybatch.observations import Inputs, Observation, Sequences, leaves, map_observation

_SMALL = 16 << 20  # bytes


class RunGenerators(tuple[torch.Generator, ...]):
    """A CPU generator for each of R stacked runs, which draws the numbers of that run trained alone."""

    def get_state(self) -> Tensor:
        """States of all generators, one a row."""
        return torch.stack([generator.get_state() for generator in self])

    def set_state(self, state: Tensor) -> None:
        """Restore the states that :meth:`get_state` returned."""
        for generator, row in zip(self, state, strict=True):
            generator.set_state(row)


Generators: TypeAlias = torch.Generator | RunGenerators
"""Source of a random order, for a single run or for stacked ones."""


class TensorRecord:
    """Base of dataclasses that hold tensors, or dictionaries of tensors, with the same leading axes."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with ``function`` applied to every tensor; other fields stay."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        tensors: dict[str, Observation] = {name: x for name, x in values.items() if isinstance(x, Tensor | dict)}
        return replace(self, **{name: map_observation(function, x) for name, x in tensors.items()})  # type: ignore[type-var]

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which :meth:`map` visits them."""
        values: list[Any] = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        observations: list[Observation] = [x for x in values if isinstance(x, (Tensor, dict))]
        return [x for observation in observations for x in leaves(observation)]


class FlatRecord(TensorRecord):
    """Base of records whose samples are flattened to one axis, (B, ...), or (R, B, ...) for R stacked runs."""

    value_target: Tensor
    """(B,), or (R, B)."""
    steps: int = 1
    """Consecutive samples that stay together."""

    def __len__(self) -> int:
        """Number of samples B, of each run."""
        return self.value_target.shape[-1]

    @property
    def run_axis(self) -> bool:
        """Whether the samples are those of stacked runs."""
        return self.value_target.dim() > 1

    @property
    def runs(self) -> int:
        """Number of stacked runs R; 1 without a run axis."""
        return self.value_target.numel() // len(self)

    def micro_batches(self, max_samples: int) -> Iterator[Self]:
        """Split into the fewest micro-batches of at most ``max_samples`` consecutive samples, as equal as possible.

        One of ``steps`` samples that stay together is the least, whatever ``max_samples``.
        """
        if len(self) <= max(max_samples, self.steps):
            yield self
            return
        pieces = equal_cuts(len(self) // self.steps, max(1, max_samples // self.steps))
        cuts = [slice(piece.start * self.steps, piece.stop * self.steps) for piece in pieces]
        before = (slice(None),) * (self.value_target.dim() - 1)
        for cut in cuts:
            yield self.map(lambda tensor, index=(*before, cut): tensor[index])  # type: ignore[misc]


@dataclass(frozen=True)
class Samples(TensorRecord):
    """Observations, the actions sampled there, and the policy that sampled them.

    The leading axes, written (...), are (N, T) in a rollout or batch and (B,) in a minibatch.
    """

    observation: Observation
    """(..., *shape of one), or such a tensor for every key."""
    action: Tensor
    """(..., *shape of one) as the policy produced them."""
    behavior_logp: Tensor
    """(...) log pi_behav(a|s), fp32."""
    behavior_params: Tensor
    """(..., P) raw distribution parameters of pi_behav, fp32."""


@dataclass(frozen=True)
class Batch(Samples):
    """An iteration's data with its advantages, (N, T, ...)."""

    advantage: Tensor
    """(...) advantage estimates, normalised if ``advantage.normalize`` is set."""
    value_target: Tensor
    """(...) targets of the value function."""
    first: Tensor | None = None
    """(...) bool, the step was the first of its episode; None unless the networks are recurrent."""
    state: Tensor | None = None
    """(..., S) state of recurrent networks before each step; None for others."""

    @classmethod
    def of(
        cls, samples: Samples, *, advantage: Tensor, value_target: Tensor, first: Tensor, state: Tensor | None
    ) -> Self:
        """The batch of a rollout's samples and their advantages; ``first`` is kept with a ``state`` alone."""
        common = {field.name: getattr(samples, field.name) for field in fields(Samples)}
        kept = None if state is None else first
        return cls(**common, advantage=advantage, value_target=value_target, first=kept, state=state)


@dataclass(frozen=True)
class Minibatch(Batch, FlatRecord):
    """Some samples of a :class:`Batch`, flattened to (B, ...)."""

    steps: int = 1
    """Steps L of each piece of a trajectory if the networks are recurrent."""

    @property
    def inputs(self) -> Inputs:
        """Inputs of the networks.

        Recurrent ones unroll each piece from the state that the behaviour policy had before it. So do the proximal
        policies, each with its own weights.
        """
        if self.state is None or self.first is None:
            return self.observation
        return Sequences(self.observation, self.first, self.state, self.steps)


def equal_cuts(length: int, max_length: int) -> list[slice]:
    """Cut ``length`` samples into the fewest consecutive slices of at most ``max_length``, as equal as possible."""
    count = math.ceil(length / max_length)
    edges = [round(i * length / count) for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def deal(chunks: int, minibatches: int, generator: Generators) -> tuple[Tensor, ...]:
    """Deal numbered chunks of trajectories out to minibatches in random order.

    Args:
        chunks: their number in a run, a multiple of ``minibatches``.
        minibatches: M.
        generator: of the random order.

    Returns:
        M tensors (chunks/M,) of chunk numbers; each number is in exactly one. For R runs (R, chunks/M), where chunk c
        of run r has the number ``r * chunks + c``.
    """
    if isinstance(generator, torch.Generator):
        return torch.randperm(chunks, generator=generator).chunk(minibatches)
    orders = [torch.randperm(chunks, generator=one) + run * chunks for run, one in enumerate(generator)]
    return torch.stack(orders).chunk(minibatches, dim=-1)


def shuffled(
    batch: Batch,
    minibatches: int,
    generator: Generators,
    of: Literal["trajectories", "samples"] = "trajectories",
) -> Iterator[Minibatch]:
    """Deal all samples of a batch out to equal minibatches, each sample exactly once, in random order.

    Args:
        batch: (N, T, ...) data.
        minibatches: their number M; N*T/M samples each.
        generator: of the random order.
        of: whether trajectories stay together, as far as they are not cut into chunks, or samples are dealt singly.

    Yields:
        M minibatches.

    Raises:
        ConfigError: the samples cannot be divided equally.
    """
    *runs, num_envs, steps = batch.advantage.shape
    chunks = time_chunks(num_envs, steps, minibatches, of)
    order = torch.stack(deal(num_envs * chunks, minibatches, generator)).to(batch.advantage.device)

    def gather(tensor: Tensor, index: Tensor) -> Tensor:
        """Chunks (..., K) with their samples along one axis, (..., B, *rest)."""
        rest = tensor.shape[len(runs) + 2 :]
        return tensor.reshape(-1, steps // chunks, *rest)[index.flatten()].view(*index.shape[:-1], -1, *rest)

    def gather_each(tensor: Tensor) -> Iterator[Tensor]:
        """Its samples in each minibatch; of a large one, such as images, one at a time, since a copy of all counts."""
        if tensor.nbytes > _SMALL:
            return (gather(tensor, index) for index in order)
        return iter(gather(tensor, order).unbind())

    present = [field.name for field in fields(Batch) if getattr(batch, field.name) is not None]
    together = 1 if batch.state is None else steps // chunks
    each = {name: map_observation(gather_each, getattr(batch, name)) for name in present}
    for _ in range(minibatches):
        tensors: dict[str, Any] = {name: map_observation(next, source) for name, source in each.items()}
        yield Minibatch(**tensors, steps=together)
