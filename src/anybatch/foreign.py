"""The same hyperparameters under the names of other frameworks, and what those frameworks have no counterpart for.

Names were checked against Stable-Baselines3 2.7 (``PPO``), CleanRL's ``ppo.py``, RLlib's ``PPOConfig`` (new API stack)
and TRL's ``GRPOConfig``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anybatch.config import TrainConfig


@dataclass(frozen=True)
class Translation:
    """What to type into another framework."""

    call: str
    """What the arguments belong to, with ``{}`` where they go."""
    arguments: dict[str, object]
    missing: list[str]
    """One sentence for each thing that has no counterpart."""

    def __str__(self) -> str:
        lines = [self.call.format("".join(f"\n    {name}={value}," for name, value in self.arguments.items()) + "\n")]
        return "\n".join([*lines, *(f"# {sentence}" for sentence in self.missing)])


def translate(config: TrainConfig, framework: str) -> Translation:
    """Express a configuration in another framework's arguments.

    Args:
        config: scaled or not.
        framework: a key of :data:`FRAMEWORKS`.
    """
    return FRAMEWORKS[framework](config)


def _sb3(config: TrainConfig) -> Translation:
    optimizer = config.optimizer
    return Translation(
        f"env = make_vec_env(ENV_ID, n_envs={config.env.num_envs})\nmodel = PPO(POLICY, env,{{}})",
        {
            "n_steps": config.rollout.steps,
            "batch_size": _whole(config.optimization_batch),
            "n_epochs": optimizer.policy_epochs,
            "learning_rate": f"{optimizer.step_size:.6g}",
            "gamma": config.advantage.discount,
            "gae_lambda": config.advantage.gae_lambda,
            "clip_range": config.policy.clip,
            "ent_coef": config.policy.entropy_coefficient,
            "vf_coef": optimizer.value_coefficient,
            "max_grad_norm": _norm(optimizer.max_grad_norm),
            "normalize_advantage": config.advantage.normalize,
            "policy_kwargs": f"dict(optimizer_kwargs=dict(betas={_betas(config)}, eps={optimizer.adam_eps:g}))",
        },
        _missing(config, "normalize_advantage works on each minibatch"),
    )


def _cleanrl(config: TrainConfig) -> Translation:
    optimizer = config.optimizer
    flags = {
        "num-envs": config.env.num_envs,
        "num-steps": config.rollout.steps,
        "num-minibatches": optimizer.minibatches,
        "update-epochs": optimizer.policy_epochs,
        "learning-rate": f"{optimizer.step_size:.6g}",
        "gamma": config.advantage.discount,
        "gae-lambda": config.advantage.gae_lambda,
        "clip-coef": config.policy.clip,
        "ent-coef": config.policy.entropy_coefficient,
        "vf-coef": 2 * optimizer.value_coefficient,  # ppo.py halves the squared error first
        "max-grad-norm": _norm(optimizer.max_grad_norm),
    }
    switches = [
        "--anneal-lr" if optimizer.schedule == "linear" else "--no-anneal-lr",
        "--norm-adv" if config.advantage.normalize else "--no-norm-adv",
        "--no-clip-vloss",
    ]
    command = " ".join(["python cleanrl/ppo.py", *(f"--{name} {value}" for name, value in flags.items()), *switches])
    missing = _missing(config, "norm-adv works on each minibatch")
    missing.append(
        f"Adam's betas {_betas(config)} and epsilon {optimizer.adam_eps:g}: no argument; edit optim.Adam(...) there"
    )
    return Translation(command.replace("{", "{{").replace("}", "}}"), {}, missing)


def _rllib(config: TrainConfig) -> Translation:
    optimizer, policy = config.optimizer, config.policy
    return Translation(
        f"config.env_runners(  # num_env_runners x num_envs_per_env_runner = {config.env.num_envs}\n"
        f"    num_envs_per_env_runner={config.env.num_envs}, rollout_fragment_length={config.rollout.steps})\n"
        "config.training({})",
        {
            "train_batch_size_per_learner": config.iteration_batch,
            "minibatch_size": _whole(config.optimization_batch),
            "num_epochs": optimizer.policy_epochs,
            "lr": f"{optimizer.step_size:.6g}",
            "gamma": config.advantage.discount,
            "lambda_": config.advantage.gae_lambda,
            "clip_param": policy.clip if policy.objective == "clip" else 'float("inf")',
            "use_kl_loss": policy.objective == "kl",
            "kl_coeff": policy.kl_coefficient if policy.objective == "kl" else 0.0,
            "entropy_coeff": policy.entropy_coefficient,
            "vf_loss_coeff": optimizer.value_coefficient,
            "vf_clip_param": 'float("inf")',
            "grad_clip": optimizer.max_grad_norm,
        },
        [
            *_missing(config, "advantages are normalised over each train batch"),
            f"Adam's betas {_betas(config)}: no argument of training(); override the learner's configure_optimizers",
            "RLlib's KL coefficient adapts itself towards kl_target; here it is fixed",
        ],
    )


def _trl(config: TrainConfig) -> Translation:
    optimizer, policy = config.optimizer, config.policy
    beta1, beta2 = optimizer.adam_betas
    arguments: dict[str, object] = {
        "learning_rate": f"{optimizer.step_size:.6g}",
        "adam_beta1": f"{beta1:.7g}",
        "adam_beta2": f"{beta2:.7g}",
        "adam_epsilon": f"{optimizer.adam_eps:g}",
        "lr_scheduler_type": f'"{optimizer.schedule}"',
        "num_iterations": optimizer.policy_epochs,
        "epsilon": policy.clip,
        "max_grad_norm": optimizer.max_grad_norm or 0.0,
        "steps_per_generation": f"{optimizer.minibatches} * GRADIENT_ACCUMULATION_STEPS",
    }
    missing = [
        "per_device_train_batch_size x gradient_accumulation_steps x devices is the optimisation batch; it counts "
        "completions, so divide yours by the same factor instead of copying a number",
        "advantage.span: no counterpart; rewards are normalised within a group or a batch (scale_rewards)",
        "GAE, the value function and the auxiliary phase: no counterpart",
    ]
    if policy.objective == "kl" and policy.proximal == "ewma":
        arguments |= {
            "beta": policy.kl_coefficient,
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
            "ref_model_mixup_alpha": f"{1 / (1 + policy.center_of_mass):.6g}",
        }
        missing.insert(
            0,
            "the reference model stands in for the proximal EWMA, alpha = 1/(1 + centre of mass), but its KL is the "
            "opposite one, KL[theta, reference]",
        )
    elif policy.proximal == "ewma":
        missing.insert(0, "policy.center_of_mass: epsilon clips around the sampling policy; no EWMA can be put there")
    return Translation("GRPOConfig({})", arguments, missing)


def _missing(config: TrainConfig, normalisation: str) -> list[str]:
    policy = config.policy
    sentences = []
    if policy.proximal == "ewma":
        sentences.append(
            f"policy.center_of_mass {policy.center_of_mass:g}: no counterpart; clipping is around the sampling policy, "
            "so its age follows the iteration batch: keep environments times steps as it was where you can, and change "
            "only the minibatch size and the step size"
        )
    if policy.objective == "kl":
        sentences.append(f"policy.kl_coefficient {policy.kl_coefficient:g} to the proximal policy: no counterpart")
    if config.advantage.normalize:
        sentences.append(f"advantage.span {config.advantage.span:g}: no counterpart; {normalisation}")
    if config.aux.enabled:
        sentences.append("aux (the auxiliary phase of PPG): no counterpart")
    if config.reward.normalize:
        sentences.append(
            "reward.normalize: wrap the environments yourself (VecNormalize, NormalizeReward, a connector)"
        )
    return sentences


def _betas(config: TrainConfig) -> str:
    return "({:.7g}, {:.7g})".format(*config.optimizer.adam_betas)


def _norm(value: float | None) -> object:
    return 1e9 if value is None else value  # these frameworks always clip


def _whole(samples: float) -> int:
    return round(samples)


FRAMEWORKS: dict[str, Callable[[TrainConfig], Translation]] = {
    "sb3": _sb3,
    "cleanrl": _cleanrl,
    "rllib": _rllib,
    "trl": _trl,
}
"""Translators by the name that the command line uses."""
