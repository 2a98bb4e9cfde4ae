"""Arguments of TorchRL."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.config.frameworks.common import (
    ITERATION,
    MINIBATCHES,
    exact_kl,
    has_ewma,
    is_adam,
    is_linear,
    is_penalty,
    minibatch_size,
    ppo_notes,
)
from anybatch.config.frameworks.rows import Code, Framework, Row
from anybatch.config.schema import TrainConfig


def _classes(config: TrainConfig) -> dict[str, str]:
    optimizer = "Adam" if is_adam(config) else "SGD"
    return {"Loss": "KLPENPPOLoss" if is_penalty(config) else "ClipPPOLoss", "Optimizer": f"torch.optim.{optimizer}"}


def _imports(config: TrainConfig) -> list[str]:
    average = ["from anybatch.integrations.torchrl import EwmaUpdate"] if has_ewma(config) else []
    moments = ["from anybatch.normalize import AdvantageNormalizer"] if config.advantage.normalize else []
    return [
        "import torch",
        "from torchrl.collectors import Collector",
        "from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement",
        "from torchrl.envs import SerialEnv",
        f"from torchrl.objectives import {_classes(config)['Loss']}",
        "from torchrl.objectives.value import GAE",
        *average,
        *moments,
    ]


def _notes(config: TrainConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, []
    yield from ppo_notes(config, "", "")
    yield from exact_kl(config)
    if config.policy.proximal == "recent":
        yield "policy.proximal recent: call SoftUpdate(loss_module, eps=0.0).step() before each iteration"
    if config.advantage.normalize:
        steps.append(
            "normalizer.update(*moments(advantage)) and advantage = normalizer(advantage) once per iteration "
            "(anybatch.distributed.moments)"
        )
    if optimizer.max_grad_norm is not None:
        steps.append(f"torch.nn.utils.clip_grad_norm_(loss_module.parameters(), {optimizer.max_grad_norm:g})")
    if is_linear(config):
        steps.append("a torch.optim.lr_scheduler.LinearLR to 0")
    if has_ewma(config):
        steps.append("average.step() after each gradient step")
    epochs = (
        f"{optimizer.policy_epochs} pass{'es' if optimizer.policy_epochs > 1 else ''} over the buffer per iteration"
    )
    yield f"your loop needs {'; '.join([epochs, *steps])}"


_CALLS = {
    "env = SerialEnv": (
        Row("num_workers", "env.num_envs", meaning="env.num_envs, or the number of worker processes"),
        Row("create_env_fn", value=lambda config: Code("MAKE_ENV")),
    ),
    "collector = Collector": (
        Row("create_env_fn", value=lambda config: Code("env")),
        Row("policy", value=lambda config: Code("actor")),
        Row("frames_per_batch", "", lambda x: x.iteration_batch, ITERATION),
        Row("total_frames", "total_env_steps"),
    ),
    "buffer = ReplayBuffer": (
        Row("storage", value=lambda x: Code(f"LazyTensorStorage({x.iteration_batch})")),
        Row("sampler", value=lambda config: Code("SamplerWithoutReplacement()")),
        Row("batch_size", "optimizer.minibatches", minibatch_size, MINIBATCHES),
    ),
    "gae = GAE": (
        Row("gamma", "advantage.discount"),
        Row("lmbda", "advantage.gae_lambda"),
        Row("value_network", value=lambda config: Code("critic")),
    ),
    "loss_module = {Loss}": (
        Row("actor_network", value=lambda config: Code("actor")),
        Row("critic_network", value=lambda config: Code("critic")),
        Row("clip_epsilon", "policy.clip", when=lambda config: not is_penalty(config)),
        Row("beta", "policy.kl_coefficient", when=is_penalty),
        Row("increment", value=lambda config: 1.0, when=is_penalty),  # beta stays as it is
        Row("decrement", value=lambda config: 1.0, when=is_penalty),
        Row("entropy_coeff", "policy.entropy_coefficient"),
        Row("critic_coeff", "optimizer.value_coefficient"),
        Row("loss_critic_type", value=lambda config: "l2"),
        Row("normalize_advantage", "advantage.normalize", lambda config: False),  # works on each minibatch
        Row("delay_actor", "policy.proximal", lambda config: config.policy.proximal != "behavior"),
        Row("max_importance_ratio", "policy.max_importance_ratio"),
    ),
    "average = EwmaUpdate": (
        Row("loss_module", value=lambda config: Code("loss_module"), when=has_ewma),
        Row("center_of_mass", "policy.center_of_mass", when=has_ewma),
    ),
    "normalizer = AdvantageNormalizer": (Row("span", "advantage.span", when=lambda x: x.advantage.normalize),),
    "optimizer = {Optimizer}": (
        Row("params", value=lambda config: Code("loss_module.parameters()")),
        Row("lr", "optimizer.step_size"),
        Row("betas", "optimizer.adam_betas", when=is_adam),
        Row("eps", "optimizer.adam_eps", when=is_adam),
        Row("momentum", "optimizer.sgd_momentum", when=lambda config: not is_adam(config)),
    ),
}

TABLE = Framework("TorchRL", _CALLS, _notes, imports=_imports, classes=_classes)
