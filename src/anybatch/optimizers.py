"""Optimisers of policy and value, and their step size over a run."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer

from anybatch.config.schema import OptimizerConfig
from anybatch.models.agent import Agent


class Optimizers:
    """One joint optimiser, or one each for policy and value where their epochs differ (E_pi != E_V in PPG)."""

    def __init__(self, agent: Agent, config: OptimizerConfig) -> None:
        """Build the optimisers over ``agent``'s parameters."""
        self.joint = config.policy_epochs == config.value_epochs
        if self.joint:
            both = [*agent.policy_parameters(), *agent.value_parameters()]
            groups = {"joint": list(dict.fromkeys(both))}  # a shared encoder's parameters once
        else:
            groups = {"policy": list(agent.policy_parameters()), "value": list(agent.value_parameters())}
        self.parameters: dict[str, list[Parameter]] = groups
        self.optimizers = {name: make_optimizer(parameters, config) for name, parameters in groups.items()}
        self._config = config

    def set_progress(self, fraction: float) -> None:
        """Set the step size for a run of which ``fraction`` (0 to 1) is done; it depends on nothing else."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = step_size(self._config, fraction)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


def make_optimizer(parameters: list[Parameter], config: OptimizerConfig) -> Optimizer:
    """Adam or SGD over fp32 ``parameters``, with the configured step size, in fused form."""
    if config.kind == "sgd":
        return SGD(parameters, lr=config.step_size, momentum=config.sgd_momentum, fused=True)
    return Adam(parameters, lr=config.step_size, betas=config.adam_betas, eps=config.adam_eps, fused=True)


def step_size(config: OptimizerConfig, fraction: float) -> float:
    """The step size when ``fraction`` (0 to 1) of the run's environment steps is done."""
    if config.schedule == "linear":
        return config.step_size * max(0.0, 1 - fraction)
    return config.step_size


def clip_gradients_(parameters: list[Parameter], max_norm: float | None) -> None:
    """Scale gradients in place so that their joint norm is at most ``max_norm``; None leaves them."""
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def drop_gradients(parameters: list[Parameter]) -> None:
    """``optimizer.zero_grad(set_to_none=True)`` without its overhead, which counts at small batches."""
    for parameter in parameters:
        parameter.grad = None
