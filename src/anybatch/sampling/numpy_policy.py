"""Acting on a CPU with a small network: the policy's forward pass and the choice of actions, in NumPy.

A step of a few environments is thirty operations on a few hundred numbers. PyTorch needs several microseconds to
arrange each of them, and drives the environments out of the processor's caches with it; NumPy needs one. A convolution
gains nothing from this, and neither does a large batch.
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
from anybatch.models.encoder import in_numpy
from anybatch.models.layers import ArrayFunction, dense_in_numpy

_MOST_MULTIPLICATIONS = 1 << 20  # of a forward pass; from there PyTorch's threads pay

Draw = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Raw distribution parameters (B, P) and noise (B, K) to actions (B, *shape); :meth:`Distribution.transform`."""


class ArrayPolicy:
    """A policy on arrays. It reads the weights where they lie: acts with what the optimiser has made of them."""

    def __init__(self, encoder: ArrayFunction, features: int, head: ArrayFunction, draw: Draw) -> None:
        self._encoder = encoder
        self._features = features
        self._head = head
        self._draw = draw

    @classmethod
    def of(cls, policy: Policy, batch: int) -> ArrayPolicy | None:
        """`policy` for observations (batch, ...); None for one on a GPU, that is large, or has an encoder without it.

        An encoder takes part by a method `in_numpy` that returns its forward pass on arrays. One that computes in less
        than float32 (`low_precision`) does not: it would act with other numbers than it is trained on.
        """
        weights = list(policy.parameters())
        if weights[0].device.type != "cpu" or batch * sum(w.numel() for w in weights) > _MOST_MULTIPLICATIONS:
            return None
        low = policy.precision == "bf16" and getattr(policy.encoder, "low_precision", False)
        encoder = None if low else in_numpy(policy.encoder)
        if encoder is None:
            return None
        features = int(getattr(policy.encoder, "out_features"))  # noqa: B009
        return cls(encoder, features, _head(policy.head), _draw(policy.action_spec))

    @np.errstate(all="ignore")  # what is not finite is reported once, at the end of a rollout
    def __call__(
        self, observation: np.ndarray | dict[str, np.ndarray], noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Raw distribution parameters (B, P), float32, and actions (B, *shape).

        Raises ConfigError for features that are not what the encoder promises.
        """
        features = self._encoder(observation)
        expected = (len(noise), self._features)
        if not isinstance(features, np.ndarray) or features.shape != expected or features.dtype != np.float32:
            found = (
                f"{features.dtype} {features.shape}" if isinstance(features, np.ndarray) else type(features).__name__
            )
            raise ConfigError(f"in_numpy of the encoder gave {found}, where a float32 array {expected} is expected.")
        params = self._head(features)
        return params, self._draw(params, noise)


def _head(head: nn.Module) -> ArrayFunction:
    if not isinstance(head, GaussianHead):
        assert isinstance(head, nn.Linear)
        return dense_in_numpy(head)
    mean, log_std = dense_in_numpy(head.mean), head.log_std.detach().numpy()

    def forward(features: np.ndarray) -> np.ndarray:
        means = mean(features)
        return np.concatenate((means, np.broadcast_to(log_std, means.shape)), axis=-1)

    return forward


def _draw(spec: ActionSpec) -> Draw:
    """What :mod:`anybatch.models.distributions` does in PyTorch; tests hold the two to each other."""
    if isinstance(spec.space, gym.spaces.Discrete):
        return _choose
    if isinstance(spec.space, gym.spaces.MultiDiscrete):
        ends = np.cumsum(spec.space.nvec.reshape(-1))[:-1]

        def draw(params: np.ndarray, noise: np.ndarray) -> np.ndarray:
            blocks = np.split(params, ends, axis=-1)
            return np.stack([_choose(block, noise[:, i, None]) for i, block in enumerate(blocks)], axis=-1)

        return draw
    if isinstance(spec.space, gym.spaces.MultiBinary):
        return lambda params, noise: (noise * (1 + np.exp(-params)) < 1).astype(np.int64)
    size = math.prod(spec.shape)

    def normal(params: np.ndarray, noise: np.ndarray) -> np.ndarray:
        actions: np.ndarray = params[:, :size] + noise * np.exp(params[:, size:])
        return actions.reshape(-1, *spec.shape)

    return normal


def _choose(logits: np.ndarray, level: np.ndarray) -> np.ndarray:
    """:meth:`Categorical.transform`: logits (B, n) and levels (B, 1) to choices (B,)."""
    cumulative = np.exp(logits - logits.max(axis=-1, keepdims=True)).cumsum(axis=-1)
    chosen: np.ndarray = (cumulative <= level * cumulative[:, -1:]).sum(axis=-1)
    return chosen
