"""Minibatches of whole trajectories, or of equal pieces of them when there are too few environments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anybatch.config.chunks import time_chunks
from anybatch.observations import Observation, map_observation


@dataclass(frozen=True)
class Batch:
    """An iteration's data, ready to be optimised on; every tensor is (N, T, ...)."""

    observation: Observation
    """(N, T, ...), or such a tensor for every key."""
    action: Tensor
    """(N, T, ...) as the policy produced them."""
    behavior_logp: Tensor
    """log-probabilities of the actions under the weights that sampled them."""
    behavior_params: Tensor
    """(N, T, P) raw distribution parameters of the weights that sampled."""
    advantage: Tensor
    """Advantages, normalised if the configuration says so."""
    value_target: Tensor
    """(N, T) what the value function is trained towards."""


@dataclass(frozen=True)
class Minibatch:
    """Some samples of a :class:`Batch`, flattened to (B, ...)."""

    observation: Observation
    """(B, ...), or such a tensor for every key."""
    action: Tensor
    """(B, ...) as the policy produced them."""
    behavior_logp: Tensor
    """(B,) log pi_behav(a|s)."""
    behavior_params: Tensor
    """(B, P) raw distribution parameters of the weights that sampled."""
    advantage: Tensor
    """(B,) advantages, normalised if the configuration says so."""
    value_target: Tensor
    """(B,) what the value function is trained towards."""

    def __len__(self) -> int:
        """Number of samples B."""
        return len(self.advantage)

    def micro_batches(self, max_samples: int) -> Iterator[Minibatch]:
        """Split into consecutive micro-batches of at most ``max_samples`` samples, as equal as possible."""
        cuts = equal_cuts(len(self), max_samples)
        if len(cuts) == 1:
            yield self
            return
        for cut in cuts:
            yield self._map(lambda tensor, cut=cut: tensor[cut])

    def _map(self, function) -> Minibatch:  # type: ignore[no-untyped-def]
        return Minibatch(
            map_observation(function, self.observation),
            *(function(getattr(self, name)) for name in _TENSORS),
        )


_TENSORS = ("action", "behavior_logp", "behavior_params", "advantage", "value_target")


def equal_cuts(length: int, max_length: int) -> list[slice]:
    """Cut ``length`` samples into the fewest consecutive slices of at most ``max_length``, as equal as possible."""
    count = math.ceil(length / max_length)
    edges = [round(i * length / count) for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def deal(pieces: int, minibatches: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Deal numbered pieces of trajectories out in random order.

    Args:
        pieces: their number, a multiple of ``minibatches``.
        minibatches: M.
        generator: CPU generator of the random order.

    Returns:
        M equal shares (pieces/M,) of piece numbers; each number is in exactly one.
    """
    return torch.randperm(pieces, generator=generator).chunk(minibatches)


def shuffled(batch: Batch, minibatches: int, generator: torch.Generator) -> Iterator[Minibatch]:
    """Deal all samples of a batch out to equal minibatches, each sample exactly once, in random order.

    Args:
        batch: (N, T, ...) data.
        minibatches: their number M; N*T/M samples each.
        generator: CPU generator of the random order.

    Yields:
        M minibatches.
    """
    num_envs, steps = batch.advantage.shape
    chunks = time_chunks(num_envs, steps, minibatches)

    def pieces(tensor: Tensor) -> Tensor:
        return tensor.reshape(num_envs * chunks, steps // chunks, *tensor.shape[2:])

    order = torch.cat(deal(num_envs * chunks, minibatches, generator)).to(batch.advantage.device)

    def all_minibatches(tensor: Tensor) -> tuple[Tensor, ...]:
        return pieces(tensor)[order].view(minibatches, -1, *tensor.shape[2:]).unbind()

    rest = zip(*(all_minibatches(getattr(batch, name)) for name in _TENSORS), strict=True)
    for index, tensors in zip(order.chunk(minibatches), rest, strict=True):

        def one_minibatch(tensor: Tensor, index: Tensor = index) -> Tensor:
            return pieces(tensor)[index].flatten(0, 1)

        # observations alone are so large that a copy of the whole epoch would count
        yield Minibatch(map_observation(one_minibatch, batch.observation), *tensors)
