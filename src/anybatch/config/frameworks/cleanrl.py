"""Arguments of CleanRL."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.config.frameworks.common import (
    ITERATION,
    MINIBATCHES,
    NO_VALUE_CLIPPING,
    SEED,
    TWICE,
    describe_optimizer,
    is_linear,
    max_norm,
    ppo_notes,
)
from anybatch.config.frameworks.rows import Code, Framework, Row
from anybatch.config.schema import TrainConfig


def _notes(config: TrainConfig) -> Iterator[str]:
    yield from ppo_notes(config, "norm-adv works on each minibatch", "clip-coef", counterparts=("kl_stop",))
    yield (
        "ppo.py takes discrete actions and vectors; ppo_continuous_action.py, ppo_atari.py and ppo_procgen.py have the "
        "same arguments"
    )
    yield f"{describe_optimizer(config)}: no argument; edit optim.Adam(..., eps=1e-5) there"


_ARGUMENTS = (
    Row("env_id", "env.id", lambda config: Code("ENV_ID")),
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
    Row("vf_coef", "", lambda x: 2 * x.optimizer.value_coefficient, TWICE),  # ppo.py halves the squared error first
    Row("max_grad_norm", "optimizer.max_grad_norm", max_norm),
    Row("anneal_lr", "optimizer.schedule", is_linear, "optimizer.schedule linear"),
    Row("norm_adv", "advantage.normalize"),
    Row("clip_vloss", "", lambda config: False, NO_VALUE_CLIPPING),
    Row("target_kl", "optimizer.kl_stop", when=lambda config: config.optimizer.kl_stop is not None),
)
_KNOWN = (
    Row("batch_size", meaning=ITERATION),
    Row("minibatch_size", meaning=MINIBATCHES),
    Row("seed", meaning=SEED),
    Row("torch_deterministic", meaning="not needed here, convolutions are always deterministic"),
    Row("cuda", "device"),
    Row("track", "log.wandb"),
    Row("capture_video", meaning="not used here, anybatch watch records a video after training"),
)

TABLE = Framework("CleanRL", {"python cleanrl/ppo.py": _ARGUMENTS}, _notes, _KNOWN, flags=True)
