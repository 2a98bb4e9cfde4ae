"""Storage for a rollout's observations, on their way from the environments to the policy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anybatch.envs.base import Observation as EnvObservation
from anybatch.observations import Observation, leaves, map_observation


class ObservationBuffer:
    """The observations of T steps of N environments, filled one step at a time."""

    def __init__(self, observations: Observation) -> None:
        """Write into ``observations``, (N, T, ...) or such a tensor for every key."""
        self.observations = observations
        """The columns written so far; the rest is uninitialised."""
        on_gpu = leaves(observations)[0].is_cuda
        # a GPU copies asynchronously from page-locked memory; on a CPU, NumPy writes with less overhead than PyTorch
        self._staging = map_observation(_page_locked_step, observations) if on_gpu else None
        self._arrays = [] if on_gpu else [tensor.numpy() for tensor in leaves(observations)]

    @classmethod
    def allocate(cls, like: EnvObservation, steps: int, device: torch.device) -> ObservationBuffer:
        """A buffer on a device for ``steps`` observations shaped (N, ...) as ``like`` is."""

        def empty(array: np.ndarray) -> Tensor:
            dtype = torch.from_numpy(array[:0]).dtype
            return torch.empty((array.shape[0], steps, *array.shape[1:]), dtype=dtype, device=device)

        return cls(map_observation(empty, like))

    def keep(self, t: int, observation: EnvObservation) -> None:
        """Write column ``t`` on a CPU."""
        for array, new in zip(self._arrays, leaves(observation), strict=True):
            array[:, t] = new

    def put(self, t: int, observation: EnvObservation) -> Observation:
        """Write column ``t``, and return the observation (N, ...) as tensors on the device.

        On a GPU the copy must be complete before the next call, which overwrites its source; receiving the actions on
        the host ensures that.
        """
        if self._staging is None:
            self.keep(t, observation)
            return map_observation(torch.from_numpy, observation)
        for pinned, new in zip(leaves(self._staging), leaves(observation), strict=True):
            np.copyto(pinned.numpy(), new)  # PyTorch's threads would spin on the environments' cores
        device = leaves(self.observations)[0].device
        moved = map_observation(lambda pinned: pinned.to(device, non_blocking=True), self._staging)
        for column, tensor in zip(leaves(self.observations), leaves(moved), strict=True):
            column[:, t] = tensor
        return moved


def _page_locked_step(tensor: Tensor) -> Tensor:
    return torch.empty((tensor.shape[0], *tensor.shape[2:]), dtype=tensor.dtype, pin_memory=True)
