"""Generalised advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    discount: float | Tensor,
    gae_lambda: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (gamma and lambda of appendix B's table) and value targets.

    ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and ``A_t = delta_t + gamma lambda A_{t+1}``, where ``done`` cuts the
    recursion and ``terminated`` zeroes the bootstrap. A truncated step is done but not terminated: its ``next_value``
    is the value of the episode's real last observation, not of the reset one.

    Args:
        reward: (N, T) rewards; any further leading axes are allowed throughout.
        value: (N, T) V(s_t).
        next_value: (N, T) V(s_{t+1}), where s_{t+1} is what followed before any reset.
        done: (N, T) bool, the episode ended with this step for whatever reason.
        terminated: (N, T) bool, it ended in a terminal state.
        discount: gamma.
        gae_lambda: lambda.

    Returns:
        (N, T) advantages and (N, T) value targets ``A + V``, fp32, without gradient.
    """
    with torch.no_grad():
        reward, value, next_value = reward.float(), value.float(), next_value.float()
        delta = reward + discount * torch.where(terminated, 0.0, next_value) - value
        carry = torch.where(done, 0.0, torch.ones_like(delta) * (discount * gae_lambda))
        deltas, carries = delta.unbind(-1), carry.unbind(-1)
        running = torch.zeros_like(deltas[0])
        advantages = []
        for delta_t, carry_t in zip(reversed(deltas), reversed(carries), strict=True):
            running = torch.addcmul(delta_t, carry_t, running)
            advantages.append(running)
        advantage = torch.stack(advantages[::-1], dim=-1)
        return advantage, advantage + value


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Share of the targets' variance that the value function explains, ``1 - Var[target - value]/Var[target]``.

    Args:
        value: predicted values, any shape.
        target: value targets, the same shape.

    Returns:
        Scalar, at most 1; NaN where the targets do not vary, since the share is then undefined.
    """
    target, value = target.double(), value.double()  # where the variance of equal fp32 numbers is exactly 0
    variance = target.var(correction=0)
    residual = (target - value).var(correction=0)
    return torch.where(variance > 0, 1 - residual / variance, torch.nan).float()
