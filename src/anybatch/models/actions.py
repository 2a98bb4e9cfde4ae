"""From a Gymnasium action space to a distribution, and from sampled actions to those of the environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anybatch.errors import ConfigError, EnvError
from anybatch.models.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    RandomSource,
    normal,
    uniform,
)
from anybatch.models.squashed import TanhGaussian

_UNBOUNDED = 1e30  # spaces that mean "no bound" often write the largest float instead of infinity
_MOST_CHOICES = 10_000


class ActionSpec:
    """Shapes and meaning of a policy's outputs for an action space.

    For a Box the policy's Gaussian lives in normalised units: where both bounds are finite, [-1, 1] maps affinely onto
    [low, high], and the environment gets the mapped action clipped to the bounds. Stored actions, log-probabilities,
    entropies and KL divergences are those of the unclipped normalised action. The map's constant Jacobian cancels in
    every ratio of two policies, and clipping is then part of the environment. Dimensions without both bounds pass
    through in the environment's units.

    With `squash` the environment gets tanh of the stored action, mapped onto [low, high], in place of clipping; see
    :class:`anybatch.models.squashed.TanhGaussian`.

    A Box of integers is treated as the MultiDiscrete with the same values.

    Raises EnvError for a space other than Discrete, MultiDiscrete, MultiBinary or Box, and ConfigError for `squash`
    with a Box that has no bounds.
    """

    space: gym.Space[Any]
    """The space that this was made from, or the MultiDiscrete that stands for a Box of integers."""
    num_params: int
    """Raw network outputs P per action."""
    shape: tuple[int, ...]
    """Shape of one action in the policy's form, which is also the stored one."""
    dtype: torch.dtype
    """Its dtype: int64, or float32 for a Box."""

    def __init__(self, space: gym.Space[Any], *, squash: bool = False) -> None:
        self._env_dtype = space.dtype
        if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.integer):
            space = _choices(space)
        self.space = space
        self._sizes: tuple[int, ...] = ()
        self.dtype = torch.int64
        self._as_is = False  # whether sampled actions need no conversion
        self._on_device: tuple[Tensor, ...] | None = None  # scale, centre and bounds of a Box
        if isinstance(space, gym.spaces.Discrete):
            self.shape, self.num_params = (), int(space.n)
            self._as_is = space.start == 0 and space.dtype == np.int64
        elif isinstance(space, gym.spaces.MultiDiscrete):
            self._sizes = tuple(int(size) for size in space.nvec.reshape(-1))
            self.shape, self.num_params = (len(self._sizes),), sum(self._sizes)
        elif isinstance(space, gym.spaces.MultiBinary):
            bits = int(np.prod(space.shape))
            self.shape, self.num_params = (bits,), bits
        elif isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self.shape, self.dtype = tuple(space.shape), torch.float32
            self.num_params = 2 * int(np.prod(space.shape))
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            low[low < -_UNBOUNDED], high[high > _UNBOUNDED] = -np.inf, np.inf
            bounded = np.isfinite(low) & np.isfinite(high)
            self._low, self._high = low, high
            self._scale = np.where(bounded, np.where(bounded, high, 1.0) - np.where(bounded, low, -1.0), 2.0) / 2
            self._center = np.where(bounded, low, -1.0) + self._scale
            if squash and not bounded.all():
                found = " ".join(str(space).split())
                raise ConfigError(
                    f"model.gaussian.squash is true, but the action space is {found}, which lacks finite bounds; "
                    "set it to false, or declare finite bounds, which gymnasium.wrappers.TransformAction can do"
                )
        else:
            raise EnvError(
                f"Action space {space} is not supported; supported are Discrete, MultiDiscrete, MultiBinary and Box."
            )
        self.squashed = squash and self.continuous
        """Whether continuous actions are squashed by tanh."""

    @property
    def continuous(self) -> bool:
        """Whether the policy is a Gaussian, whose log standard deviations are parameters of the head."""
        return isinstance(self.space, gym.spaces.Box)

    def distribution(self, params: Tensor) -> Distribution:
        """The distribution with raw network outputs `params` (..., P)."""
        if isinstance(self.space, gym.spaces.Discrete):
            return Categorical(params)
        if isinstance(self.space, gym.spaces.MultiDiscrete):
            return MultiCategorical(params, self._sizes)
        if isinstance(self.space, gym.spaces.MultiBinary):
            return Bernoulli(params)
        return TanhGaussian(params, self.shape) if self.squashed else DiagonalGaussian(params, self.shape)

    def noise(
        self, leading: tuple[int, ...], generator: RandomSource = None, device: torch.device | None = None
    ) -> Tensor:
        """Draw random numbers (*leading, K) for :meth:`Distribution.transform`, which makes actions (*leading, *shape).

        A draw for a whole rollout costs no more than a draw for one of its steps.
        """
        like = torch.empty((), device=device)
        if self.continuous:
            return normal(like, (*leading, self.num_params // 2), generator)
        return uniform(like, (*leading, *(self.shape or (1,))), generator)

    def to_env(self, action: Tensor) -> npt.NDArray[Any]:
        """Convert actions (..., *shape) to the environment's form: (..., *space.shape) in the space's dtype."""
        return self.array_to_env(action.detach().cpu().numpy())

    def tensor_to_env(self, action: Tensor) -> Tensor:
        """:meth:`to_env` on the device of ``action``, for environments of tensors: int64, or float32 for reals."""
        if not isinstance(self.space, gym.spaces.Box):
            action = action.reshape(*action.shape[: action.dim() - len(self.shape)], *(self.space.shape or ()))
            start = getattr(self.space, "start", 0)
            if not np.any(start):
                return action
            return action + torch.as_tensor(np.asarray(start, np.int64), device=action.device)  # may be unsigned
        if self._on_device is None or self._on_device[0].device != action.device:
            numbers = (self._scale, self._center, self.space.low, self.space.high)
            self._on_device = tuple(torch.as_tensor(x, dtype=torch.float32, device=action.device) for x in numbers)
        scale, center, low, high = self._on_device
        action = action.tanh() if self.squashed else action
        return torch.addcmul(center, action, scale).clamp(low, high)

    def array_to_env(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """:meth:`to_env` of an array."""
        if self._as_is:
            return array.copy()  # an environment that modifies its action must not change the stored one
        if isinstance(self.space, gym.spaces.Box):
            array = np.tanh(array) if self.squashed else array
            # minimum/maximum rather than clip: in the space's dtype the bounds must hold exactly
            scaled = (array * self._scale + self._center).astype(self.space.dtype)
            return np.asarray(np.minimum(np.maximum(scaled, self.space.low), self.space.high))
        if self.shape != self.space.shape:
            array = array.reshape(array.shape[: array.ndim - len(self.shape)] + tuple(self.space.shape or ()))
        if isinstance(self.space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            array = array + self.space.start
        return np.asarray(array, dtype=self._env_dtype)


def _choices(space: gym.spaces.Box) -> gym.spaces.MultiDiscrete:
    """The MultiDiscrete with the values of a Box of integers."""
    low, high = space.low.astype(object), space.high.astype(object)  # exact: int64 would overflow
    sizes = np.asarray(high - low + 1)  # of a Box of shape (), the difference is no array
    if sizes.size and sizes.max() > _MOST_CHOICES:
        raise EnvError(
            f"Action space {' '.join(str(space).split())} has {sizes.max():,} values in a dimension, and each would be "
            f"an output of the policy: at most {_MOST_CHOICES:,} are supported; use a Box of floats and round in the "
            "environment."
        )
    return gym.spaces.MultiDiscrete(sizes.astype(np.int64), start=low.astype(np.int64))
