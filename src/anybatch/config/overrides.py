"""Names and types of the changes that presets take, for editors and type checkers.

A test compares them with the fields of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypedDict

from anybatch.config.schema import Scalar

Schedule: TypeAlias = str | Callable[[float], float]
"""A schedule as text, or a function from the fraction of the run to the factor."""


class Overrides(TypedDict, total=False):
    """Fields of the configuration by their short names, and sections with a dictionary of their fields.

    Names with dots, such as ``"rollout.source.kind"``, can be given in a dictionary after ``**``.
    """

    total_env_steps: int
    workers: int
    precision: Literal["auto", "fp32", "bf16"]
    device: str
    micro_batch: int | None
    compile: bool
    keep_freed_memory: bool
    checkpoint_seconds: float
    keep_checkpoints: int
    num_envs: int
    env_num_envs: int
    env_options: dict[str, Scalar]
    bootstrap_truncated: bool | None
    action_mask: str
    frame_stack: int
    info_keys: tuple[str, ...]
    threads: int
    step_timeout: float | None
    observation: Mapping[str, Any]
    observation_normalize: bool
    observation_clip: float
    model: Mapping[str, Any]
    encoder: str | type[Any]
    recurrent: Literal["none", "gru", "lstm"]
    recurrent_width: int | None
    architecture: Literal["shared", "dual", "detach"]
    model_options: dict[str, Scalar]
    policy_gain: float | None
    value_gain: float | None
    model_gaussian_std: Literal["parameter", "network"]
    log_std: float
    log_std_bounds: tuple[float, float] | None
    squash: bool
    rollout: Mapping[str, Any]
    steps: int
    rollout_steps: int
    rollout_source_kind: Literal["synchronous", "delayed", "asynchronous"]
    delay: int
    max_lag: int
    deterministic: bool
    ray_workers: int
    reward: Mapping[str, Any]
    reward_normalize: bool
    return_discount: float
    bound: float
    advantage: Mapping[str, Any]
    discount: float
    advantage_discount: float
    gae_lambda: float
    advantage_normalize: bool
    span: float
    policy: Mapping[str, Any]
    objective: Literal["clip", "kl"]
    clip: float
    policy_clip: float
    clip_schedule: Schedule
    kl_coefficient: float
    kl_estimator: Literal["exact", "half-squared"]
    proximal: Literal["behavior", "recent", "ewma"]
    importance: Literal["behavior", "proximal"]
    center_of_mass: float
    max_importance_ratio: float
    interpolated: bool
    second_moment: float | None
    allow_stale_coupled: bool
    entropy_coefficient: float
    entropy_schedule: Schedule
    optimizer: Mapping[str, Any]
    optimizer_kind: Literal["adam", "sgd"]
    step_size: float
    optimizer_step_size: float
    schedule: Schedule
    optimizer_schedule: Schedule
    kl_target: float | None
    kl_factor: float
    follow_ess: bool
    kl_stop: float | None
    adam_betas: tuple[float, float]
    adam_eps: float
    sgd_momentum: float
    max_grad_norm: float | None
    minibatches: int
    optimizer_minibatches: int
    shuffle: Literal["trajectories", "samples"]
    policy_epochs: int
    value_epochs: int
    epoch_window: float
    value_coefficient: float
    aux: Mapping[str, Any]
    enabled: bool
    policy_iterations: int
    aux_epochs: int
    aux_minibatches: int | None
    aux_step_size: float
    clone_coefficient: float
    storage: Literal["auto", "ram", "disk"]
    eval: Mapping[str, Any]
    every: int | None
    episodes: int
    eval_num_envs: int | None
    max_steps: int | None
    eval_options: dict[str, Scalar]
    keep_best: bool
    stop_at: float | None
    log: Mapping[str, Any]
    tensorboard: bool
    wandb: bool
    wandb_project: str
    noise_scale: bool
