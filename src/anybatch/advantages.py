"""Generalised advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from anybatch.objectives import check_alike, check_coefficient, check_mask, known_true


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
    """Generalised advantage estimates and value targets of (N, T) data: environments first, time last.

    ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and ``A_t = delta_t + gamma lambda A_{t+1}`` (gamma and lambda of
    appendix B's table), where ``done`` cuts the recursion and ``terminated`` zeroes the bootstrap. A truncated step is
    done but not terminated: its ``next_value`` is the value of the episode's real last observation, not of the reset
    one. Data (T, N) must be transposed: shapes alone cannot show it.

    Args:
        reward: (N, T) rewards; any further leading axes are allowed throughout, and so are integer rewards and values.
        value: (N, T) V(s_t).
        next_value: (N, T) V(s_{t+1}), where s_{t+1} is what followed before any reset.
        done: (N, T) bool, the episode ended with this step for whatever reason.
        terminated: (N, T) bool, it ended in a terminal state.
        discount: gamma, from 0 to 1; a tensor must broadcast against (N, 1).
        gae_lambda: lambda; likewise.

    Returns:
        (N, T) advantages and (N, T) value targets ``A + V``, fp32, without gradient.

    Raises:
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, a coefficient is out of range, there are no time steps, or (where it can be read at
            once) a step is terminated but not done.
    """
    reward, value, next_value = (floating(x) for x in (reward, value, next_value))
    check_alike(2, reward=reward, value=value, next_value=next_value)
    for name, mask in (("done", done), ("terminated", terminated)):
        check_mask(name, mask, reward)
    discount = check_coefficient("discount", discount, reward)
    gae_lambda = check_coefficient("gae_lambda", gae_lambda, reward)
    for name, coefficient in (("discount", discount), ("gae_lambda", gae_lambda)):
        if not isinstance(coefficient, Tensor) and not coefficient <= 1:
            raise ValueError(f"{name} is {coefficient}, but must be from 0 to 1")
    if not reward.shape[-1]:
        raise ValueError(f"reward has shape {tuple(reward.shape)}, but must have at least one time step")
    if known_true(terminated > done):
        raise ValueError("terminated is true for a step for which done is not, but an episode that terminates is done")
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


def floating(x: Tensor) -> Tensor:
    """Convert integers, such as rewards of 0 and 1, to float64; return anything else unchanged."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        return x
    return x.double()


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Share of the targets' variance that the value function explains, ``1 - Var[target - value]/Var[target]``.

    Args:
        value: predicted values, any shape.
        target: value targets, the same shape.

    Returns:
        Scalar, at most 1; NaN where the targets do not vary, since the share is then undefined.

    Raises:
        TypeError: an argument is no floating-point tensor.
        ValueError: the shapes differ.
    """
    check_alike(value=value, target=target)
    target, value = target.double(), value.double()  # where the variance of equal fp32 numbers is exactly 0
    variance = target.var(correction=0)
    residual = (target - value).var(correction=0)
    return torch.where(variance > 0, 1 - residual / variance, torch.nan).float()
