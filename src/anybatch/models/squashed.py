"""Gaussian policies whose actions are squashed into a bounded range by tanh."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn import functional

from anybatch.models.distributions import DiagonalGaussian

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_WEIGHTS = _WEIGHTS / math.sqrt(2 * math.pi)


@dataclass(frozen=True, eq=False)
class TanhGaussian(DiagonalGaussian):
    """Independent normals u whose actions are tanh(u); everything is in terms of u, which is stored.

    From tanh(u) the argument of a saturated action could not be recovered. :meth:`ActionSpec.to_env` applies tanh and
    maps [-1, 1] onto the environment's range. :meth:`mode` gives the means, whose tanh is the median action.

    The map is one-to-one, so that KL divergences are exactly those of the normals.
    """

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density (...) of the actions tanh(u) in [-1, 1], for u (..., *shape)."""
        leading = action.shape[: action.dim() - len(self.shape)]
        return super().log_prob(action) - log_slope(action.reshape(*leading, self.params.shape[-1] // 2)).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy (...) of tanh(u) in nats; at most log 2 per dimension, that of a uniform action.

        It is that of the normals plus E[log(1 - tanh(u)^2)], which has no closed form: Gauss-Hermite quadrature with
        32 nodes has no noise, is differentiable, and is right to 0.002 for standard deviations up to e.
        """
        mean, log_std = self.params.chunk(2, dim=-1)
        nodes, weights = (mean.new_tensor(x) for x in (_NODES.tolist(), _WEIGHTS.tolist()))
        u = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes
        return super().entropy() + (log_slope(u) * weights).sum((-2, -1))


def log_slope(u: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2)``, the logarithm of tanh's derivative, which does not overflow or cancel for large u."""
    return 2 * (math.log(2) - u - functional.softplus(-2 * u))
