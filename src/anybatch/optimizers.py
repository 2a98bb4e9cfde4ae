"""Optimisers of policy and value, and their step sizes over a run."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer

from anybatch.config.schedules import factor
from anybatch.config.schema import OptimizerConfig
from anybatch.errors import ConfigError
from anybatch.models.agent import Agent

_NUMBERS = ("betas", "eps", "momentum")
_FACTORS = "factors"
_LARGEST_FACTOR = 100.0


def make_optimizer(parameters: list[Parameter], config: OptimizerConfig) -> Optimizer:
    """Adam or SGD over ``parameters``, with the configured step size, in fused form.

    Raises:
        ConfigError: a parameter is narrower than fp32, as the state of its optimiser would be: bf16 cannot hold an
            average that moves by a thousandth a step.
    """
    for parameter in parameters:
        if parameter.element_size() < 4:
            raise ConfigError(
                f"a parameter of the network is {parameter.dtype}, but must be float32 (or float64): precision bf16 "
                "computes in bfloat16 with weights in float32"
            )
    if config.kind == "sgd":
        return SGD(parameters, lr=config.step_size, momentum=config.sgd_momentum, fused=True)
    return Adam(parameters, lr=config.step_size, betas=config.adam_betas, eps=config.adam_eps, fused=True)


def keep_moments(optimizer: Optimizer, group: Mapping[str, Any], before: Sequence[float] | None, c: float = 1) -> None:
    """Keep Adam's moments without their bias, m / (1 - beta^step), if a group's betas were others ``before``.

    A step then counts as ``c`` steps. Otherwise the new betas correct a bias that the moments do not have.
    """
    if before is None or tuple(before) == tuple(group["betas"]):
        return
    states = [optimizer.state[x] for x in group["params"] if x in optimizer.state]
    for state in (x for x in states if x["step"] > 0):
        old, new = float(state["step"]), float(state["step"]) * c
        for name, was, now in zip(("exp_avg", "exp_avg_sq"), before, group["betas"], strict=True):
            state[name] = state[name] * ((1 - now**new) / (1 - was**old))
        state["step"] = torch.full_like(state["step"], new)


class Optimizers:
    """One joint optimiser, or one each for policy and value where their epochs differ (E_pi != E_V in PPG)."""

    def __init__(
        self,
        agent: Agent,
        config: OptimizerConfig,
        make: Callable[[list[Parameter], OptimizerConfig], Optimizer] = make_optimizer,
    ) -> None:
        """Build the optimisers.

        Args:
            agent: whose parameters they train.
            config: their kind and numbers.
            make: builds each of them; replaced where stacked runs have different numbers.
        """
        self.joint = config.policy_epochs == config.value_epochs
        if self.joint:
            both = [*agent.policy_parameters(), *agent.value_parameters()]
            groups = {"joint": list(dict.fromkeys(both))}  # a shared encoder's parameters once
        else:
            groups = {"policy": list(agent.policy_parameters()), "value": list(agent.value_parameters())}
        self.parameters: dict[str, list[Parameter]] = groups
        self.optimizers = {name: make(parameters, config) for name, parameters in groups.items()}
        self._config = config
        self._step_sizes = [StepSizes(optimizer, config) for optimizer in self.optimizers.values()]
        self._factors = [1.0] * len(self._step_sizes[0].initial)  # by KL divergence, of each run
        self._once = list(self._factors)  # by effective sample size, for an iteration

    def set_progress(self, fraction: float) -> None:
        """Set the step sizes of the next iteration, for a run of which ``fraction`` (0 to 1) is done."""
        for step_sizes in self._step_sizes:
            step_sizes.set_progress(fraction, map(operator.mul, self._factors, self._once))

    def follow(self, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """Adapt the step sizes of the coming iteration to the last one, if the configuration asks for it.

        Args:
            statistics: has ``kl_proximal``, the mean KL divergence of the policy from the proximal one, for
                :func:`followed`, and ``effective_sample_size``, whose square root is a factor for one iteration;
                floats, or lists of R floats for R stacked runs.

        Returns:
            The column ``step_size`` of the last iteration, or nothing if step sizes follow the schedule alone.
        """
        config, count = self._config, len(self._factors)
        if not config.adaptive_step:
            return {}
        used = [group["lr"] for group in next(iter(self.optimizers.values())).param_groups]
        stacked = isinstance(statistics["kl_proximal"], Sequence)
        columns = {name: statistics[name] for name in ("kl_proximal", "effective_sample_size")}
        kls, shares = columns.values() if stacked else ([x] * count for x in columns.values())
        if config.kl_target is not None:
            pairs = zip(self._factors, kls, strict=True)
            self._factors = [followed(factor, kl, config.kl_target, config.kl_factor) for factor, kl in pairs]
        if config.follow_ess:
            self._once = [math.sqrt(share) if share > 0 else 1.0 for share in shares]  # NaN of a diverged run: as it is
        return {"step_size": used if stacked else used[0]}

    def state_dict(self) -> dict[str, Any]:
        """State of each optimiser, by name, and the factors of the step size if it is adaptive."""
        states: dict[str, Any] = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {**states, _FACTORS: [self._factors, self._once]} if self._config.adaptive_step else states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
            for group in optimizer.param_groups:  # the numbers of the configuration, which may have been edited
                before = group.get("betas")
                group |= {key: optimizer.defaults[key] for key in _NUMBERS if key in optimizer.defaults}
                keep_moments(optimizer, group, before)
        if self._config.adaptive_step and _FACTORS in state:
            self._factors, self._once = map(list, state[_FACTORS])

    def take_factors(self, state: Mapping[str, Any]) -> bool:
        """Take the factor by which another run's step size follows the KL divergence; returns whether it has one."""
        found = _FACTORS in state and self._config.kl_target is not None
        if found:
            self._factors = list(state[_FACTORS][0])
        return found


class StepSizes:
    """The step sizes of an optimiser over a run, by its schedule."""

    def __init__(self, optimizer: Optimizer, config: OptimizerConfig) -> None:
        """Take the step sizes at factor 1 from ``optimizer``, and the schedule from ``config``."""
        self._optimizer = optimizer
        self._schedule = config.schedule
        self.initial: list[float] = [group["lr"] for group in optimizer.param_groups]

    def set_progress(self, fraction: float, factors: Iterable[float] = itertools.repeat(1.0)) -> None:
        """Set the step sizes for a run of which ``fraction`` (0 to 1) of the environment steps is done.

        ``factors`` multiply them, one for each group of parameters.
        """
        for group, initial, adapted in zip(self._optimizer.param_groups, self.initial, factors, strict=False):
            group["lr"] = initial * factor(self._schedule, fraction) * adapted


def followed(factor: float, kl: float, target: float, by: float) -> float:
    """Factor of the step size after an iteration with a mean KL divergence of ``kl``, as in rsl_rl and rl_games.

    Divided by ``by`` above twice the target, multiplied by it below half of the target, and otherwise kept; from 1/100
    to 100 times the step size of the configuration. Without a positive divergence it is kept.

    >>> followed(1.0, 0.05, target=0.02, by=1.5), followed(1.0, 0.03, target=0.02, by=1.5)
    (0.6666666666666666, 1.0)

    Args:
        factor: before.
        kl: mean KL divergence of the policy from the proximal one over the gradient steps of the iteration.
        target: ``optimizer.kl_target``.
        by: ``optimizer.kl_factor``.
    """
    if kl > 2 * target:
        return max(factor / by, 1 / _LARGEST_FACTOR)
    if 0 < kl < target / 2:
        return min(factor * by, _LARGEST_FACTOR)
    return factor


def clip_gradients_(gradients: list[Tensor], max_norm: float | Tensor | None, *, run_axis: bool = False) -> None:
    """Scale gradients in place so that their joint norm is at most ``max_norm``, as PyTorch's ``clip_grad_norm_`` does.

    Args:
        gradients: of all parameters, on one device; with ``run_axis`` (R, ...), and each of R stacked runs has a norm
            of its own.
        max_norm: a number or a scalar; None leaves them.
        run_axis: whether gradients have a run axis.
    """
    if max_norm is None:
        return
    if not run_axis:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, _factor(max_norm, norm))
        return
    norm = torch.stack([x.flatten(1).norm(dim=1) for x in gradients]).norm(dim=0)
    factor = _factor(max_norm, norm)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))


def _factor(max_norm: float | Tensor, norm: Tensor) -> Tensor:
    """At most 1, with the epsilon of ``clip_grad_norm_``; 1 without a limit, even if the norm overflows."""
    return (max_norm / (norm + 1e-6)).nan_to_num(nan=1.0).clamp(max=1.0)


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the parameters that have one."""
    return [x.grad for x in parameters if x.grad is not None]


def stepper(optimizer: Optimizer) -> Callable[[], None]:
    """``optimizer.step``, for Adam in a quarter of its time on small networks.

    The result serves until the optimiser's state is loaded. It looks up the state once, and leaves out what PyTorch
    repeats for hooks, gradient scalers and several devices.
    """
    if type(optimizer) is not Adam or len(optimizer.param_groups) > 1 or not optimizer.defaults["fused"]:
        return optimizer.step
    group = optimizer.param_groups[0]
    parameters: list[Tensor] = group["params"]
    if any(x not in optimizer.state for x in parameters):  # the first step, or one of parameters without gradient
        return optimizer.step
    states = [optimizer.state[x] for x in parameters]
    counts = torch.stack([state["step"] for state in states])
    for state, count in zip(states, counts, strict=True):
        state["step"] = count  # in the memory of all, to which one operation adds 1
    averages, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    names = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
    beta1, beta2 = group["betas"]
    numbers = {**{name: group[name] for name in names}, "beta1": beta1, "beta2": beta2}

    @torch.no_grad()
    def step() -> None:
        gradients = gradients_of(parameters)
        if len(gradients) < len(parameters):
            optimizer.step()
            return
        counts.add_(1)
        torch._fused_adam_(parameters, gradients, averages, squares, [], steps, **numbers)

    return step


def drop_gradients(parameters: list[Parameter]) -> None:
    """``optimizer.zero_grad(set_to_none=True)`` without its overhead, which counts at small batches."""
    for parameter in parameters:
        parameter.grad = None
