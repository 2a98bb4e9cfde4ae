"""Acting on a CPU with a small network: the policy's forward pass and the choice of actions, in NumPy.

A step of a few environments is thirty operations on a few hundred numbers. PyTorch spends several microseconds on
dispatching each of them, NumPy about one. On CartPole with the default network (one core, torch 2.13):

| environments | acting in NumPy | in PyTorch | a whole step of sampling in NumPy | in PyTorch |
|---:|---:|---:|---:|---:|
| 1 | 18 us | 70 us | 47 us | 140 us |
| 8 | 28 us | 79 us | 117 us | 215 us |
| 64 | 85 us | 111 us | 646 us | 720 us |

The whole step gains more than acting alone, because PyTorch also evicts the environments' data from the processor's
caches. Values are included; NumPy leaves them to one pass of PyTorch at the end of a rollout. Convolutions and large
batches gain nothing, and act with PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import gymnasium as gym
import numpy as np
from torch import nn

from anybatch.errors import ConfigError
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import GaussianHead, Policy
from anybatch.models.distributions import choose
from anybatch.models.encoder import in_numpy
from anybatch.models.layers import ArrayFunction, dense_in_numpy
from anybatch.models.masks import Masking

_MAX_MULTIPLICATIONS = 1 << 20  # of a forward pass; above, PyTorch's threads are faster

Sampler = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Raw distribution parameters (B, P) and noise (B, K) to actions (B, *shape); :meth:`Distribution.transform`."""


class NumpyPolicy:
    """A policy on arrays. It shares memory with the parameters, so an optimiser's steps take effect at once."""

    def __init__(
        self, encoder: ArrayFunction, features: int, head: ArrayFunction, sampler: Sampler, masking: Masking | None
    ) -> None:
        self._encoder = encoder
        self._features = features
        self._head = head
        self._sampler = sampler
        self._masking = masking

    @classmethod
    def of(cls, policy: Policy, batch: int) -> NumpyPolicy | None:
        """`policy` for observations (batch, ...); None if it is on a GPU or large, or if its encoder has no NumPy form.

        An encoder offers one by a method `in_numpy` that returns its forward pass on arrays. One that computes in less
        than float32 (`low_precision`) is left to PyTorch: in NumPy it would act with other numbers than it is trained
        on.
        """
        weights = list(policy.parameters())
        if weights[0].device.type != "cpu" or batch * sum(w.numel() for w in weights) > _MAX_MULTIPLICATIONS:
            return None
        low = policy.precision == "bf16" and getattr(policy.encoder, "low_precision", False)
        encoder = None if low else in_numpy(policy.encoder)
        if encoder is None:
            return None
        features = int(getattr(policy.encoder, "out_features"))  # noqa: B009
        return cls(encoder, features, _head(policy.head), _sampler(policy.action_spec), policy.masking)

    @np.errstate(all="ignore")  # numbers that are not finite are reported once, at the end of a rollout
    def __call__(
        self, observation: np.ndarray | dict[str, np.ndarray], noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Raw distribution parameters (B, P), float32, and actions (B, *shape).

        Raises ConfigError if the encoder's features have another shape or dtype than they should.
        """
        masking = self._masking
        features = self._encoder(observation if masking is None else masking.rest(observation))
        expected = (len(noise), self._features)
        if not isinstance(features, np.ndarray) or features.shape != expected or features.dtype != np.float32:
            is_array = isinstance(features, np.ndarray)
            got = f"{features.dtype} {features.shape}" if is_array else type(features).__name__
            raise ConfigError(f"in_numpy of the encoder gave {got}, but must give a float32 array {expected}.")
        params = self._head(features)
        if masking is not None:
            params = masking.apply_in_numpy(params, observation)
        return params, self._sampler(params, noise)


def _head(head: nn.Module) -> ArrayFunction:
    if not isinstance(head, GaussianHead):
        assert isinstance(head, nn.Linear)
        return dense_in_numpy(head)
    mean, bounds = dense_in_numpy(head.mean), head.bounds
    if isinstance(head.log_std, nn.Linear):
        log_std_of = dense_in_numpy(head.log_std)
    else:
        parameter = head.log_std.detach().numpy()
        log_std_of = lambda features: parameter  # noqa: E731

    def forward(features: np.ndarray) -> np.ndarray:
        means, log_std = mean(features), log_std_of(features)
        if bounds is not None:
            middle, half = np.float32((bounds[1] + bounds[0]) / 2), np.float32((bounds[1] - bounds[0]) / 2)
            log_std = middle + half * np.tanh((log_std - middle) / half)
        return np.concatenate((means, np.broadcast_to(log_std, means.shape)), axis=-1)

    return forward


def _sampler(spec: ActionSpec) -> Sampler:
    """:meth:`Distribution.transform` on arrays; tests compare the two."""
    if isinstance(spec.space, gym.spaces.Discrete):
        return _choose
    if isinstance(spec.space, gym.spaces.MultiDiscrete):
        ends = np.cumsum(spec.space.nvec.reshape(-1))[:-1]
        return lambda params, noise: np.stack(
            [_choose(block, noise[:, i, None]) for i, block in enumerate(np.split(params, ends, axis=-1))], axis=-1
        )
    if isinstance(spec.space, gym.spaces.MultiBinary):
        return lambda params, noise: (noise * (1 + np.exp(-params)) < 1).astype(np.int64)
    size = math.prod(spec.shape)
    return lambda params, noise: (params[:, :size] + noise * np.exp(params[:, size:])).reshape(-1, *spec.shape)


def _choose(logits: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return choose(np.exp(logits - logits.max(axis=-1, keepdims=True)), levels)
