"""The segments of R runs' policy phases, in memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anybatch.observations import Observation
from anybatch.phase_storage.layout import SegmentLayout
from anybatch.phase_storage.store import AuxiliaryMinibatch, SegmentStore


class StackedStore(SegmentStore):
    """A :class:`~anybatch.phase_storage.store.SegmentStore` of R runs: its inputs and outputs have a run axis."""

    def __init__(self, layout: SegmentLayout, runs: int) -> None:
        """Allocate memory for ``runs`` times what ``layout`` describes.

        Raises:
            ConfigError: there is too little.
        """
        super().__init__(replace(layout, num_envs=runs * layout.num_envs), "ram", None)  # checks the memory
        self.layout = layout
        samples = layout.segments * layout.segment_samples
        self._stacked = {
            name: torch.empty((runs, samples, *shape), dtype=dtype) for name, (dtype, shape) in layout.arrays.items()
        }

    def append(self, observation: Observation, value_target: Tensor) -> None:
        """Add a segment (R, N, T, ...)."""
        segment = slice(self.samples, self.samples + self.layout.segment_samples)
        for name, entry in self.layout.entries(observation).items():
            self._stacked[name][:, segment] = entry.flatten(1, 2)
        self._stacked["value_target"][:, segment] = value_target.flatten(1, 2)
        self.count += 1

    def observation(self, samples: slice) -> Observation:
        """The observations (R, B, ...) of consecutive samples of each run."""
        return self._pack(lambda name: self._stacked[name][:, samples])

    def write_old_params(self, start: int, params: Tensor) -> None:
        """Keep the old policies' parameters (R, B, P) for the samples from ``start`` on."""
        self._stacked["old_params"][:, start : start + params.shape[1]] = params

    def minibatch(self, chunks: Tensor, length: int) -> AuxiliaryMinibatch:
        """Read chunks (R, K) of trajectories, numbered as by :func:`anybatch.minibatches.deal`, as one minibatch."""

        def read(name: str) -> Tensor:
            stored = self._stacked[name]
            selected = stored.view(-1, length, *stored.shape[2:])[chunks.flatten()]
            return selected.view(len(stored), -1, *stored.shape[2:])

        return AuxiliaryMinibatch(self._pack(read), read("value_target"), read("old_params"))
