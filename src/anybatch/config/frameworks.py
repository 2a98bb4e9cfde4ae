"""Arguments of other frameworks for the fields of a configuration, one table for each framework.

The tables have two uses: :mod:`anybatch.scaling.frameworks` translates configurations with them, and :func:`explain`
names the field that is meant when somebody types another framework's argument. To add a framework, write its table and
add it to :data:`FRAMEWORKS`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anybatch.config.schema import TrainConfig


class Code(str):
    """A value that is an expression in the user's program, not a constant."""


@dataclass(frozen=True)
class Row:
    """One argument of a framework."""

    names: str
    """Its name, then other spellings, separated by spaces."""
    field: str = ""
    """Our field by full name; empty if there is none."""
    value: Callable[[TrainConfig], object] | None = None
    """Value for a configuration; None takes the field's value."""
    meaning: str = ""
    """Their number in terms of our fields, where it is not the field itself."""
    when: Callable[[TrainConfig], bool] = lambda config: True
    """Whether a configuration needs it."""


@dataclass(frozen=True)
class Framework:
    """A framework's arguments."""

    title: str
    """Name in sentences."""
    calls: dict[str, tuple[Row, ...]]
    """Arguments by the text before them, a function or a command, with the names of ``classes`` in braces."""
    notes: Callable[[TrainConfig], Iterator[str]]
    """One sentence for each property of a configuration without a counterpart."""
    known: tuple[Row, ...] = ()
    """Arguments that are explained but not printed."""
    flags: bool = False
    """Arguments are flags of a command, ``--name value`` on one line."""
    imports: Callable[[TrainConfig], list[str]] = lambda config: []
    """Lines before the calls."""
    classes: Callable[[TrainConfig], dict[str, str]] = lambda config: {}
    """Classes of the calls, by the name in braces."""


def explain(name: str) -> str:
    """Field that is meant by an argument of another framework, as a clause; empty if no table has the name."""
    meanings = _meanings().get(name.replace("-", "_").strip("_"), {})
    return "; ".join(f"the {name} of {', '.join(titles)} is {meaning}" for meaning, titles in meanings.items())


@functools.cache
def _meanings() -> dict[str, dict[str, list[str]]]:
    """For each name its meanings, and for each meaning the frameworks."""
    found: dict[str, dict[str, list[str]]] = {}
    for framework in FRAMEWORKS.values():
        for row in sum(framework.calls.values(), framework.known):
            for name in row.names.split() if row.meaning or row.field else ():
                meaning = row.meaning.format(name=name) or row.field.replace("policy_epochs", _EPOCHS)
                found.setdefault(name.strip("_"), {}).setdefault(meaning, []).append(framework.title)
    return found


# ---------------------------------------------------------------- what several tables use

_EPOCHS = "policy_epochs and optimizer.value_epochs"
_ITERATION = "env.num_envs * rollout.steps"
_ITERATIONS = f"total_env_steps / ({_ITERATION})"
_ACCUMULATED = "optimizer.minibatches * gradient_accumulation_steps"
_TWICE = "twice optimizer.value_coefficient"
_MINIBATCHES = "optimizer.minibatches = env.num_envs * rollout.steps / {name}"
_NO_VALUE_CLIPPING = "not used here, values are never clipped"
_NO_EARLY_STOP = "not used here, epochs are never cut short"


def uses_ppo_ewma(config: TrainConfig) -> bool:
    """Whether rsl_rl needs anybatch.integrations.rsl_rl.PPOEWMA in place of its PPO."""
    return config.policy.objective == "clip" and config.policy.proximal == "ewma"


def _ewma(config: TrainConfig) -> bool:
    return config.policy.proximal == "ewma"


def _minibatch(config: TrainConfig) -> int:
    return round(config.optimization_batch)


def _norm(config: TrainConfig) -> float:
    norm = config.optimizer.max_grad_norm
    return 1e9 if norm is None else norm  # these frameworks always clip


def _adam(config: TrainConfig) -> bool:
    return config.optimizer.kind == "adam"


def _penalty(config: TrainConfig) -> bool:
    return config.policy.objective == "kl"


def _linear(config: TrainConfig) -> bool:
    return config.optimizer.schedule == "linear"


def _optimizer(config: TrainConfig) -> str:
    optimizer = config.optimizer
    if optimizer.kind == "sgd":
        return f"SGD with momentum {optimizer.sgd_momentum:g}"
    betas = ", ".join(f"{beta:.7g}" for beta in optimizer.adam_betas)
    return f"Adam's betas ({betas}) and epsilon {optimizer.adam_eps:g}"


def _schedule_notes(config: TrainConfig) -> Iterator[str]:
    if config.optimizer.schedule not in ("constant", "linear"):
        yield f"optimizer.schedule {config.optimizer.schedule}: set its own schedule there; the step size is constant"
    for name in ("clip", "entropy"):
        if (schedule := getattr(config.policy, f"{name}_schedule")) != "constant":
            yield f"policy.{name}_schedule {schedule}: set its own schedule there; the number is constant"


def _ppo_notes(config: TrainConfig, normalization: str, clipping: str, always: bool = False) -> Iterator[str]:
    """Properties that none of the PPOs has.

    ``normalization`` is how the framework normalises advantages, empty if as we do, and ``always`` whether it cannot be
    switched off; ``clipping`` limits the policy there in place of a KL penalty, empty if it has one.
    """
    policy, optimizer = config.policy, config.optimizer
    yield from _schedule_notes(config)
    if policy.proximal != "behavior" and normalization:
        ewma = policy.proximal == "ewma"
        what = f"policy.center_of_mass {policy.center_of_mass:g}" if ewma else "policy.proximal recent"
        yield (
            f"{what}: no counterpart; the policy is limited around the one that sampled, so its age follows the "
            "iteration batch: keep environments times steps as it was where you can, and change only the minibatch "
            "size and the step size"
        )
    if policy.objective == "kl" and clipping:
        yield f"policy.kl_coefficient {policy.kl_coefficient:g}: no counterpart; {clipping} limits the policy instead"
    if config.advantage.normalize and normalization:
        yield f"advantage.span {config.advantage.span:g}: no counterpart; {normalization}"
    if not config.advantage.normalize and always:
        yield f"advantage.normalize false: no counterpart; {normalization}"
    if optimizer.value_epochs != optimizer.policy_epochs:
        yield f"optimizer.value_epochs {optimizer.value_epochs}: no counterpart; the value takes policy_epochs too"
    if config.aux.enabled:
        yield "aux (the auxiliary phase of PPG): no counterpart"
    if config.stale:
        yield f"rollout.source {config.rollout.source.kind}: no counterpart; it samples and trains in turns"
    if config.reward.normalize:
        yield "reward.normalize: wrap the environments (VecNormalize, NormalizeReward, a connector)"
    if config.observation.normalize:
        yield "observation.normalize: wrap the environments (VecNormalize, NormalizeObservation, a connector)"


# ---------------------------------------------------------------- Stable-Baselines3


def _sb3_classes(config: TrainConfig) -> dict[str, str]:
    return {"PPO": "PPOEWMA" if _ewma(config) else "PPO"}


def _sb3_imports(config: TrainConfig) -> list[str]:
    name, module = _sb3_classes(config)["PPO"], "stable_baselines3"
    torch = [] if _adam(config) else ["import torch"]
    source = "anybatch.integrations.sb3" if name == "PPOEWMA" else module
    return [*torch, f"from {module}.common.env_util import make_vec_env", f"from {source} import {name}"]


def _sb3_step(config: TrainConfig) -> object:
    step = config.optimizer.step_size
    return Code(f"lambda left: left * {step:.7g}") if _linear(config) else step


def _sb3_optimizer(config: TrainConfig) -> object:
    optimizer = config.optimizer
    if optimizer.kind == "sgd":
        return {"optimizer_class": Code("torch.optim.SGD"), "optimizer_kwargs": {"momentum": optimizer.sgd_momentum}}
    return {"optimizer_kwargs": {"betas": optimizer.adam_betas, "eps": optimizer.adam_eps}}


def _sb3_notes(config: TrainConfig) -> Iterator[str]:
    ewma = _ewma(config)
    yield from _ppo_notes(
        config, "" if ewma else "normalize_advantage works on each minibatch", "" if ewma else "clip_range"
    )
    if ewma and _penalty(config) and config.policy.kl_estimator != "exact":
        yield f"policy.kl_estimator {config.policy.kl_estimator}: no counterpart; the KL is exact"


_SB3_ENV = (Row("env_id", "env.id", lambda config: Code("ENV_ID")), Row("n_envs", "env.num_envs"))
_SB3_PPO = (
    Row("policy", value=lambda config: Code("POLICY")),
    Row("env", value=lambda config: Code("env")),
    Row("n_steps", "rollout.steps"),
    Row("batch_size", "optimizer.minibatches", _minibatch, _MINIBATCHES),
    Row("n_epochs", "optimizer.policy_epochs"),
    Row("learning_rate", "optimizer.step_size", _sb3_step),
    Row("gamma", "advantage.discount"),
    Row("gae_lambda", "advantage.gae_lambda"),
    Row("clip_range", "policy.clip", when=lambda config: not (_penalty(config) and _ewma(config))),
    Row("kl_coefficient", "policy.kl_coefficient", when=lambda config: _penalty(config) and _ewma(config)),
    Row("ent_coef", "policy.entropy_coefficient"),
    Row("vf_coef", "optimizer.value_coefficient"),
    Row("max_grad_norm", "optimizer.max_grad_norm", _norm),
    Row("normalize_advantage", "advantage.normalize"),
    Row("center_of_mass", "policy.center_of_mass", when=_ewma),
    Row(
        "advantage_span",
        "advantage.span",
        lambda x: x.advantage.span if x.advantage.normalize else 1.0,
        when=_ewma,
    ),
    Row("max_importance_ratio", "policy.max_importance_ratio", when=_ewma),
    Row("policy_kwargs", "model.options", _sb3_optimizer),
)
_SB3_KNOWN = (
    Row("total_timesteps", "total_env_steps"),
    Row("betas", "optimizer.adam_betas"),
    Row("eps", "optimizer.adam_eps"),
    Row("log_std_init", "model.gaussian.log_std"),
    Row("norm_obs", "observation.normalize"),
    Row("clip_obs", "observation.clip"),
    Row("clip_range_vf", meaning=_NO_VALUE_CLIPPING),
    Row("target_kl", meaning=_NO_EARLY_STOP),
)

# ---------------------------------------------------------------- CleanRL


def _cleanrl_notes(config: TrainConfig) -> Iterator[str]:
    yield from _ppo_notes(config, "norm-adv works on each minibatch", "clip-coef")
    yield f"{_optimizer(config)}: no argument; edit optim.Adam(..., eps=1e-5) there"


_CLEANRL = (
    Row("total_timesteps", "total_env_steps"),
    Row("num_envs", "env.num_envs"),
    Row("num_steps", "rollout.steps"),
    Row("num_minibatches", "optimizer.minibatches"),
    Row("update_epochs", "optimizer.policy_epochs"),
    Row("learning_rate", "optimizer.step_size"),
    Row("gamma", "advantage.discount"),
    Row("gae_lambda", "advantage.gae_lambda"),
    Row("clip_coef", "policy.clip"),
    Row("ent_coef", "policy.entropy_coefficient"),
    Row("vf_coef", "", lambda x: 2 * x.optimizer.value_coefficient, _TWICE),  # ppo.py halves the squared error first
    Row("max_grad_norm", "optimizer.max_grad_norm", _norm),
    Row("anneal_lr", "optimizer.schedule", _linear, "optimizer.schedule linear"),
    Row("norm_adv", "advantage.normalize"),
    Row("clip_vloss", "", lambda config: False, _NO_VALUE_CLIPPING),
)
_CLEANRL_KNOWN = (
    Row("env_id", "env.id"),
    Row("target_kl", meaning=_NO_EARLY_STOP),
    Row("batch_size", meaning=_ITERATION),
    Row("minibatch_size", meaning=_MINIBATCHES),
)

# ---------------------------------------------------------------- RLlib


def _rllib_notes(config: TrainConfig) -> Iterator[str]:
    yield from _ppo_notes(config, "advantages are normalised over each train batch", "", always=True)
    if _penalty(config):
        yield (
            "kl_coeff penalises the KL to the sampling policy and is moved towards kl_target after every iteration; it "
            "cannot be held"
        )
    yield f"{_optimizer(config)}: no argument of training(); override the learner's configure_optimizers_for_module"
    yield (
        "both batch sizes count one learner: with several, divide them by the number of learners; and "
        "num_env_runners times num_envs_per_env_runner are the environments"
    )


def _rllib_step(config: TrainConfig) -> object:
    step = config.optimizer.step_size
    return [[0, step], [config.total_env_steps, 0.0]] if _linear(config) else step


_RLLIB_ENV = (
    Row("num_env_runners num_workers", "", lambda config: 1, "a factor of env.num_envs"),
    Row("num_envs_per_env_runner num_envs_per_worker", "env.num_envs"),
    Row("rollout_fragment_length", "rollout.steps"),
)
_RLLIB_PPO = (
    Row("train_batch_size_per_learner train_batch_size", "", lambda x: x.iteration_batch, _ITERATION),
    Row("minibatch_size sgd_minibatch_size", "optimizer.minibatches", _minibatch, _MINIBATCHES),
    Row("num_epochs num_sgd_iter", "optimizer.policy_epochs"),
    Row("lr", "optimizer.step_size", _rllib_step),
    Row("gamma", "advantage.discount"),
    Row("lambda_", "advantage.gae_lambda"),
    Row("clip_param", "policy.clip", lambda config: math.inf if _penalty(config) else config.policy.clip),
    Row("use_kl_loss", "policy.objective", _penalty, "policy.objective kl"),
    Row("kl_coeff", "policy.kl_coefficient", lambda x: x.policy.kl_coefficient if _penalty(x) else 0.0),
    Row("entropy_coeff", "policy.entropy_coefficient"),
    Row("vf_loss_coeff", "optimizer.value_coefficient"),
    Row("vf_clip_param", "", lambda config: math.inf, _NO_VALUE_CLIPPING),
    Row("grad_clip", "optimizer.max_grad_norm"),
)
_RLLIB_KNOWN = (Row("kl_target", meaning="not used here, policy.kl_coefficient is constant"),)

# ---------------------------------------------------------------- rsl_rl


_RSL_RL_EWMA = "anybatch.integrations.rsl_rl:PPOEWMA"


def _rsl_rl_notes(config: TrainConfig) -> Iterator[str]:
    ewma = uses_ppo_ewma(config)
    yield from _ppo_notes(
        config, "" if ewma else "advantages are normalised over each iteration", "clip_param", always=True
    )
    if ewma and not config.advantage.normalize:
        yield "advantage.normalize false: no counterpart; advantages are normalised by moments over iterations"
    if _linear(config):
        yield "optimizer.schedule linear: no counterpart; the learning rate is fixed, or follows desired_kl"
    yield (
        "schedule: if it was adaptive where you tuned, optimizer.step_size is the learning rate that it settled at "
        "(Loss/learning_rate in rsl_rl's log)"
        + ("; adaptive needs no scaling here, for desired_kl is that to the proximal policy" if ewma else "")
    )
    yield f"{_optimizer(config)}: no argument; rsl_rl passes the learning rate alone"


_RSL_RL_RUNNER = (
    Row("num_steps_per_env", "rollout.steps"),
    Row("max_iterations", "", lambda x: math.ceil(x.total_env_steps / x.iteration_batch), _ITERATIONS),
)
_RSL_RL_PPO = (
    Row("class_name", "policy.proximal", lambda config: _RSL_RL_EWMA if uses_ppo_ewma(config) else "PPO"),
    Row("optimizer", "optimizer.kind"),
    Row("num_learning_epochs", "optimizer.policy_epochs"),
    Row("num_mini_batches", "optimizer.minibatches"),
    Row("learning_rate", "optimizer.step_size"),
    Row("schedule", "optimizer.schedule", lambda config: "fixed"),
    Row("gamma", "advantage.discount"),
    Row("lam", "advantage.gae_lambda"),
    Row("clip_param", "policy.clip"),
    Row("entropy_coef", "policy.entropy_coefficient"),
    Row("value_loss_coef", "optimizer.value_coefficient"),
    Row("use_clipped_value_loss", "", lambda config: False, _NO_VALUE_CLIPPING),
    Row("max_grad_norm", "optimizer.max_grad_norm", _norm),
    Row("normalize_advantage_per_mini_batch", "advantage.normalize", lambda config: False),
    Row("center_of_mass", "policy.center_of_mass", when=uses_ppo_ewma),
    Row("advantage_span", "advantage.span", when=uses_ppo_ewma),
    Row("max_importance_ratio", "policy.max_importance_ratio", when=uses_ppo_ewma),
)
_RSL_RL_KNOWN = (
    Row("num_envs", "env.num_envs"),
    Row("desired_kl", meaning="not used here, the step size does not follow the KL"),
)

# ---------------------------------------------------------------- TRL


def _reference(config: TrainConfig) -> bool:
    """Whether the reference model of GRPO takes the role of the proximal EWMA."""
    return config.policy.objective == "kl" and config.policy.proximal == "ewma"


def _trl_notes(config: TrainConfig) -> Iterator[str]:
    optimizer, policy = config.optimizer, config.policy
    yield from _schedule_notes(config)
    if _reference(config):
        yield (
            "the reference model takes the role of the proximal EWMA, alpha = 1/(1 + policy.center_of_mass), but its "
            "KL is the opposite one, KL[theta, reference]; epsilon is too large to clip"
        )
    elif policy.proximal == "ewma":
        yield "policy.center_of_mass: epsilon clips around the sampling policy, and no EWMA can take its place"
    elif policy.objective == "kl":
        yield (
            f"policy.kl_coefficient {policy.kl_coefficient:g} to the sampling policy: no counterpart; beta is for the "
            "KL to a reference model; epsilon limits the policy in its place"
        )
    yield (
        "per_device_train_batch_size x gradient_accumulation_steps x devices is the optimisation batch, and "
        "per_device_train_batch_size x steps_per_generation x devices the iteration batch; both count completions, so "
        "divide your values by the same factor instead of copying a number"
    )
    yield "env.num_envs, rollout.steps, GAE, the value function and the auxiliary phase: no counterpart"
    if config.advantage.normalize:
        yield "advantage.span: no counterpart; rewards are normalised in a group or a batch (scale_rewards)"
    if policy.entropy_coefficient:
        yield f"policy.entropy_coefficient {policy.entropy_coefficient:g}: no counterpart"
    if optimizer.kind == "sgd" and optimizer.sgd_momentum:
        yield f"optimizer.sgd_momentum {optimizer.sgd_momentum:g}: no counterpart"


_TRL_BETA = "policy.kl_coefficient (of the KL to the proximal policy, not to a reference model)"
_TRL = (
    Row("learning_rate", "optimizer.step_size"),
    Row("adam_beta1", "optimizer.adam_betas", lambda config: config.optimizer.adam_betas[0], when=_adam),
    Row("adam_beta2", "optimizer.adam_betas", lambda config: config.optimizer.adam_betas[1], when=_adam),
    Row("adam_epsilon", "optimizer.adam_eps", when=_adam),
    Row("optim", "optimizer.kind", when=lambda config: not _adam(config)),
    Row("lr_scheduler_type", "optimizer.schedule", lambda x: "linear" if _linear(x) else "constant"),
    Row("num_iterations num_ppo_epochs", "optimizer.policy_epochs"),
    Row("epsilon cliprange", "policy.clip", lambda config: 1e9 if _reference(config) else config.policy.clip),
    Row("max_grad_norm", "optimizer.max_grad_norm", lambda config: config.optimizer.max_grad_norm or 0.0),
    Row(
        "steps_per_generation",
        "",
        lambda x: Code(f"{x.optimizer.minibatches} * GRADIENT_ACCUMULATION_STEPS"),
        _ACCUMULATED,
    ),
    Row("beta kl_coef", "policy.kl_coefficient", meaning=_TRL_BETA, when=_reference),
    Row("sync_ref_model", "", lambda config: True, "policy.proximal ewma", _reference),
    Row("ref_model_sync_steps", "", lambda config: 1, "always 1 here", _reference),
    Row(
        *("ref_model_mixup_alpha", "policy.center_of_mass", lambda config: 1 / (1 + config.policy.center_of_mass)),
        meaning="1 / (1 + policy.center_of_mass)",
        when=_reference,
    ),
)
_TRL_KNOWN = (
    Row("num_mini_batches", "optimizer.minibatches"),
    Row("gamma", "advantage.discount"),
    Row("lam", "advantage.gae_lambda"),
    Row("vf_coef", meaning=_TWICE),
    Row("cliprange_value", meaning=_NO_VALUE_CLIPPING),
)

# ---------------------------------------------------------------- TorchRL


def _torchrl_classes(config: TrainConfig) -> dict[str, str]:
    optimizer = "Adam" if _adam(config) else "SGD"
    return {"Loss": "KLPENPPOLoss" if _penalty(config) else "ClipPPOLoss", "Optimizer": f"torch.optim.{optimizer}"}


def _torchrl_imports(config: TrainConfig) -> list[str]:
    average = ["from anybatch.integrations.torchrl import EwmaUpdate"] if _ewma(config) else []
    moments = ["from anybatch.normalize import AdvantageNormalizer"] if config.advantage.normalize else []
    return [
        "import torch",
        "from torchrl.collectors import Collector",
        "from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement",
        "from torchrl.envs import SerialEnv",
        f"from torchrl.objectives import {_torchrl_classes(config)['Loss']}",
        "from torchrl.objectives.value import GAE",
        *average,
        *moments,
    ]


def _torchrl_notes(config: TrainConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, []
    yield from _ppo_notes(config, "", "")
    if config.policy.proximal == "recent":
        yield "policy.proximal recent: call SoftUpdate(loss_module, eps=0.0).step() before each iteration"
    if config.advantage.normalize:
        steps.append("normalizer.update(*moments(advantage)) once an iteration (anybatch.distributed.moments)")
    if optimizer.max_grad_norm is not None:
        steps.append(f"torch.nn.utils.clip_grad_norm_(loss_module.parameters(), {optimizer.max_grad_norm:g})")
    if _linear(config):
        steps.append("a torch.optim.lr_scheduler.LinearLR to 0")
    if _ewma(config):
        steps.append("average.step() after each gradient step")
    epochs = f"{optimizer.policy_epochs} pass{'es' if optimizer.policy_epochs > 1 else ''} over the buffer an iteration"
    yield f"your loop has {'; '.join([epochs, *steps])}"


_TORCHRL = {
    "env = SerialEnv": (
        Row("num_workers", "env.num_envs", meaning="env.num_envs, or the number of worker processes"),
        Row("create_env_fn", value=lambda config: Code("MAKE_ENV")),
    ),
    "collector = Collector": (
        Row("create_env_fn", value=lambda config: Code("env")),
        Row("policy", value=lambda config: Code("actor")),
        Row("frames_per_batch", "", lambda x: x.iteration_batch, _ITERATION),
        Row("total_frames", "total_env_steps"),
    ),
    "buffer = ReplayBuffer": (
        Row("storage", value=lambda x: Code(f"LazyTensorStorage({x.iteration_batch})")),
        Row("sampler", value=lambda config: Code("SamplerWithoutReplacement()")),
        Row("batch_size", "optimizer.minibatches", _minibatch, _MINIBATCHES),
    ),
    "gae = GAE": (
        Row("gamma", "advantage.discount"),
        Row("lmbda", "advantage.gae_lambda"),
        Row("value_network", value=lambda config: Code("critic")),
    ),
    "loss_module = {Loss}": (
        Row("actor_network", value=lambda config: Code("actor")),
        Row("critic_network", value=lambda config: Code("critic")),
        Row("clip_epsilon", "policy.clip", when=lambda config: not _penalty(config)),
        Row("beta", "policy.kl_coefficient", when=_penalty),
        Row("increment", value=lambda config: 1.0, when=_penalty),  # beta stays as it is
        Row("decrement", value=lambda config: 1.0, when=_penalty),
        Row("entropy_coeff", "policy.entropy_coefficient"),
        Row("critic_coeff", "optimizer.value_coefficient"),
        Row("loss_critic_type", value=lambda config: "l2"),
        Row("normalize_advantage", "advantage.normalize", lambda config: False),  # works on each minibatch
        Row("delay_actor", "policy.proximal", lambda config: config.policy.proximal != "behavior"),
        Row("max_importance_ratio", "policy.max_importance_ratio"),
    ),
    "average = EwmaUpdate": (
        Row("loss_module", value=lambda config: Code("loss_module"), when=_ewma),
        Row("center_of_mass", "policy.center_of_mass", when=_ewma),
    ),
    "normalizer = AdvantageNormalizer": (Row("span", "advantage.span", when=lambda x: x.advantage.normalize),),
    "optimizer = {Optimizer}": (
        Row("params", value=lambda config: Code("loss_module.parameters()")),
        Row("lr", "optimizer.step_size"),
        Row("betas", "optimizer.adam_betas", when=_adam),
        Row("eps", "optimizer.adam_eps", when=_adam),
        Row("momentum", "optimizer.sgd_momentum", when=lambda config: not _adam(config)),
    ),
}

FRAMEWORKS = {
    "sb3": Framework(
        "Stable-Baselines3",
        {"env = make_vec_env": _SB3_ENV, "model = {PPO}": _SB3_PPO},
        _sb3_notes,
        _SB3_KNOWN,
        imports=_sb3_imports,
        classes=_sb3_classes,
    ),
    "cleanrl": Framework("CleanRL", {"python cleanrl/ppo.py": _CLEANRL}, _cleanrl_notes, _CLEANRL_KNOWN, flags=True),
    "rllib": Framework(
        "RLlib", {"config.env_runners": _RLLIB_ENV, "config.training": _RLLIB_PPO}, _rllib_notes, _RLLIB_KNOWN
    ),
    "trl": Framework("TRL", {"GRPOConfig": _TRL}, _trl_notes, _TRL_KNOWN),
    "torchrl": Framework("TorchRL", _TORCHRL, _torchrl_notes, imports=_torchrl_imports, classes=_torchrl_classes),
    "rsl_rl": Framework(
        "rsl_rl", {"runner = dict": _RSL_RL_RUNNER, "algorithm = dict": _RSL_RL_PPO}, _rsl_rl_notes, _RSL_RL_KNOWN
    ),
}
"""Tables by the name that ``anybatch scale --for`` takes."""
