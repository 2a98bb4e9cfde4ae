"""PPO-EWMA for Stable-Baselines3, with that library's own interface (extra ``anybatch[sb3]``).

>>> from anybatch.integrations.sb3 import PPOEWMA
>>> model = PPOEWMA("MlpPolicy", "CartPole-v1", n_steps=256, batch_size=64).learn(100_000)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import mse_loss

from anybatch.config.validation import check_ewma_arguments, check_positive
from anybatch.diagnostics.statistics import clip_fraction
from anybatch.distributed.collectives import moments
from anybatch.errors import ConfigError, install_command
from anybatch.normalize import AdvantageNormalizer
from anybatch.objectives import decoupled_clip_loss, decoupled_kl_loss
from anybatch.proximal import EwmaProximal

try:
    from stable_baselines3 import PPO
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.distributions import Distribution, kl_divergence
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.save_util import load_from_zip_file
    from stable_baselines3.common.type_aliases import RolloutBufferSamples
    from stable_baselines3.common.utils import explained_variance
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"anybatch.integrations.sb3 needs Stable-Baselines3: {install_command('sb3')} ({error})", name=error.name
    ) from error


class Memory:
    """The state of PPO-EWMA beside policy and optimiser: the proximal EWMA and the advantage moments."""

    def __init__(self, policy: ActorCriticPolicy, center_of_mass: float | None, span: float) -> None:
        """Start at the policy as it is; no average without a centre of mass."""
        self.proximal: EwmaProximal | None = None
        if center_of_mass is not None:
            with torch.no_grad():
                if policy.use_sde:
                    policy.reset_noise()  # the matrix drawn with a gradient cannot be copied
                self.proximal = EwmaProximal(policy, center_of_mass)
            self.proximal.module.train(False)
        self.normalizer = AdvantageNormalizer(span)
        self.center_of_mass = center_of_mass
        """That of the average; None without one."""
        self.device = policy.device
        """Device of the policy."""

    def check_unchanged(self, center_of_mass: float | None, span: float) -> None:
        """Raise a ConfigError unless the model still has the values with which this was made."""
        for name, value, made in (
            ("center_of_mass", center_of_mass, self.center_of_mass),
            ("advantage_span", span, self.normalizer.span),
        ):
            if value != made:
                raise ConfigError(
                    f"{name} was changed from {made} to {value} after the model was made, which has no effect on its "
                    f"averages; pass {name} to PPOEWMA or to PPOEWMA.load"
                )

    def distribution(self, data: RolloutBufferSamples) -> Distribution | None:
        """pi_prox(.|s) of B samples, without gradient; None without an average."""
        if self.proximal is None:
            return None
        policy = self.proximal.module
        assert isinstance(policy, ActorCriticPolicy)
        with torch.no_grad():
            return policy.get_distribution(data.observations)

    def after_gradient_step(self) -> None:
        """theta_prox <- EWMA(theta)."""
        if self.proximal is not None:
            self.proximal.after_gradient_step()

    def restart(self) -> None:
        """Average from the policy as it is now, without advantages seen."""
        if self.proximal is not None:
            self.proximal.reset()
        self.normalizer = AdvantageNormalizer(self.normalizer.span)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name, on one device and without nesting, as Stable-Baselines3 expects of ``get_parameters()``."""
        device, state = self.device, dict[str, Tensor]()
        if self.proximal is not None:
            saved = self.proximal.state_dict()
            state = {f"proximal.{name}": x for name, x in saved["module"].items()}
            state["terms"] = torch.tensor(float(saved["terms"]), dtype=torch.float64, device=device)
        moments = self.normalizer.state_dict()
        return state | {f"advantages.{name}": x.to(device) for name, x in moments.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Restore what :meth:`state_dict` gave, or, if not ``strict``, the part of it that is there.

        Without a saved average it starts at the policy as it is now; with an empty state the moments start anew, too.

        Raises:
            RuntimeError: ``strict``, and names are missing or unknown.
        """
        if not state:
            self.restart()
            return
        current = self.state_dict()
        differing = state.keys() ^ current.keys()
        one_has_none = strict and _has_average(state) != _has_average(current)  # center_of_mass None
        if one_has_none:
            differing = {name for name in differing if name.startswith("advantages.")}
        if strict and differing:
            raise RuntimeError(f"the state of PPO-EWMA and the saved one differ in {', '.join(sorted(differing)[:5])}")
        if one_has_none and self.proximal is not None:
            self.proximal.reset()
            current = self.state_dict()
        state = {name: state.get(name, x) for name, x in current.items()}
        if self.proximal is not None:
            module = {name.removeprefix("proximal."): x for name, x in state.items() if name.startswith("proximal.")}
            self.proximal.load_state_dict({"module": module, "terms": round(float(state["terms"]))})
        moments = {name.removeprefix("advantages."): x for name, x in state.items() if name.startswith("advantages.")}
        self.normalizer.load_state_dict({name: x.cpu() for name, x in moments.items()})


def _has_average(state: Mapping[str, Tensor]) -> bool:
    return any(not name.startswith("advantages.") for name in state)


class PPOEWMA(PPO):
    """Stable-Baselines3's PPO with decoupled objectives, a proximal EWMA and advantage moments over iterations.

    All of PPO's arguments, policies, callbacks, ``learn``, ``save`` and ``load`` are those of Stable-Baselines3.
    :meth:`train` differs: L^CLIP_decoupled of section 2 clips around an exponentially-weighted moving average of the
    weights (section 4, appendix A), or L^KLPEN_decoupled penalises the KL from it, and advantages are normalised by
    moments over iterations (section 4, third adjustment), never over a minibatch. A saved model keeps the average and
    the moments. ``load`` also takes a model of Stable-Baselines3's PPO; ``PPO.load`` does not take ours, but
    ``model.policy.save`` writes a policy that Stable-Baselines3 loads without anybatch.

    ``anybatch scale ppo-ewma --for sb3 --divide-batch-by 8`` prints the arguments for another batch size.
    """

    def __init__(
        self,
        *args: Any,
        center_of_mass: float | None = 8.0,
        advantage_span: float = 1.0,
        max_importance_ratio: float = 100.0,
        kl_coefficient: float | None = None,
        _init_setup_model: bool = True,
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            *args: those of ``stable_baselines3.PPO``.
            center_of_mass: centre of mass of the proximal EWMA in gradient steps, beta/(1-beta), above 0; None clips
                around the behaviour policy, which is PPO.
            advantage_span: effective sample size of the advantage moments in iterations, 2/(1-beta)-1; 1 is the
                current iteration alone.
            max_importance_ratio: cap on pi_theta/pi_behav, at least 1.
            kl_coefficient: beta of L^KLPEN_decoupled, above 0, whose KL[prox, theta] is exact, in place of clipping;
                None clips with ``clip_range``.
            _init_setup_model: Stable-Baselines3's own; False leaves the networks to ``load``.
            **kwargs: those of ``stable_baselines3.PPO``.

        Raises:
            ConfigError: a value out of range, or a setting that would bias the objective or tie it to the batch:
                ``target_kl``, ``clip_range_vf``, a ``batch_size`` that does not divide ``n_steps * n_envs``.
        """
        self.center_of_mass = center_of_mass
        self.advantage_span = advantage_span
        self.max_importance_ratio = max_importance_ratio
        self.kl_coefficient = kl_coefficient
        super().__init__(*args, **{**kwargs, "_init_setup_model": False})
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        self._check()
        super()._setup_model()
        if self.center_of_mass is not None and self.kl_coefficient is None and math.isinf(self._clip_range()):
            raise ConfigError(
                "clip_range is inf, but clipping is the only term that uses the proximal EWMA; set a finite "
                "clip_range, or center_of_mass None"
            )
        self.memory = Memory(self.policy, self.center_of_mass, self.advantage_span)

    def _check(self) -> None:
        age, samples = self.center_of_mass, self.n_steps * self.n_envs
        check_ewma_arguments(age, self.advantage_span, self.max_importance_ratio)
        if self.advantage_span > 1 and not self.normalize_advantage:
            raise ConfigError(
                f"advantage_span is {self.advantage_span}, but normalize_advantage is False, which leaves it "
                "unused; set normalize_advantage True or advantage_span 1"
            )
        if self.kl_coefficient is not None:
            check_positive("kl_coefficient", self.kl_coefficient)
        if self.kl_coefficient is not None and age is None:
            raise ConfigError(
                "kl_coefficient is set, but center_of_mass None makes the behaviour policy the proximal policy, whose "
                "distributions Stable-Baselines3 does not keep; set a center_of_mass"
            )
        if self.target_kl is not None:
            raise ConfigError(
                f"target_kl is {self.target_kl}, but skipping minibatches because of the KL of others biases the "
                "objective, and their number depends on the batch size; set target_kl None: clipping limits the policy"
            )
        if self.clip_range_vf is not None:
            raise ConfigError(
                "clip_range_vf is set, but holding values near those of the behaviour policy biases them and makes "
                "their speed depend on the iteration batch; set clip_range_vf None"
            )
        if self.env is not None and samples % self.batch_size:
            raise ConfigError(
                f"batch_size is {self.batch_size}, but must divide n_steps * n_envs = {samples}: a smaller last "
                "minibatch would weight its samples more, and step as far as the others"
            )

    def train(self) -> None:
        """Optimise policy and value on the rollout buffer: the inner two loops of the pseudocode in appendix A.

        Raises:
            ConfigError: ``center_of_mass`` or ``advantage_span`` was changed after the model was made, or another
                setting to one that the constructor refuses.
        """
        self.memory.check_unchanged(self.center_of_mass, self.advantage_span)
        self._check()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clip_range, buffer, logged = self._clip_range(), self.rollout_buffer, defaultdict[str, list[float]](list)
        if self.normalize_advantage:
            mean, var, count = moments(torch.as_tensor(buffer.advantages))
            self.memory.normalizer.update(mean, var, count)
            self.logger.record("train/advantage_std", float(var.sqrt()))
            self.logger.record("train/advantage_std_used", self.memory.normalizer.moments()[1] ** 0.5)
        for _ in range(self.n_epochs):
            for data in buffer.get(self.batch_size):
                loss = self.loss(data, clip_range, logged)
                self.policy.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.policy.optimizer.step()
                self.memory.after_gradient_step()
            self._n_updates += 1
        self._record(logged, clip_range, buffer)

    def loss(self, data: RolloutBufferSamples, clip_range: float, logged: dict[str, list[float]]) -> Tensor:
        """Scalar loss of B samples: minus the decoupled objective, minus the entropy bonus, plus the value loss.

        One value is added to each of the statistics, under the name that Stable-Baselines3 logs.
        """
        actions = data.actions.long().flatten() if isinstance(self.action_space, spaces.Discrete) else data.actions
        values, logp, entropy = self.policy.evaluate_actions(data.observations, actions)
        proximal = self.memory.distribution(data)
        logp_proximal = data.old_log_prob if proximal is None else proximal.log_prob(actions)
        advantage = self.memory.normalizer(data.advantages) if self.normalize_advantage else data.advantages
        if self.kl_coefficient is None:
            policy_loss = decoupled_clip_loss(
                logp,
                logp_proximal,
                data.old_log_prob,
                advantage,
                clip=clip_range,
                max_importance_ratio=self.max_importance_ratio,
            )
        else:
            assert proximal is not None
            policy_loss = decoupled_kl_loss(
                logp,
                data.old_log_prob,
                advantage,
                self._kl(proximal),
                kl_coefficient=self.kl_coefficient,
                max_importance_ratio=self.max_importance_ratio,
            )
        entropy_loss = logp.mean() if entropy is None else -entropy.mean()
        value_loss = mse_loss(values.flatten(), data.returns)
        loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
        with torch.no_grad():
            log_ratio, log_weight = logp - logp_proximal, logp - data.old_log_prob
            statistics = {
                "policy_gradient_loss": policy_loss,
                "entropy_loss": entropy_loss,
                "value_loss": value_loss,
                "loss": loss,
                "clip_fraction": clip_fraction(logp, logp_proximal, clip_range),
                "approx_kl": (log_ratio.expm1() - log_ratio).mean(),
                "approx_kl_behavior": (log_weight.expm1() - log_weight).mean(),
            }
        for name, value in statistics.items():
            logged[name].append(value.item())
        return loss

    def _kl(self, proximal: Distribution) -> Tensor:
        """(B,) KL[pi_prox(.|s), pi_theta(.|s)], with gradient, summed over the components of an action."""
        kl = kl_divergence(proximal, self.policy.action_dist)  # that of the forward pass before
        return kl if kl.dim() == 1 else kl.flatten(1).sum(1)

    def _record(self, logged: Mapping[str, list[float]], clip_range: float, buffer: RolloutBuffer) -> None:
        for name, values in logged.items():
            self.logger.record(f"train/{name}", float(np.mean(values)))
        variance = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        self.logger.record("train/explained_variance", variance)
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", torch.exp(self.policy.log_std).mean().item())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", clip_range)

    def _clip_range(self) -> float:
        assert callable(self.clip_range)
        return float(self.clip_range(self._current_progress_remaining))

    def set_parameters(self, load_path_or_dict: Any, exact_match: bool = True, device: Any = "auto") -> None:
        """Stable-Baselines3's own, also with parameters of its PPO: the average then starts at the new weights."""
        parameters = load_path_or_dict
        if not isinstance(parameters, dict):
            _, parameters, _ = load_from_zip_file(parameters, load_data=False, device=device)
        memory = parameters.get("memory", {})  # loaded last, as the average may start at the policy's weights
        others = {name: x for name, x in parameters.items() if name != "memory"}
        super().set_parameters({**others, "memory": memory}, exact_match=exact_match, device=device)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "memory"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        names, variables = super()._get_torch_save_params()
        return [*names, "memory"], variables
