"""One iteration of optimisation: the inner two loops of the pseudocode in appendix A."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from anybatch.config.schema import PolicyConfig, TrainConfig
from anybatch.diagnostics.noise_scale import NoiseScale
from anybatch.diagnostics.statistics import Averages, PolicySamples
from anybatch.distributed.collectives import check_interrupt_if_single_worker, mean_gradients_
from anybatch.errors import DivergenceError
from anybatch.minibatches import Batch, Minibatch, shuffled
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import Agent
from anybatch.models.distributions import Distribution
from anybatch.objectives import decoupled_clip_loss, decoupled_kl_loss, half_squared_log_ratio
from anybatch.optimizers import Optimizers, clip_gradients_, drop_gradients
from anybatch.proximal import ProximalPolicy
from anybatch.system.signals import Interrupts


@dataclass(frozen=True)
class Learner:
    """What a policy phase trains, and with what."""

    config: TrainConfig
    agent: Agent
    action_spec: ActionSpec
    proximal: ProximalPolicy
    optimizers: Optimizers
    shuffle: torch.Generator
    """CPU generator of the minibatch order."""
    interrupts: Interrupts
    noise: NoiseScale | None = None
    """Estimates the gradient noise scale on the way; None leaves it out."""

    @property
    def micro_batch(self) -> int:
        """Most samples in one forward-backward pass, by the configuration or the device."""
        return self.config.micro_batch or (2048 if self.on_gpu else 256)

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self.agent.parameters()).device

    @property
    def on_gpu(self) -> bool:
        """Whether that is a GPU."""
        return self.device.type == "cuda"


def policy_phase(batch: Batch, learner: Learner) -> dict[str, float]:
    """Optimise policy and value on one iteration's data.

    Policy and value share each gradient step where their numbers of epochs agree; otherwise each has its own epochs
    and its own optimiser, the value function first as in the authors' code.

    Args:
        batch: (N, T, ...) data with advantages and value targets.
        learner: what is trained; changed in place.

    Returns:
        Statistics of the iteration, averaged over its gradient steps, by column name.

    Raises:
        DivergenceError: a loss or a weight is not finite any more.
    """
    optimizer = learner.config.optimizer
    learner.proximal.before_iteration()
    statistics = Averages(learner.action_spec.distribution, learner.config.policy)
    if learner.optimizers.joint:
        _epochs(batch, learner, "joint", optimizer.policy_epochs, _joint_loss, statistics)
    else:
        _epochs(batch, learner, "value", optimizer.value_epochs, _value_loss, statistics)
        _epochs(batch, learner, "policy", optimizer.policy_epochs, _policy_loss, statistics)
    seen = statistics.result()
    _check_finite(seen, learner.agent)
    return seen | (learner.noise.result() if learner.noise else {})


def _check_finite(seen: Mapping[str, float], agent: Agent) -> None:
    """Once an iteration, so that no checkpoint is written of weights that cannot be trained on."""
    broken = [
        f"{name} was {seen[name]}" for name in ("policy_loss", "value_loss", "entropy") if not math.isfinite(seen[name])
    ]
    # the last step can break weights although every loss, computed before its step, was finite
    norms = torch.stack([x.detach().norm() for x in agent.parameters()])
    if not broken and not bool(torch.isfinite(norms).all()):
        broken = ["weights overflowed"]
    if broken:
        raise DivergenceError(
            f"training is not finite any more ({', '.join(broken)}): lower optimizer.step_size; the newest checkpoint "
            "is from before"
        )


Result = TypeVar("Result")

Losses = tuple[Tensor, Mapping[str, Tensor], PolicySamples | None]
"""A scalar loss with its gradient, and what was seen, by name."""


def _epochs(
    batch: Batch,
    learner: Learner,
    group: str,
    epochs: int,
    loss_function: Callable[[Minibatch, Learner], Losses],
    statistics: Averages,
) -> None:
    config = learner.config
    optimizer, parameters = learner.optimizers.optimizers[group], learner.optimizers.parameters[group]
    most = learner.micro_batch
    losses = fused(loss_function) if config.compile else loss_function
    for epoch in range(epochs):
        for minibatch in shuffled(batch, config.optimizer.minibatches, learner.shuffle):
            for piece in minibatch.micro_batches(most):  # bounds memory; the gradients add up to the same
                check_interrupt_if_single_worker(learner.interrupts)
                share = len(piece) / len(minibatch)
                loss, seen, samples = losses(piece, learner)
                (loss * share).backward()
                statistics.add(seen, share, samples)
            mean_gradients_(parameters, len(minibatch) / config.optimization_batch, learner.interrupts)
            if learner.noise and group != "value" and epoch == 0:  # later epochs see the same samples again
                learner.noise.add(parameters, optimizer, round(config.optimization_batch))
            clip_gradients_(parameters, config.optimizer.max_grad_norm)
            optimizer.step()
            drop_gradients(parameters)
            if group != "value":
                learner.proximal.after_gradient_step()  # theta_prox <- EWMA(theta)
                statistics.end_gradient_step()


@functools.cache
def fused(loss_function: Callable[..., Result]) -> Callable[..., Result]:
    """A module's function, its forward and backward pass fused into few kernels when it is first called.

    For each configuration anew, since its numbers become constants. PyTorch keeps eight in a process (its
    ``recompile_limit``), runs a ninth as if nothing had been compiled, and says so.
    """
    return torch.compile(loss_function, dynamic=False)  # shapes are few and fixed


def _joint_loss(minibatch: Minibatch, learner: Learner) -> Losses:
    params, value = learner.agent(minibatch.observation)
    policy, seen, samples = policy_objective(minibatch, params, learner)
    value_term = value_loss(value, minibatch, learner.config)
    return policy + value_term, {**seen, "value_loss": value_term.detach()}, samples


def _policy_loss(minibatch: Minibatch, learner: Learner) -> Losses:
    return policy_objective(minibatch, learner.agent.policy(minibatch.observation), learner)


def _value_loss(minibatch: Minibatch, learner: Learner) -> Losses:
    loss = value_loss(learner.agent.value(minibatch.observation), minibatch, learner.config)
    return loss, {"value_loss": loss.detach()}, None


def policy_objective(minibatch: Minibatch, params: Tensor, learner: Learner) -> Losses:
    """Minus the policy objective of the configuration, entropy bonus included, and what was seen.

    Args:
        minibatch: B samples.
        params: (B, P) raw distribution parameters of pi_theta, with gradient.
        learner: supplies the proximal policy and the configuration.
    """
    config = learner.config.policy
    proximal_params = learner.proximal.params(minibatch)  # compute pi_prox for minibatch
    policy, proximal = (learner.action_spec.distribution(x) for x in (params, proximal_params))
    logp = policy.log_prob(minibatch.action)
    with torch.no_grad():
        logp_proximal = _proximal_logp(minibatch, proximal, config.proximal)
    logp_importance = minibatch.behavior_logp if config.importance == "behavior" else logp_proximal
    logps = (logp, logp_proximal, logp_importance)
    loss = surrogate_loss(config, config, policy, proximal, *logps, minibatch.advantage)
    entropy = policy.entropy().mean()
    samples = PolicySamples(
        params=params.detach(),
        proximal_params=proximal_params,
        behavior_params=minibatch.behavior_params,
        logp=logp.detach(),
        logp_proximal=logp_proximal,
        logp_behavior=minibatch.behavior_logp,
        logp_importance=logp_importance,
    )
    seen = {"policy_loss": loss.detach(), "entropy": entropy.detach()}
    return loss - config.entropy_coefficient * entropy, seen, samples


class Coefficients(Protocol):
    """The numbers of the objectives: floats, or tensors that broadcast against the samples."""

    @property
    def clip(self) -> float | Tensor:
        """Epsilon."""

    @property
    def kl_coefficient(self) -> float | Tensor:
        """Beta."""

    @property
    def max_importance_ratio(self) -> float | Tensor:
        """Cap on pi_theta / pi_behav."""


def surrogate_loss(
    config: PolicyConfig,
    numbers: Coefficients,
    policy: Distribution,
    proximal: Distribution,
    logp: Tensor,
    logp_proximal: Tensor,
    logp_importance: Tensor,
    advantage: Tensor,
) -> Tensor:
    """Minus the decoupled objective that the configuration names, for one run or for a stack of them.

    Args:
        config: which objective, and which KL estimator.
        numbers: its coefficients; for one run the configuration itself.
        policy: pi_theta(.|s), with gradient.
        proximal: pi_prox(.|s).
        logp: log pi_theta(a|s), with gradient; any shape, and so are the rest.
        logp_proximal: log pi_prox(a|s).
        logp_importance: log-probability in the denominator of the importance weight.
        advantage: advantage estimates.

    Returns:
        Scalar mean over the samples.
    """
    cap = numbers.max_importance_ratio
    if config.objective == "clip":
        return decoupled_clip_loss(
            logp, logp_proximal, logp_importance, advantage, clip=numbers.clip, max_importance_ratio=cap
        )
    exact = config.kl_estimator == "exact"
    kl = proximal.kl(policy) if exact else half_squared_log_ratio(logp, logp_proximal)
    return decoupled_kl_loss(
        logp, logp_importance, advantage, kl, kl_coefficient=numbers.kl_coefficient, max_importance_ratio=cap
    )


def _proximal_logp(minibatch: Minibatch, proximal: Distribution, kind: str) -> Tensor:
    # the recorded value, so that the coupled ratio is the textbook one to the last bit
    return minibatch.behavior_logp if kind == "behavior" else proximal.log_prob(minibatch.action)


def value_loss(value: Tensor, minibatch: Minibatch, config: TrainConfig) -> Tensor:
    """``value_coefficient * mean((v - target)^2)``; neither the value nor its gradient is clipped.

    Args:
        value: (B,) predicted values, with gradient.
        minibatch: B samples with their targets.
        config: supplies the coefficient.
    """
    return config.optimizer.value_coefficient * (value - minibatch.value_target).square().mean()
