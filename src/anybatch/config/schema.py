"""Everything that defines a run, as frozen dataclasses; :mod:`anybatch.config.validation` checks them.

N environments, T steps a rollout, so N*T samples an iteration and N*T/minibatches samples a gradient step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Scalar: TypeAlias = bool | int | float | str
"""A value that an option of an environment or encoder can have."""


@dataclass(frozen=True)
class EnvConfig:
    """What is played, and how many copies of it."""

    id: str = "procgen:starpilot-hard"
    """procgen:GAME-MODE, gym:ID, envpool:ID, or import.path:function that makes a Gymnasium environment."""
    num_envs: int = 256
    """Parallel environments N, over all workers together."""
    options: dict[str, Scalar] = field(default_factory=dict)
    """Options handed to the environment, as pairs: num_levels 200 start_level 0."""
    bootstrap_truncated: bool | None = None
    """Bootstrap the value where an episode was cut by a time limit; None means yes, except for Procgen."""
    threads: int = 0
    """Threads that step EnvPool environments; 0 lets EnvPool choose."""
    step_timeout: float | None = None
    """Seconds after which a step or reset that has not returned ends the run; None waits for ever."""


@dataclass(frozen=True)
class ModelConfig:
    """The policy and value networks."""

    encoder: str = "auto"
    """impala, nature, mlp, import.path:Class of your own, or auto (impala for images, else mlp)."""
    architecture: Literal["shared", "dual", "detach"] = "shared"
    """One encoder for policy and value, two, or one that the value's gradient does not reach."""
    options: dict[str, Scalar] = field(default_factory=dict)
    """Arguments of the encoder, as pairs: width 64 depth 2 for mlp."""


@dataclass(frozen=True)
class SourceConfig:
    """Where rollouts come from, and how stale they are."""

    kind: Literal["synchronous", "delayed", "asynchronous"] = "synchronous"
    """synchronous, delayed (artificial staleness), or asynchronous (sampling beside learning)."""
    delay: int = 0
    """Iterations that every rollout waits before it is trained on (delayed)."""
    max_lag: int = 1
    """Most iterations between the weights that acted and those being trained (asynchronous)."""
    deterministic: bool = False
    """Act with weights exactly max_lag iterations old, not with the newest: one seed, one result (asynchronous)."""
    ray_workers: int = 0
    """Sample in this many Ray actors (of each data-parallel worker), also on other machines; 0: in a thread here."""


@dataclass(frozen=True)
class RolloutConfig:
    """How experience is sampled."""

    steps: int = 256
    """Timesteps per rollout T, of each environment."""
    source: SourceConfig = field(default_factory=SourceConfig)


@dataclass(frozen=True)
class RewardConfig:
    """Reward normalisation: rewards are divided by the standard deviation of the discounted return."""

    normalize: bool = True
    """Divide rewards by the running standard deviation of their discounted sum."""
    return_discount: float = 0.99
    """Discount of the running return whose standard deviation is used."""
    bound: float = 10.0
    """Normalised rewards are clipped to plus or minus this."""


@dataclass(frozen=True)
class AdvantageConfig:
    """Generalised advantage estimation, and normalisation of the advantages over iterations."""

    discount: float = 0.999
    """GAE discount rate gamma."""
    gae_lambda: float = 0.95
    """GAE bootstrapping parameter lambda."""
    normalize: bool = True
    """Shift and scale advantages to mean 0 and variance 1 with moments over iterations."""
    span: float = 1.0
    """Effective sample size of those moments in iterations, 2/(1-beta)-1; 1 is the current iteration alone."""


@dataclass(frozen=True)
class PolicyConfig:
    """The policy objective: which policy limits the step, which corrects for sampling, and how."""

    objective: Literal["clip", "kl"] = "clip"
    """The decoupled clipped objective, or the decoupled KL-penalised one."""
    clip: float = 0.2
    """PPO clipping parameter epsilon."""
    kl_coefficient: float = 1.0
    """Coefficient beta of the KL penalty (objective kl)."""
    kl_estimator: Literal["exact", "half-squared"] = "exact"
    """exact KL[prox, theta], or half the squared log-ratio of sampled actions as the published code has it."""
    proximal: Literal["behavior", "recent", "ewma"] = "behavior"
    """The policy that controls the size of updates: the one that sampled, the one before the iteration, or the EWMA."""
    importance: Literal["behavior", "proximal"] = "behavior"
    """The policy in the denominator of the importance weight."""
    center_of_mass: float = 8.0
    """Centre of mass of the proximal EWMA, in gradient steps: beta/(1-beta)."""
    max_importance_ratio: float = 100.0
    """Cap on pi_theta / pi_behav."""
    allow_stale_coupled: bool = False
    """Accept stale data with proximal behavior or importance proximal, figures 1(c) and 1(a), which learn worse."""
    entropy_coefficient: float = 0.01
    """Coefficient of the entropy bonus."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser of policy and value, and how the data of an iteration is walked through."""

    kind: Literal["adam", "sgd"] = "adam"
    """adam or sgd."""
    step_size: float = 5e-4
    """Adam step size alpha, or the SGD learning rate."""
    schedule: Literal["constant", "linear"] = "constant"
    """Constant step size, or linear decay to 0 over the run's environment steps."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    sgd_momentum: float = 0.0
    """Momentum of SGD."""
    max_grad_norm: float | None = None
    """Clip the gradient's norm to this; the paper does not."""
    minibatches: int = 8
    """Minibatches per epoch, that is gradient steps."""
    policy_epochs: int = 1
    """Passes over an iteration's data for the policy: E, or E_pi in PPG."""
    value_epochs: int = 1
    """Passes for the value function, E_V; where it differs from policy_epochs each has its own optimiser."""
    value_coefficient: float = 0.5
    """Coefficient of mean((v - target)^2)."""


@dataclass(frozen=True)
class AuxiliaryConfig:
    """The auxiliary phase of Phasic Policy Gradient."""

    enabled: bool = False
    """Run an auxiliary phase after every `policy_iterations` iterations (PPG)."""
    policy_iterations: int = 32
    """Policy iterations per phase N_pi."""
    epochs: int = 6
    """Auxiliary epochs E_aux; 0 skips the phase."""
    minibatches: int | None = None
    """Auxiliary minibatches per epoch; None means 16 for each of the policy iterations, as in the paper."""
    step_size: float = 5e-4
    """Step size of the auxiliary phase's own Adam."""
    clone_coefficient: float = 1.0
    """Coefficient beta_clone of KL[old, new]."""
    storage: Literal["auto", "ram", "disk"] = "auto"
    """Where a phase's observations are kept; auto decides from what is free."""

    @property
    def minibatches_per_epoch(self) -> int:
        """``minibatches``, or what None means."""
        return 16 * self.policy_iterations if self.minibatches is None else self.minibatches


@dataclass(frozen=True)
class LogConfig:
    """What is written besides progress.csv."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (extra anybatch[wandb])."""
    wandb_project: str = "anybatch"
    """Project name there."""
    noise_scale: bool = True
    """Estimate the gradient noise scale, which says up to which batch the scaling rules hold."""


@dataclass(frozen=True)
class TrainConfig:
    """A complete, re-runnable description of a training run (the seed and the folder aside)."""

    total_env_steps: int = 100_000_000
    """Environment steps to train for, over all environments."""
    workers: int = 4
    """Data-parallel workers of the reference setup, on which the auxiliary phase's scaling rule depends. It starts
    none: torchrun does."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the encoders; auto takes bf16 where the hardware has it. Everything after them is fp32."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto."""
    micro_batch: int | None = None
    """Most samples in one forward-backward pass; bounds memory, and does not change the gradient. None takes 256 on a
    CPU, where activations should fit its caches, and 2048 on a GPU, which fewer do not fill."""
    compile: bool = False
    """Fuse the operations of a gradient step (networks, objective, backward pass), and of acting in turns with it, with
    torch.compile: a minute's start, then faster on a GPU. On a CPU it needs a C++ compiler and half a minute, which
    small networks win back after millions of steps, and others never."""
    keep_freed_memory: bool = True
    """Have the C library (glibc) keep freed memory while training on a CPU, which is faster and holds more of it."""
    checkpoint_seconds: float = 60.0
    """A checkpoint is written at the first end of an iteration after this many seconds."""
    keep_checkpoints: int = 2
    """Checkpoints kept in the run folder."""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    aux: AuxiliaryConfig = field(default_factory=AuxiliaryConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def stale(self) -> bool:
        """Whether the rollout source hands out data from older weights than those being trained."""
        source = self.rollout.source
        return {"synchronous": 0, "delayed": source.delay, "asynchronous": source.max_lag}[source.kind] > 0

    @property
    def iteration_batch(self) -> int:
        """Samples in one alternation between sampling and optimisation, N*T."""
        return self.env.num_envs * self.rollout.steps

    @property
    def optimization_batch(self) -> float:
        """Samples in one gradient step, N*T/minibatches."""
        return self.iteration_batch / self.optimizer.minibatches
