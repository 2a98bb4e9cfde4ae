"""One iteration of optimisation for R runs, built on the same objectives as :mod:`anybatch.policy_phase`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybatch.config.schema import PolicyConfig, TrainConfig
from anybatch.diagnostics.statistics import policy_statistics
from anybatch.models.actions import ActionSpec
from anybatch.policy_phase import surrogate_loss
from anybatch.reproduce.stacked.minibatches import StackedBatch, shuffled
from anybatch.reproduce.stacked.networks import StackedNetworks
from anybatch.reproduce.stacked.optimizers import StackedAdam, gradients_of_runs
from anybatch.reproduce.stacked.proximal import StackedProximal
from anybatch.reproduce.stacked.weights import Block, Views

Losses = tuple[Tensor, Mapping[str, Tensor]]
"""Mean loss over the samples of all runs, and statistics (R,) by name."""


@dataclass(frozen=True)
class Coefficients:
    """The objectives' numbers: (R, 1), or a float where all runs have the same."""

    clip: float | Tensor
    kl_coefficient: float | Tensor
    entropy_coefficient: float | Tensor
    max_importance_ratio: float | Tensor
    proximal_importance: Tensor
    """(R, 1) bool, the proximal policy is in the denominator of the importance weight."""
    any_proximal_importance: bool

    @classmethod
    def of(cls, configs: Sequence[PolicyConfig]) -> Coefficients:
        """Those of R runs."""
        importance = [config.importance == "proximal" for config in configs]
        return cls(
            clip=_per_run([config.clip for config in configs]),
            kl_coefficient=_per_run([config.kl_coefficient for config in configs]),
            entropy_coefficient=_per_run([config.entropy_coefficient for config in configs]),
            max_importance_ratio=_per_run([config.max_importance_ratio for config in configs]),
            proximal_importance=torch.tensor(importance).unsqueeze(1),
            any_proximal_importance=any(importance),
        )


@dataclass(frozen=True)
class StackedLearner:
    """What a policy phase of R runs trains, and with what."""

    config: TrainConfig
    """Supplies what the runs have in common."""
    coefficients: Coefficients
    networks: StackedNetworks
    action_spec: ActionSpec
    blocks: Mapping[str, Block]
    weights: Mapping[str, Tensor]
    """(R, P) of each block, changed in place."""
    proximal: StackedProximal
    optimizers: Mapping[str, StackedAdam]
    """``joint``, or ``policy`` and ``value``."""
    shuffles: Sequence[torch.Generator]
    statistics: bool
    """Whether :func:`policy_phase` returns more than it needs itself."""

    @property
    def runs(self) -> int:
        """R."""
        return len(self.shuffles)

    def finite(self) -> Tensor:
        """(R,) bool, the run's weights can be trained on."""
        return torch.stack([torch.isfinite(rows.norm(dim=1)) for rows in self.weights.values()]).all(0)

    def views(self, weights: Mapping[str, Tensor]) -> Views:
        """All parameters by name in matrices of weights, with their gradients."""
        return {name: view for group, rows in weights.items() for name, view in self.blocks[group].views(rows).items()}


def policy_phase(batch: StackedBatch, learner: StackedLearner) -> dict[str, Tensor]:
    """Optimise R policies and value functions on one iteration's data, in the order of the single-run phase.

    Args:
        batch: (R, N, T, ...) data with advantages and value targets.
        learner: what is trained; changed in place.

    Returns:
        Statistics (R,) of the iteration by column name, averaged over gradient steps; none unless asked for.
    """
    optimizer = learner.config.optimizer
    learner.proximal.before_iteration()
    seen: list[Mapping[str, Tensor]] = []
    if "joint" in learner.optimizers:
        seen += _epochs(batch, learner, "joint", optimizer.policy_epochs, _joint_loss)
        return _averages(seen)
    values = list(_epochs(batch, learner, "value", optimizer.value_epochs, _value_loss))
    seen += _epochs(batch, learner, "policy", optimizer.policy_epochs, _policy_loss)
    return _averages(values) | _averages(seen)


_TRAINED = {"joint": ("policy", "value"), "policy": ("policy",), "value": ("value",)}


def trained(group: str, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The matrices that an optimiser changes."""
    return [weights[name] for name in _TRAINED[group]]


def _epochs(
    batch: StackedBatch,
    learner: StackedLearner,
    group: str,
    epochs: int,
    loss_function: Callable[[StackedBatch, StackedLearner, Views], Losses],
) -> Iterator[Mapping[str, Tensor]]:
    weights = {name: rows.detach().requires_grad_() for name, rows in learner.weights.items() if name != "auxiliary"}
    for _ in range(epochs):
        for minibatch in shuffled(batch, learner.config.optimizer.minibatches, learner.shuffles):
            loss, seen = loss_function(minibatch, learner, learner.views(weights))
            gradients = gradients_of_runs(loss, trained(group, weights), learner.runs)
            learner.optimizers[group].step(gradients)
            if group != "value":
                learner.proximal.after_gradient_step()
            yield seen


def _joint_loss(minibatch: StackedBatch, learner: StackedLearner, views: Views) -> Losses:
    params, value = learner.networks.policy_and_value(views, minibatch.vectors)
    policy, seen = policy_objective(minibatch, params, learner)
    value_term, value_seen = _squared_error(minibatch, value, learner)
    return policy + value_term, {**seen, **value_seen}


def _policy_loss(minibatch: StackedBatch, learner: StackedLearner, views: Views) -> Losses:
    return policy_objective(minibatch, learner.networks.policy(views, minibatch.vectors), learner)


def _value_loss(minibatch: StackedBatch, learner: StackedLearner, views: Views) -> Losses:
    return _squared_error(minibatch, learner.networks.value(views, minibatch.vectors), learner)


def _squared_error(minibatch: StackedBatch, value: Tensor, learner: StackedLearner) -> Losses:
    errors = learner.config.optimizer.value_coefficient * (value - minibatch.value_target).square()
    return errors.mean(), {"value_loss": errors.detach().mean(1)} if learner.statistics else {}


def policy_objective(minibatch: StackedBatch, params: Tensor, learner: StackedLearner) -> Losses:
    """The policy objective with its entropy bonus, over all runs; see :func:`anybatch.policy_phase.policy_objective`.

    Args:
        minibatch: (R, B, ...) samples.
        params: (R, B, P) raw distribution parameters of pi_theta, with gradient.
        learner: supplies the proximal policies and the numbers.
    """
    config, numbers = learner.config.policy, learner.coefficients
    policy = learner.action_spec.distribution(params)
    logp = policy.log_prob(minibatch.action)
    with torch.no_grad():
        proximal_params = _proximal_params(minibatch, learner)
        proximal = learner.action_spec.distribution(proximal_params)
        logp_importance = logp_proximal = minibatch.behavior_logp
        if learner.proximal.needed and _uses_proximal_logp(learner):
            computed = proximal.log_prob(minibatch.action)
            logp_proximal = torch.where(learner.proximal.recorded, minibatch.behavior_logp, computed)
        if numbers.any_proximal_importance:
            logp_importance = torch.where(numbers.proximal_importance, logp_proximal, minibatch.behavior_logp)
    logps = (logp, logp_proximal, logp_importance)
    loss = surrogate_loss(config, numbers, policy, proximal, *logps, minibatch.advantage)
    entropy = policy.entropy()
    seen: Mapping[str, Tensor] = {}
    if learner.statistics:
        behavior_params = minibatch.behavior_params
        seen_logps = (logp, logp_proximal, minibatch.behavior_logp, logp_importance)
        statistics = _statistics(learner, params, proximal_params, behavior_params, *seen_logps)
        seen = {**statistics, "entropy": entropy.mean(1)}
    return loss - (numbers.entropy_coefficient * entropy).mean(), {name: x.detach() for name, x in seen.items()}


def _uses_proximal_logp(learner: StackedLearner) -> bool:
    """False where the exact KL is all that the proximal policies are needed for."""
    policy = learner.config.policy
    exact_kl = policy.objective == "kl" and policy.kl_estimator == "exact"
    return learner.statistics or learner.coefficients.any_proximal_importance or not exact_kl


def _proximal_params(minibatch: StackedBatch, learner: StackedLearner) -> Tensor:
    """(R, B, P) raw distribution parameters of the proximal policies."""
    proximal = learner.proximal
    if not proximal.needed:
        return minibatch.behavior_params
    views = learner.blocks["policy"].views(proximal.weights)
    params = learner.networks.policy(views, minibatch.vectors)
    if not learner.proximal.any_recorded:
        return params
    return torch.where(proximal.recorded.unsqueeze(-1), minibatch.behavior_params, params)


def _statistics(learner: StackedLearner, *tensors: Tensor) -> dict[str, Tensor]:
    """:func:`anybatch.diagnostics.statistics.policy_statistics` of each run, (R,) by name."""
    distribution = learner.action_spec.distribution

    def of_run(params: Tensor, proximal: Tensor, behavior: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        *logps, clip, cap = rest
        numbers: dict[str, Any] = {"clip": clip, "max_importance_ratio": cap}
        config = replace(learner.config.policy, **numbers)
        policies = (distribution(params), distribution(proximal), distribution(behavior))
        return policy_statistics(*policies, *logps, config)  # type: ignore[arg-type,call-arg]

    numbers = (learner.coefficients.clip, learner.coefficients.max_importance_ratio)
    expanded = [torch.as_tensor(number).expand(learner.runs, 1).squeeze(1) for number in numbers]
    with torch.no_grad():
        seen: dict[str, Tensor] = torch.func.vmap(of_run)(*(x.detach() for x in tensors), *expanded)
    return seen


def _averages(seen: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Means over gradient steps; of a column starting with ``max_``, what the first one showed."""
    names = seen[0] if seen else ()
    return {n: seen[0][n] if n.startswith("max_") else torch.stack([s[n] for s in seen]).mean(0) for n in names}


def _per_run(values: Sequence[float]) -> float | Tensor:
    return values[0] if len(set(values)) == 1 else torch.tensor(values).unsqueeze(1)
