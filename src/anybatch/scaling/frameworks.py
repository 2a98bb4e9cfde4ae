"""The same hyperparameters under the names of other frameworks, and what those frameworks have no counterpart for.

The tests type what is printed into Stable-Baselines3's ``PPO`` (or our subclass of it) and TRL's ``GRPOConfig``; names
of CleanRL's ``ppo.py`` and RLlib's ``PPOConfig`` (new API stack) were checked by reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from anybatch.config.schema import TrainConfig


class Code(str):
    """A value that is an expression of the framework's user, not a constant."""


@dataclass(frozen=True)
class Call:
    """One call, or command, and its arguments."""

    before: str
    """What stands before the arguments: the name of a function, or a command."""
    arguments: dict[str, object]
    """Values by the framework's own argument name."""
    flags: bool = False
    """Written as ``--name value`` on one line."""

    def __str__(self) -> str:
        if self.flags:
            return " ".join([self.before, *(_flag(name, value) for name, value in self.arguments.items())])
        return f"{self.before}(\n" + "".join(f"    {name}={_code(x)},\n" for name, x in self.arguments.items()) + ")"


@dataclass(frozen=True)
class Translation:
    """What to type into another framework."""

    calls: tuple[Call, ...]
    missing: list[str]
    """One sentence for each thing that has no counterpart."""
    before: list[str] = field(default_factory=list)
    """Lines that come first."""

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of all calls, as values that JSON and YAML know."""
        return {name: _plain(value) for call in self.calls for name, value in call.arguments.items()}

    def __str__(self) -> str:
        return "\n".join([*self.before, *map(str, self.calls), *(f"# {sentence}" for sentence in self.missing)])


def translate(config: TrainConfig, framework: str) -> Translation:
    """Express a configuration in another framework's arguments.

    Args:
        config: scaled or not.
        framework: a key of :data:`FRAMEWORKS`.
    """
    return FRAMEWORKS[framework](config)


def _sb3(config: TrainConfig) -> Translation:
    """Stable-Baselines3's own PPO, or anybatch.integrations.sb3.PPOEWMA where that has what PPO lacks."""
    optimizer, policy = config.optimizer, config.policy
    ours = policy.objective == "clip" and policy.proximal == "ewma"
    name, module = ("PPOEWMA", "anybatch.integrations.sb3") if ours else ("PPO", "stable_baselines3")
    before = ["from stable_baselines3.common.env_util import make_vec_env", f"from {module} import {name}"]
    step: object = _short(optimizer.step_size)
    if optimizer.schedule == "linear":
        step = Code(f"lambda left: left * {step!r}")
    if optimizer.kind == "sgd":
        before.insert(0, "import torch")
        kind = {"optimizer_class": Code("torch.optim.SGD"), "optimizer_kwargs": {"momentum": optimizer.sgd_momentum}}
    else:
        kind = {"optimizer_kwargs": {"betas": _betas(config), "eps": optimizer.adam_eps}}
    arguments: dict[str, object] = {
        "n_steps": config.rollout.steps,
        "batch_size": _minibatch(config),
        "n_epochs": optimizer.policy_epochs,
        "learning_rate": step,
        "gamma": config.advantage.discount,
        "gae_lambda": config.advantage.gae_lambda,
        "clip_range": policy.clip,
        "ent_coef": policy.entropy_coefficient,
        "vf_coef": optimizer.value_coefficient,
        "max_grad_norm": _norm(optimizer.max_grad_norm),
        "normalize_advantage": config.advantage.normalize,
    }
    if ours:
        arguments |= {
            "center_of_mass": _short(policy.center_of_mass),
            "advantage_span": _short(config.advantage.span if config.advantage.normalize else 1.0),
            "max_importance_ratio": policy.max_importance_ratio,
        }
    return Translation(
        (
            Call("env = make_vec_env", {"env_id": Code("ENV_ID"), "n_envs": config.env.num_envs}),
            Call(f"model = {name}", {"policy": Code("POLICY"), "env": Code("env"), **arguments, "policy_kwargs": kind}),
        ),
        _missing(config, None if ours else "normalize_advantage works on each minibatch", "clip_range"),
        before,
    )


def _cleanrl(config: TrainConfig) -> Translation:
    optimizer = config.optimizer
    flags: dict[str, object] = {
        "total-timesteps": config.total_env_steps,
        "num-envs": config.env.num_envs,
        "num-steps": config.rollout.steps,
        "num-minibatches": optimizer.minibatches,
        "update-epochs": optimizer.policy_epochs,
        "learning-rate": _short(optimizer.step_size),
        "gamma": config.advantage.discount,
        "gae-lambda": config.advantage.gae_lambda,
        "clip-coef": config.policy.clip,
        "ent-coef": config.policy.entropy_coefficient,
        "vf-coef": 2 * optimizer.value_coefficient,  # ppo.py halves the squared error first
        "max-grad-norm": _norm(optimizer.max_grad_norm),
        "anneal-lr": optimizer.schedule == "linear",
        "norm-adv": config.advantage.normalize,
        "clip-vloss": False,
    }
    missing = _missing(config, "norm-adv works on each minibatch", "clip-coef")
    missing.append(f"{_optimizer(config)}: no argument; edit optim.Adam(..., eps=1e-5) there")
    return Translation((Call("python cleanrl/ppo.py", flags, flags=True),), missing)


def _rllib(config: TrainConfig) -> Translation:
    optimizer, policy = config.optimizer, config.policy
    penalty, step = policy.objective == "kl", _short(optimizer.step_size)
    sampling: dict[str, object] = {
        "num_env_runners": 1,
        "num_envs_per_env_runner": config.env.num_envs,
        "rollout_fragment_length": config.rollout.steps,
    }
    training: dict[str, object] = {
        "train_batch_size_per_learner": config.iteration_batch,
        "minibatch_size": _minibatch(config),
        "num_epochs": optimizer.policy_epochs,
        "lr": [[0, step], [config.total_env_steps, 0.0]] if optimizer.schedule == "linear" else step,
        "gamma": config.advantage.discount,
        "lambda_": config.advantage.gae_lambda,
        "clip_param": math.inf if penalty else policy.clip,
        "use_kl_loss": penalty,
        "kl_coeff": policy.kl_coefficient if penalty else 0.0,
        "entropy_coeff": policy.entropy_coefficient,
        "vf_loss_coeff": optimizer.value_coefficient,
        "vf_clip_param": math.inf,
        "grad_clip": optimizer.max_grad_norm,
    }
    missing = _missing(config, "advantages are normalised over each train batch", None)
    if not config.advantage.normalize:
        missing.append("advantage.normalize false: no counterpart; advantages are normalised over each train batch")
    if penalty:
        missing.append(
            "kl_coeff penalises the KL to the sampling policy and is moved towards kl_target after every iteration; it "
            "cannot be held"
        )
    return Translation(
        (Call("config.env_runners", sampling), Call("config.training", training)),
        [
            *missing,
            f"{_optimizer(config)}: no argument of training(); override the learner's configure_optimizers_for_module",
            "both batch sizes count one learner: with several, divide them by the number of learners; and "
            "num_env_runners times num_envs_per_env_runner are the environments",
        ],
    )


def _trl(config: TrainConfig) -> Translation:
    optimizer, policy = config.optimizer, config.policy
    stands_in = policy.objective == "kl" and policy.proximal == "ewma"
    beta1, beta2 = _betas(config)
    adam = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": optimizer.adam_eps}
    arguments: dict[str, object] = {
        "learning_rate": _short(optimizer.step_size),
        **(adam if optimizer.kind == "adam" else {"optim": "sgd"}),
        "lr_scheduler_type": optimizer.schedule,
        "num_iterations": optimizer.policy_epochs,
        "epsilon": 1e9 if stands_in else policy.clip,
        "max_grad_norm": optimizer.max_grad_norm or 0.0,
        "steps_per_generation": Code(f"{optimizer.minibatches} * GRADIENT_ACCUMULATION_STEPS"),
    }
    missing = [
        "per_device_train_batch_size x gradient_accumulation_steps x devices is the optimisation batch, and "
        "per_device_train_batch_size x steps_per_generation x devices the iteration batch; both count completions, so "
        "divide yours by the same factor instead of copying a number",
        "env.num_envs, rollout.steps, GAE, the value function and the auxiliary phase: no counterpart",
    ]
    if config.advantage.normalize:
        missing.append("advantage.span: no counterpart; rewards are normalised in a group or a batch (scale_rewards)")
    if policy.entropy_coefficient:
        missing.append(f"policy.entropy_coefficient {policy.entropy_coefficient:g}: no counterpart")
    if optimizer.kind == "sgd" and optimizer.sgd_momentum:
        missing.append(f"optimizer.sgd_momentum {optimizer.sgd_momentum:g}: no counterpart")
    if stands_in:
        arguments |= {
            "beta": policy.kl_coefficient,
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
            "ref_model_mixup_alpha": _short(1 / (1 + policy.center_of_mass)),
        }
        missing.insert(
            0,
            "the reference model stands in for the proximal EWMA, alpha = 1/(1 + policy.center_of_mass), but its KL is "
            "the opposite one, KL[theta, reference]; epsilon is too large to clip",
        )
    elif policy.proximal == "ewma":
        missing.insert(0, "policy.center_of_mass: epsilon clips around the sampling policy; no EWMA can be put there")
    elif policy.objective == "kl":
        missing.insert(
            0,
            f"policy.kl_coefficient {policy.kl_coefficient:g} to the sampling policy: no counterpart; beta is for the "
            "KL to a reference model; epsilon limits the policy in its place",
        )
    return Translation((Call("GRPOConfig", arguments),), missing)


def _missing(config: TrainConfig, normalisation: str | None, clipping: str | None) -> list[str]:
    """What has no counterpart in any of the three PPOs.

    Args:
        config: what is expressed.
        normalisation: how the framework normalises advantages; None where it does all that the policy needs.
        clipping: what limits the policy there in place of a KL penalty; None where there is one.
    """
    policy, optimizer = config.policy, config.optimizer
    sentences = []
    if policy.proximal != "behavior" and normalisation is not None:
        ewma = policy.proximal == "ewma"
        what = f"policy.center_of_mass {policy.center_of_mass:g}" if ewma else "policy.proximal recent"
        sentences.append(
            f"{what}: no counterpart; the policy is limited around the one that sampled, so its age follows the "
            "iteration batch: keep environments times steps as it was where you can, and change only the minibatch "
            "size and the step size"
        )
    if policy.objective == "kl" and clipping is not None:
        sentences.append(
            f"policy.kl_coefficient {policy.kl_coefficient:g}: no counterpart; {clipping} limits the policy instead"
        )
    if config.advantage.normalize and normalisation is not None:
        sentences.append(f"advantage.span {config.advantage.span:g}: no counterpart; {normalisation}")
    if optimizer.value_epochs != optimizer.policy_epochs:
        sentences.append(f"optimizer.value_epochs {optimizer.value_epochs}: no counterpart; the policy's number counts")
    if config.aux.enabled:
        sentences.append("aux (the auxiliary phase of PPG): no counterpart")
    if config.stale:
        sentences.append(f"rollout.source {config.rollout.source.kind}: no counterpart; data is sampled and trained on")
    if config.reward.normalize:
        sentences.append(
            "reward.normalize: wrap the environments yourself (VecNormalize, NormalizeReward, a connector)"
        )
    return sentences


def _optimizer(config: TrainConfig) -> str:
    optimizer = config.optimizer
    if optimizer.kind == "sgd":
        return f"SGD with momentum {optimizer.sgd_momentum:g}"
    return f"Adam's betas {_betas(config)} and epsilon {optimizer.adam_eps:g}"


def _betas(config: TrainConfig) -> tuple[float, float]:
    beta1, beta2 = config.optimizer.adam_betas
    return _short(beta1), _short(beta2)


def _norm(value: float | None) -> float:
    return 1e9 if value is None else value  # these frameworks always clip


def _minibatch(config: TrainConfig) -> int:
    return round(config.optimization_batch)


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def _code(value: object) -> str:
    """A value as Python source."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, dict):
        return "dict(" + ", ".join(f"{name}={_code(x)}" for name, x in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_code, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return 'float("inf")' if value == math.inf else repr(value)


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return _code(value) if isinstance(value, Code) or value == math.inf else value


FRAMEWORKS: dict[str, Callable[[TrainConfig], Translation]] = {
    "sb3": _sb3,
    "cleanrl": _cleanrl,
    "rllib": _rllib,
    "trl": _trl,
}
"""Translators by the name that the command line uses."""
