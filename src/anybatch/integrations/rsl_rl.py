"""PPO-EWMA for rsl_rl, the trainer of Isaac Lab and mjlab, with its own interface (extra ``anybatch[rsl-rl]``).

In a runner's configuration the class is named instead of ``PPO``:

>>> config["algorithm"]["class_name"] = "anybatch.integrations.rsl_rl:PPOEWMA"

Everything else of rsl_rl stays: runners, models, normalisers, symmetry, random network distillation, several GPUs.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from anybatch.config.validation import check_ewma_arguments
from anybatch.diagnostics.statistics import clip_fraction
from anybatch.distributed.process_group import is_distributed, sum_
from anybatch.errors import ConfigError, ScalingWarning, install_command
from anybatch.normalize import AdvantageNormalizer
from anybatch.objectives import decoupled_clip_loss
from anybatch.proximal import EwmaProximal

try:
    from rsl_rl.algorithms import PPO
    from rsl_rl.storage import RolloutStorage
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"anybatch.integrations.rsl_rl needs rsl_rl: {install_command('rsl-rl')} ({error})", name=error.name
    ) from error

_ADAPTATION = 1.5
_SLOWEST, _FASTEST = 1e-5, 1e-2
_STATE = "ppo_ewma"
# rsl_rl updates its normalisers with every step of a rollout until 5.4, and at the end of an update from 5.5
_UPDATES_NORMALIZERS = "update_normalization" not in PPO.process_env_step.__code__.co_names


class PPOEWMA(PPO):
    """rsl_rl's PPO with the decoupled objective, a proximal EWMA and advantage moments over iterations.

    :meth:`update` differs: L^CLIP_decoupled of section 2 clips around an exponentially-weighted moving average of the
    actor's weights (section 4, appendix A), which moves after each gradient step, and importance weights correct for
    the policy that sampled. Advantages are normalised by moments over iterations (third adjustment of section 4).
    Observation statistics are the newest ones in both policies. Recurrent actors start from the hidden states that were
    recorded. With symmetric augmentation the average is evaluated on mirrored samples, too.

    With ``schedule="adaptive"`` the step size follows the KL from the proximal policy, whose age does not depend on
    the iteration, so that ``desired_kl`` means the same at every batch size; rsl_rl's PPO takes the policy that
    sampled. ``anybatch scale ppo-ewma --for rsl_rl --divide-batch-by 16`` prints the arguments for another batch size.
    """

    learning_rate: float
    """The step size, which ``schedule="adaptive"`` changes."""
    normalize_advantage_per_mini_batch: bool
    """Whether advantages are normalised on each minibatch instead of by moments over iterations."""

    def __init__(
        self,
        *args: Any,
        center_of_mass: float | None = 8.0,
        advantage_span: float = 1.0,
        max_importance_ratio: float = 100.0,
        use_clipped_value_loss: bool = False,
        **kwargs: Any,
    ) -> None:
        """Build the algorithm, usually from a runner's configuration.

        Args:
            *args: those of ``rsl_rl.algorithms.PPO``.
            center_of_mass: centre of mass of the proximal EWMA in gradient steps, beta/(1-beta), above 0; None clips
                around the behaviour policy, which is PPO.
            advantage_span: effective sample size of the advantage moments in iterations, 2/(1-beta)-1; 1 is the
                current iteration alone.
            max_importance_ratio: cap on pi_theta/pi_behav, at least 1.
            use_clipped_value_loss: rsl_rl's own, but off by default: how fast values move would depend on the batch.
            **kwargs: those of ``rsl_rl.algorithms.PPO``.

        Raises:
            ConfigError: a value out of range, or an advantage span without advantages normalised over iterations.

        Warns:
            ScalingWarning: value clipping, or advantages normalised on each minibatch, which depend on the batch.
        """
        check_ewma_arguments(center_of_mass, advantage_span, max_importance_ratio)
        super().__init__(*args, use_clipped_value_loss=use_clipped_value_loss, **kwargs)
        self.max_importance_ratio = max_importance_ratio
        if self.normalize_advantage_per_mini_batch:
            if advantage_span > 1:
                raise ConfigError(
                    f"advantage_span is {advantage_span}, but normalize_advantage_per_mini_batch leaves it "
                    "unused; set normalize_advantage_per_mini_batch False or advantage_span 1"
                )
            _warn("normalize_advantage_per_mini_batch is set: the noise of the moments depends on the minibatch size")
        if use_clipped_value_loss:
            _warn("use_clipped_value_loss is set: the change of values then depends on the iteration batch")
        self.proximal = None if center_of_mass is None else EwmaProximal(self._raw_actor, center_of_mass)
        self.normalizer = AdvantageNormalizer(advantage_span)
        self._fresh = True
        """Whether weights may still be replaced by those of another worker, from which the average then starts."""

    def compute_returns(self, obs: Any) -> None:
        """Compute returns as rsl_rl does, and advantages with moments over iterations.

        Args:
            obs: observations after the last step, a TensorDict of N environments.
        """
        per_mini_batch, self.normalize_advantage_per_mini_batch = self.normalize_advantage_per_mini_batch, True
        try:
            super().compute_returns(obs)  # leaves the advantages as they are
        finally:
            self.normalize_advantage_per_mini_batch = per_mini_batch
        if not per_mini_batch:
            self.normalizer.update(*_moments(self.storage.advantages))
            self.storage.advantages = self.normalizer(self.storage.advantages)

    def update(self) -> dict[str, float]:
        """Optimise policy and value on the storage: the inner two loops of the pseudocode in appendix A.

        Returns:
            Means over all gradient steps, by rsl_rl's names; besides, ``clip_fraction`` and ``kl_proximal``.
        """
        logged = defaultdict[str, list[Tensor]](list)
        self._copy_observation_statistics()
        recurrent = self.actor.is_recurrent or self.critic.is_recurrent
        batches = self.storage.recurrent_mini_batch_generator if recurrent else self.storage.mini_batch_generator
        for batch in batches(self.num_mini_batches, self.num_learning_epochs):
            samples = batch.observations.batch_size[0]
            if self.normalize_advantage_per_mini_batch:
                advantages = batch.advantages
                batch.advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            if self.symmetry:
                self.symmetry.augment_batch(batch, samples)
            self._step(*self._losses(batch, samples, logged), logged)
        if _UPDATES_NORMALIZERS:
            observations = self.storage.observations.flatten(0, 1)
            for model in (self.actor, self.critic, self.rnd):
                if model is not None:
                    model.update_normalization(observations)
        self.storage.clear()
        return {name: float(torch.stack(values).mean()) for name, values in logged.items()}

    def _losses(
        self, batch: RolloutStorage.Batch, samples: int, logged: dict[str, list[Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of actor and critic, and that of the predictor of novelty, in rsl_rl's precision."""
        mixed = getattr(self, "use_mixed_precision", False)  # from rsl_rl 5.5
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=mixed):
            loss = self._policy_loss(batch, samples, logged) + self.value_loss_coef * self._value_loss(batch, logged)
            if self.symmetry:
                mirror_loss = self.symmetry.compute_loss(self.actor, batch, samples)
                logged["symmetry"].append(mirror_loss.detach())
                if self.symmetry.use_mirror_loss:
                    loss = loss + self.symmetry.mirror_loss_coeff * mirror_loss
            novelty_loss = self.rnd.compute_loss(batch.observations[:samples]) if self.rnd else None
        return loss, novelty_loss

    def _policy_loss(self, batch: RolloutStorage.Batch, samples: int, logged: dict[str, list[Tensor]]) -> Tensor:
        """Minus L^CLIP_decoupled and the entropy bonus; the step size follows the KL first, if it is adaptive."""
        proximal_params, logp_proximal = self._proximal(batch, samples)
        inputs = {"masks": batch.masks, "hidden_state": batch.hidden_states[0], "stochastic_output": True}
        self.actor(batch.observations, **inputs)
        logp = self.actor.get_output_log_prob(batch.actions)
        entropy = self.actor.output_entropy[:samples].mean()
        params = tuple(x[:samples] for x in self.actor.output_distribution_params)
        with torch.no_grad():
            kl = self.actor.get_kl_divergence(proximal_params, params).mean()
        if self.schedule == "adaptive" and self.desired_kl is not None:
            self._adapt_step_size(kl)
        loss = decoupled_clip_loss(
            logp,
            logp_proximal,
            batch.old_actions_log_prob.squeeze(-1),
            batch.advantages.squeeze(-1).clone(),  # a view of what inference mode made cannot take part in backward
            clip=self.clip_param,
            max_importance_ratio=self.max_importance_ratio,
        )
        statistics = {"surrogate": loss, "entropy": entropy, "kl_proximal": kl}
        statistics["clip_fraction"] = clip_fraction(logp.detach(), logp_proximal, self.clip_param)
        for name, value in statistics.items():
            logged[name].append(value.detach())
        return loss - self.entropy_coef * entropy

    @torch.no_grad()
    def _proximal(self, batch: RolloutStorage.Batch, samples: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The proximal policy's distribution parameters of the samples, and log pi_prox(a|s) of all rows."""
        if self.proximal is None:
            return batch.old_distribution_params, batch.old_actions_log_prob.squeeze(-1)
        actor: Any = self.proximal.module
        inputs = {"masks": batch.masks, "hidden_state": batch.hidden_states[0], "stochastic_output": True}
        actor(batch.observations, **inputs)
        params = tuple(x[:samples] for x in actor.output_distribution_params)
        return params, actor.get_output_log_prob(batch.actions)

    def _value_loss(self, batch: RolloutStorage.Batch, logged: dict[str, list[Tensor]]) -> Tensor:
        """Mean squared error of the values, clipped around those of the rollout with ``use_clipped_value_loss``."""
        values = self.critic(batch.observations, masks=batch.masks, hidden_state=batch.hidden_states[1])
        errors = (values - batch.returns).square()
        if self.use_clipped_value_loss:
            near = batch.values + (values - batch.values).clamp(-self.clip_param, self.clip_param)
            errors = torch.maximum(errors, (near - batch.returns).square())
        loss = errors.mean()
        logged["value"].append(loss.detach())
        return loss

    def _adapt_step_size(self, kl: Tensor) -> None:
        """Change the step size by a factor of 1.5, within rsl_rl's limits, where the KL is twice or half the target."""
        if is_distributed():
            sum_(kl)
            kl /= self.gpu_world_size
        if kl > 2 * self.desired_kl:
            self.learning_rate = max(_SLOWEST, self.learning_rate / _ADAPTATION)
        elif 0 < kl < self.desired_kl / 2:
            self.learning_rate = min(_FASTEST, self.learning_rate * _ADAPTATION)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def _step(self, loss: Tensor, novelty_loss: Tensor | None, logged: dict[str, list[Tensor]]) -> None:
        """One gradient step of actor and critic, and of the predictor of novelty; then theta_prox <- EWMA(theta)."""
        self.optimizer.zero_grad()
        loss.backward()
        if novelty_loss is not None:
            self.rnd.optimizer.zero_grad()
            novelty_loss.backward()
            logged["rnd"].append(novelty_loss.detach())
        if self.is_multi_gpu:
            self.reduce_parameters()
        for model in (self.actor, self.critic):
            clip_grad_norm_(model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        if self.rnd:
            self.rnd.optimizer.step()
        self._fresh = False
        if self.proximal is not None:
            self.proximal.after_gradient_step()

    @torch.no_grad()
    def _copy_observation_statistics(self) -> None:
        """Give the average the buffers that the rollout has changed: both policies see the same observations."""
        if self.proximal is not None:
            for mine, newest in zip(self.proximal.module.buffers(), self._raw_actor.buffers(), strict=True):
                mine.copy_(newest)

    def _restart(self) -> None:
        """Average from the weights as they are now, without advantages seen."""
        if self.proximal is not None:
            self.proximal.reset()
        self.normalizer = AdvantageNormalizer(self.normalizer.span)

    def train_mode(self) -> None:
        """Put the models in training mode, and the average in the actor's mode."""
        super().train_mode()
        if self.proximal is not None:
            self.proximal.module.train()

    def eval_mode(self) -> None:
        """Put the models in evaluation mode, and the average in the actor's mode."""
        super().eval_mode()
        if self.proximal is not None:
            self.proximal.module.eval()

    def broadcast_parameters(self) -> None:
        """Take the weights of the first worker, from which the average starts unless it has begun."""
        super().broadcast_parameters()
        if self._fresh:
            self._restart()

    def save(self) -> dict[str, Any]:
        """rsl_rl's dictionary for a checkpoint, and the average and the advantage moments under ``ppo_ewma``."""
        proximal = {} if self.proximal is None else self.proximal.state_dict()
        return {**super().save(), _STATE: {"proximal": proximal, "advantages": self.normalizer.state_dict()}}

    def load(self, loaded_dict: dict[str, Any], load_cfg: dict[str, Any] | None, strict: bool) -> bool:
        """Load a checkpoint of this class, or of PPO, whose actor then starts the average.

        Args:
            loaded_dict: from :meth:`save`, or from that of PPO.
            load_cfg: models and states to load, None for all; the average and the moments are continued with the
                optimiser, and start anew without it.
            strict: whether names of weights must match.

        Returns:
            Whether the runner should continue its count of iterations.
        """
        iteration = super().load(loaded_dict, load_cfg, strict)
        resumed = load_cfg is None or (load_cfg.get("actor") and load_cfg.get("optimizer"))
        state = loaded_dict.get(_STATE) if resumed else None
        if state is None:
            self._restart()
            return iteration
        self._fresh = False
        self.normalizer.load_state_dict({name: x.cpu() for name, x in state["advantages"].items()})
        if self.proximal is not None and state["proximal"]:
            self.proximal.load_state_dict(state["proximal"])
        elif self.proximal is not None:  # saved with center_of_mass None
            self.proximal.reset()
        return iteration


def _moments(advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population variance and count over all workers, on the device: rsl_rl's group has no other collectives."""
    values = advantages.double()
    sums = torch.stack([values.sum(), torch.full_like(values.sum(), values.numel())])
    if is_distributed():
        sum_(sums)
    mean, count = sums[0] / sums[1], sums[1]
    squares = (values - mean).square().sum()
    if is_distributed():
        sum_(squares)
    return mean, squares / count, count


def _warn(message: str) -> None:
    warnings.warn(message, ScalingWarning, stacklevel=3)
