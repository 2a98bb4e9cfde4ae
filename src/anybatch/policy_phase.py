"""One iteration of optimisation: the inner two loops of the pseudocode in appendix A."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from anybatch.config.schedules import scheduled_policy
from anybatch.config.schema import PolicyConfig, TrainConfig
from anybatch.diagnostics.noise_scale import NoiseScale
from anybatch.diagnostics.statistics import Averages, PolicySamples
from anybatch.distributed.collectives import (
    check_interrupt_if_single_worker,
    is_distributed,
    mean_gradients_,
    mean_over_workers,
)
from anybatch.errors import DivergenceError
from anybatch.gradients import AddGradients, CompiledGradients, Losses, Part, Program, add_gradients
from anybatch.minibatches import Batch, Generators, Minibatch, shuffled
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import Agent
from anybatch.models.distributions import Distribution
from anybatch.objectives import (
    LogProbs,
    behavior_share,
    check_alike,
    decoupled_clip_loss,
    decoupled_kl_loss,
    half_squared_log_ratio,
    interpolated_logp,
    second_moment_mask,
)
from anybatch.optimizers import Optimizers, clip_gradients_, drop_gradients, gradients_of, stepper
from anybatch.proximal import ProximalPolicy
from anybatch.sampling.replay import RecentBatches, passes
from anybatch.system.signals import Interrupts

CPU_MICRO_BATCH = 256
"""Most samples in one forward-backward pass on a CPU, unless the configuration has a number."""

Show: TypeAlias = Callable[[str], None]
"""Shows a text to the user."""


@dataclass(frozen=True)
class Learner:
    """Everything that a policy phase trains or uses."""

    config: TrainConfig
    agent: Agent
    action_spec: ActionSpec
    proximal: ProximalPolicy
    optimizers: Optimizers
    shuffle: Generators
    """CPU generator of the minibatch order; one for each of R stacked runs."""
    interrupts: Interrupts
    noise: NoiseScale | None = None
    """Estimates the gradient noise scale; None leaves it out."""
    recent: RecentBatches = field(default_factory=RecentBatches)
    """Data of the last iterations that has passes to come, if these are spread out."""
    policy_statistics: bool = True
    """Whether to compute :func:`~anybatch.diagnostics.statistics.policy_statistics`."""
    lag: int = 0
    """Age of the iteration's data in iterations, for an interpolated proximal policy."""
    programs: dict[Callable[..., Any], dict[Any, Program]] = field(default_factory=dict)
    """Compiled programs of each loss, if ``compile`` is set."""

    def gradients(
        self, losses_of: Callable[[Part, Learner], Losses], parameters: Sequence[Parameter]
    ) -> AddGradients[Part]:
        """:func:`~anybatch.gradients.add_gradients` of these losses, compiled if ``compile`` is set."""

        def losses(part: Part) -> Losses:
            return losses_of(part, self)

        if not self.config.compile:
            return functools.partial(add_gradients, losses, parameters)
        modules = [x for x in (self.agent, self.proximal.module) if x is not None]
        return CompiledGradients(losses, modules, parameters, self.programs.setdefault(losses_of, {}))

    @property
    def micro_batch(self) -> int:
        """Most samples in one forward-backward pass, by the configuration or the device."""
        return self.config.micro_batch or (2048 if self.on_gpu else CPU_MICRO_BATCH)

    def update_observation_normalizer(self, moments: Tensor) -> None:
        """Add a rollout's moments (N, 2, F) to the statistics that the next one is normalised with."""
        normalizer = self.agent.observation_normalizer
        assert normalizer is not None
        normalizer.update(moments, self.config.rollout.steps)

    def at(self, progress: float, lag: int = 0) -> Learner:
        """The same learner with the coefficients of its schedules when ``progress`` (0 to 1) of the run is done.

        ``lag`` is the age of the data that it will train on, in iterations.
        """
        policy = scheduled_policy(self.config.policy, progress)
        if policy is self.config.policy and lag == self.lag:
            return self
        return replace(self, config=replace(self.config, policy=policy), lag=lag)

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return next(self.agent.parameters()).device

    @property
    def on_gpu(self) -> bool:
        """Whether the networks are on a GPU."""
        return self.device.type == "cuda"


def policy_phase(batch: Batch, learner: Learner, show: Show = lambda text: None) -> dict[str, Any]:
    """Optimise policy and value on one iteration's data.

    Policy and value share each gradient step where their numbers of epochs agree; otherwise each has its own epochs
    and its own optimiser, the value function first as in the authors' code.

    Args:
        batch: (N, T, ...) data with advantages and value targets; (R, N, T, ...) for R stacked runs.
        learner: networks, optimisers and proximal policy; changed in place.
        show: gets a text about the progress before each epoch but the first.

    Returns:
        Statistics of the iteration, averaged over its gradient steps, by column name: floats, or lists of R floats.

    Raises:
        DivergenceError: a loss or a weight is not finite any more, in every run.
    """
    optimizer = learner.config.optimizer
    learner.proximal.before_iteration()
    batches = learner.recent.and_newest(batch)  # the batch alone, unless epochs are spread out
    averages = Averages(learner.action_spec.distribution, learner.config.policy)
    if learner.optimizers.joint:
        _epochs(batches, learner, "joint", optimizer.policy_epochs, _joint_losses, averages, show)
    else:
        _epochs(batches, learner, "value", optimizer.value_epochs, _value_losses, averages, show)
        _epochs(batches, learner, "policy", optimizer.policy_epochs, _policy_losses, averages, show)
    statistics = averages.result()
    _check_finite(statistics, learner.agent, batch.advantage.dim() > 2)
    return statistics | (learner.noise.result() if learner.noise else {})


def _epochs(
    batches: Sequence[Batch],
    learner: Learner,
    group: str,
    epochs: int,
    losses_of: Callable[[Minibatch, Learner], Losses],
    averages: Averages,
    show: Show,
) -> None:
    config = learner.config
    optimizer, parameters = learner.optimizers.optimizers[group], learner.optimizers.parameters[group]
    add_gradients, step = learner.gradients(losses_of, parameters), stepper(optimizer)
    micro_batch, max_norm = learner.micro_batch, config.optimizer.max_grad_norm
    for epoch, batch in passes(batches, epochs, config.optimizer.epoch_window):
        start = averages.parts
        if epoch:  # a single one needs no progress
            show(f"policy phase: epoch {epoch + 1:,} of {epochs:,}")
        noise = learner.noise if group != "value" and epoch == 0 else None  # later epochs see the same samples again
        for minibatch in shuffled(batch, config.optimizer.minibatches, learner.shuffle, config.optimizer.shuffle):
            # whether nothing comes between the gradients and clipping, so that a program can do both
            at_once = len(minibatch) <= micro_batch and noise is None and not is_distributed()
            for part in minibatch.micro_batches(micro_batch):  # bounds memory; the gradients add up to the same
                check_interrupt_if_single_worker(learner.interrupts)
                weight = len(part) / len(minibatch)
                terms, samples = add_gradients(part, weight, max_norm if at_once else None)
                averages.add(terms, weight, samples)
            if not at_once:
                mean_gradients_(parameters, len(minibatch) / config.optimization_batch, learner.interrupts)
                if noise:
                    noise.add(parameters, optimizer, round(config.optimization_batch))
                clip_gradients_(gradients_of(parameters), max_norm, run_axis=minibatch.run_axis)
            step()
            drop_gradients(parameters)
            if group != "value":
                learner.proximal.after_gradient_step()  # theta_prox <- EWMA(theta)
                averages.end_gradient_step()
        if group != "value" and _is_far(averages, start, config.optimizer.kl_stop, len(minibatch)):
            break


def _is_far(averages: Averages, start: int, kl_stop: float | None, samples: int) -> bool:
    """Whether the policy of the last pass was too far from the proximal one; of ``samples`` by this worker a step."""
    return kl_stop is not None and mean_over_workers({"kl": averages.kl_since(start)}, samples)["kl"] > kl_stop


def _joint_losses(minibatch: Minibatch, learner: Learner) -> Losses:
    params, value = learner.agent(minibatch.inputs)
    policy_loss, policy_terms, samples = _policy_terms(minibatch, params, learner)
    value_loss, value_terms = _value_terms(minibatch, value, learner)
    return policy_loss + value_loss, {**policy_terms, **value_terms}, samples


def _policy_losses(minibatch: Minibatch, learner: Learner) -> Losses:
    return _policy_terms(minibatch, learner.agent.policy(minibatch.inputs), learner)


def _value_losses(minibatch: Minibatch, learner: Learner) -> Losses:
    return *_value_terms(minibatch, learner.agent.value(minibatch.inputs), learner), []


def _policy_terms(minibatch: Minibatch, params: Tensor, learner: Learner) -> Losses:
    """Minus the policy objective and the entropy bonus, for raw distribution parameters (B, P) of pi_theta."""
    config, distribution = learner.config.policy, learner.action_spec.distribution
    proximal_params = learner.proximal.params(minibatch)  # compute pi_prox for minibatch
    policy, proximal = distribution(params), distribution(proximal_params)
    logp_theta = policy.log_prob(minibatch.action)
    with torch.no_grad():
        if config.interpolated:
            share = _behavior_share(learner.config, learner.lag)
            logp_proximal = interpolated_logp(logp_theta, minibatch.behavior_logp, share)
        else:
            logp_proximal = learner.proximal.log_prob(minibatch, proximal)
    logp = LogProbs(
        theta=logp_theta,
        proximal=logp_proximal,
        behavior=minibatch.behavior_logp,
        importance=minibatch.behavior_logp if config.importance == "behavior" else logp_proximal,
    )
    loss = policy_loss(policy, proximal, logp, minibatch.advantage, config)
    entropy = policy.entropy().mean(-1)
    terms = {"entropy": entropy.detach()}
    if entropy.dim() == 0:  # the loss of stacked runs is that of all together
        terms = {"policy_loss": loss.detach(), **terms}
    samples: list[Tensor] = []
    if learner.policy_statistics:
        samples = PolicySamples(params, proximal_params, minibatch.behavior_params, logp).tensors()
    return loss - _mean_over_runs(config.entropy_coefficient * entropy), terms, samples


def _behavior_share(config: TrainConfig, lag: int) -> float | Tensor:
    """Share of the behaviour policy in an interpolated proximal one, (R, 1) for R stacked runs."""
    steps = config.optimizer.minibatches * config.optimizer.policy_epochs
    share = behavior_share(config.policy.center_of_mass, lag * steps)
    return share.float().unsqueeze(-1) if isinstance(share, Tensor) else share


def _value_terms(minibatch: Minibatch, value: Tensor, learner: Learner) -> tuple[Tensor, Mapping[str, Tensor]]:
    loss = value_loss(value, minibatch.value_target, learner.config.optimizer.value_coefficient)
    return _mean_over_runs(loss), {"value_loss": loss.detach()}


def _mean_over_runs(values: Tensor) -> Tensor:
    return values.mean() if values.dim() else values


def policy_loss(
    policy: Distribution, proximal: Distribution, logp: LogProbs, advantage: Tensor, config: PolicyConfig
) -> Tensor:
    """Minus the decoupled objective that the configuration names (section 2), without the entropy bonus.

    Args:
        policy: pi_theta(.|s), with gradient, for (B,) samples; (R, B) for R stacked runs, and so the rest.
        proximal: pi_prox(.|s).
        logp: (B,) log-probabilities of the sampled actions.
        advantage: (B,) advantage estimates.
        config: the objective and its coefficients; in stacked runs these may be (R, 1) tensors.

    Returns:
        Scalar mean over all samples.
    """
    cap = config.max_importance_ratio
    if config.second_moment is not None:
        advantage = advantage * second_moment_mask(logp.theta, logp.behavior, config.second_moment)
    if config.objective == "clip":
        return decoupled_clip_loss(
            logp.theta, logp.proximal, logp.importance, advantage, clip=config.clip, max_importance_ratio=cap
        )
    exact = config.kl_estimator == "exact"
    kl = proximal.kl(policy) if exact else half_squared_log_ratio(logp.theta, logp.proximal)
    return decoupled_kl_loss(
        logp.theta, logp.importance, advantage, kl, kl_coefficient=config.kl_coefficient, max_importance_ratio=cap
    )


def value_loss(value: Tensor, target: Tensor, coefficient: float) -> Tensor:
    """``coefficient * mean((v - target)^2)`` over the last axis; neither the value nor its gradient is clipped.

    Args:
        value: (B,) predicted values, with gradient; (R, B) for R stacked runs.
        target: the same shape.
        coefficient: value coefficient.

    Returns:
        Scalar, or (R,).

    Raises:
        TypeError: an argument is no floating-point tensor.
        ValueError: the shapes differ.
    """
    check_alike(value=value, target=target)
    return coefficient * (value - target).square().mean(-1)


def finite_weights(agent: Agent, *, run_axis: bool = False) -> Tensor:
    """Whether all weights are finite, a bool scalar; (R,) if the parameters have a leading run axis."""
    norms = torch.stack([x.detach().flatten(int(run_axis)).norm(dim=-1) for x in agent.parameters()])
    return torch.isfinite(norms).all(0)


def _check_finite(statistics: Mapping[str, Any], agent: Agent, run_axis: bool) -> None:
    """Check once an iteration, so that no checkpoint is written of weights that cannot be trained on."""
    losses = {name: statistics[name] for name in ("policy_loss", "value_loss", "entropy") if name in statistics}
    finite = torch.isfinite(torch.tensor(list(losses.values()))).all(0)
    # the last step can break weights although every loss, computed before its step, was finite
    if bool((finite & finite_weights(agent, run_axis=run_axis).cpu()).any()):
        return
    broken = [f"{name} was {x}" for name, x in losses.items() if not (run_axis or math.isfinite(x))]
    raise DivergenceError(
        f"training has diverged, and a loss or weight is not finite ({', '.join(broken) or 'weights overflowed'}): "
        "lower optimizer.step_size; the newest checkpoint predates this"
    )
