"""Definition of a run as frozen dataclasses; :mod:`anybatch.config.validation` checks them.

With N environments and T steps per rollout, an iteration has N*T samples and a gradient step N*T/minibatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Scalar: TypeAlias = bool | int | float | str
"""Value of an option of an environment or encoder."""


@dataclass(frozen=True)
class EnvConfig:
    """Environment and number of copies."""

    id: str = "procgen:starpilot-hard"
    """procgen:GAME-MODE, gym:ID, gym:MODULE:ID, envpool:ID, or import.path:function for your own environment."""
    num_envs: int = 256
    """Parallel environments N, summed over all workers."""
    options: dict[str, Scalar] = field(default_factory=dict)
    """Options of the environment, as pairs: num_levels 200 start_level 0."""
    bootstrap_truncated: bool | None = None
    """Bootstrap the value where a time limit ends an episode; None means yes, except for Procgen."""
    action_mask: str = "auto"
    """Source of the mask of legal actions: a key of a Dict observation, info (info['action_mask']) or info:KEY; auto
    takes the key action_mask if there is one, none masks nothing. For Discrete and MultiDiscrete actions."""
    frame_stack: int = 1
    """Number of most recent images in an observation; 1 stacks none."""
    info_keys: tuple[str, ...] = ()
    """Numeric keys of the environment's info, such as is_success; their mean at the end of the last 100 episodes is
    logged as the column info_KEY."""
    threads: int = 0
    """Threads that step EnvPool environments; 0 lets EnvPool choose."""
    step_timeout: float | None = None
    """Seconds after which the run ends if a step or reset has not returned; None waits forever."""


@dataclass(frozen=True)
class ObservationConfig:
    """Observation normalisation: vectors are standardised with the mean and standard deviation of all so far."""

    normalize: bool = False
    """Normalise observations that are vectors of floats; images and integers are left unchanged."""
    clip: float = 10.0
    """Normalised observations are clipped to plus or minus this."""


@dataclass(frozen=True)
class GaussianConfig:
    """Gaussian policy of continuous actions, in units where 1 is half the range of a bounded action."""

    std: Literal["parameter", "network"] = "parameter"
    """Standard deviations that are parameters, the same in every state, or outputs of the policy network."""
    log_std: float = 0.0
    """Initial logarithm of the standard deviations."""
    log_std_bounds: tuple[float, float] | None = None
    """Smooth bounds of the logarithm, low and high; None for no bounds."""
    squash: bool = False
    """Map actions into their range by tanh, with the exact log-probability; otherwise actions are clipped for the
    environment."""


@dataclass(frozen=True)
class ModelConfig:
    """Policy and value networks."""

    encoder: str = "auto"
    """impala, nature, small-conv, mlp, import.path:Class (in Python presets also accept the class), or auto (impala for
    images, otherwise mlp)."""
    architecture: Literal["shared", "dual", "detach"] = "shared"
    """One encoder for policy and value, two encoders, or one that gets no gradient from the value loss."""
    options: dict[str, Scalar] = field(default_factory=dict)
    """Arguments of the encoder, as pairs: width 64 depth 2 gain 1.4 for mlp."""
    recurrent: Literal["none", "gru", "lstm"] = "none"
    """Recurrent layer after the encoder, which gives the policy memory; trained on whole trajectories."""
    recurrent_width: int | None = None
    """Units of the recurrent layer; None means as many as the encoder has features."""
    policy_gain: float | None = None
    """Gain of the policy head's orthogonal initialisation; None gives each output weights of norm 0.1."""
    value_gain: float | None = None
    """Gain of the value head's orthogonal initialisation; None gives it weights of norm 0.1."""
    gaussian: GaussianConfig = field(default_factory=GaussianConfig)


@dataclass(frozen=True)
class SourceConfig:
    """Source of rollouts and age of their data."""

    kind: Literal["synchronous", "delayed", "asynchronous"] = "synchronous"
    """synchronous, delayed (artificial staleness), or asynchronous (sampling while learning)."""
    delay: int = 0
    """Iterations between collecting a rollout and training on it (delayed)."""
    max_lag: int = 1
    """Maximum number of iterations between collecting a rollout and training on it (asynchronous)."""
    deterministic: bool = False
    """Act with weights exactly max_lag iterations old, so that the seed determines the result (asynchronous)."""
    ray_workers: int = 0
    """Ray actors that collect rollouts, for each data-parallel worker, possibly on other machines; 0 uses a thread."""

    @property
    def lag(self) -> int:
        """Iterations between collecting a rollout and training on it; for asynchronous sources the maximum."""
        return {"synchronous": 0, "delayed": self.delay, "asynchronous": self.max_lag}[self.kind]


@dataclass(frozen=True)
class RolloutConfig:
    """Length and source of rollouts."""

    steps: int = 256
    """Timesteps T of each environment per rollout."""
    source: SourceConfig = field(default_factory=SourceConfig)


@dataclass(frozen=True)
class RewardConfig:
    """Reward normalisation: rewards are divided by the standard deviation of the discounted return."""

    normalize: bool = True
    """Divide rewards by the running standard deviation of their discounted sum."""
    return_discount: float = 0.99
    """Discount of the running return."""
    bound: float = 10.0
    """Normalised rewards are clipped to plus or minus this."""


@dataclass(frozen=True)
class AdvantageConfig:
    """Advantage estimation and normalisation."""

    discount: float = 0.999
    """GAE discount rate gamma."""
    gae_lambda: float = 0.95
    """GAE bootstrapping parameter lambda."""
    normalize: bool = True
    """Shift and scale advantages to mean 0 and variance 1, with mean and variance averaged over iterations."""
    span: float = 1.0
    """Effective number of iterations in that average, 2/(1-beta)-1; 1 means only the current iteration."""


@dataclass(frozen=True)
class PolicyConfig:
    """Policy objective, proximal policy and importance weights."""

    objective: Literal["clip", "kl"] = "clip"
    """The decoupled clipped objective, or the decoupled KL-penalised one."""
    clip: float = 0.2
    """PPO clipping parameter epsilon."""
    clip_schedule: str = "constant"
    """Factor of clip over the run, as in optimizer.schedule."""
    kl_coefficient: float = 1.0
    """Coefficient beta of the KL penalty (objective kl)."""
    kl_estimator: Literal["exact", "half-squared"] = "exact"
    """exact KL[prox, theta], or half the squared log-ratio of the sampled actions, as in the published code."""
    proximal: Literal["behavior", "recent", "ewma"] = "behavior"
    """Policy that limits the size of updates: the behaviour policy, the policy before the iteration, or the EWMA."""
    importance: Literal["behavior", "proximal"] = "behavior"
    """Policy in the denominator of the importance weight."""
    center_of_mass: float = 8.0
    """Centre of mass of the proximal EWMA, in gradient steps: beta/(1-beta)."""
    max_importance_ratio: float = 100.0
    """Cap on pi_theta / pi_behav."""
    interpolated: bool = False
    """Interpolate log pi_prox between log pi_behav and log pi_theta, by center_of_mass and the age of the data, instead
    of computing it (A-3PO); with proximal behavior."""
    second_moment: float | None = None
    """Limit on the mean of (log pi_theta/pi_behav)^2 in a minibatch, or in each micro-batch of it: the samples with the
    largest values are masked until the mean of the others is below the limit (M2PO); None keeps all."""
    allow_stale_coupled: bool = False
    """Allow stale data with proximal behavior or importance proximal, figures 1(c) and 1(a), which perform worse."""
    entropy_coefficient: float = 0.01
    """Coefficient of the entropy bonus."""
    entropy_schedule: str = "constant"
    """Factor of entropy_coefficient over the run, as in optimizer.schedule."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser, minibatches and epochs."""

    kind: Literal["adam", "sgd"] = "adam"
    """Optimiser of policy and value."""
    step_size: float = 5e-4
    """Adam step size alpha, or the SGD learning rate."""
    schedule: str = "constant"
    """Factor of the step size over the run: constant, linear (1 to 0), or points of the run's fraction and the factor,
    like "0:1 0.5:1 1:0.1", with lines between them; in Python presets also accept a function of the fraction."""
    kl_target: float | None = None
    """Target KL divergence of the policy from the proximal policy: the step size is divided by kl_factor after an
    iteration with more than twice the target, and multiplied by it after one with less than half; None switches this
    off."""
    kl_factor: float = 1.5
    """Factor by which the step size changes after an iteration if kl_target is set."""
    follow_ess: bool = False
    """Multiply the step size by sqrt(ESS/B), the effective sample size of the last iteration as a share of its samples
    (VCPO); for stale data."""
    kl_stop: float | None = None
    """Stop the passes of an iteration when the mean KL divergence from the proximal policy over a pass exceeds this;
    1.5 times the target_kl of Stable-Baselines3 and Spinning Up. None never stops."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    sgd_momentum: float = 0.0
    """Momentum of SGD."""
    max_grad_norm: float | None = None
    """Maximum norm of the gradient, not in the auxiliary phase; None, as in the paper, does not clip."""
    minibatches: int = 8
    """Minibatches, that is gradient steps, per epoch."""
    shuffle: Literal["trajectories", "samples"] = "trajectories"
    """Minibatches of whole trajectories, or equal chunks of them, as in the paper; or of single samples."""
    policy_epochs: int = 1
    """Passes over an iteration's data for the policy: E in PPO, E_pi in PPG."""
    value_epochs: int = 1
    """Passes for the value function, E_V; if it differs from policy_epochs, each has its own optimiser."""
    epoch_window: float = 1.0
    """Iterations over which the passes over a sample are spread: pass e of E, from 0, comes floor(e epoch_window/E)
    iterations after the first; 1 makes all passes at once. The data of (E-1)/E times as many iterations is kept."""
    value_coefficient: float = 0.5
    """Coefficient of mean((v - target)^2)."""

    @property
    def adaptive_step(self) -> bool:
        """Whether the step size depends on statistics of the iterations before."""
        return self.kl_target is not None or self.follow_ess


@dataclass(frozen=True)
class AuxiliaryConfig:
    """Auxiliary phase of Phasic Policy Gradient (PPG)."""

    enabled: bool = False
    """Run an auxiliary phase after every `policy_iterations` iterations."""
    policy_iterations: int = 32
    """Policy iterations per phase N_pi."""
    epochs: int = 6
    """Auxiliary epochs E_aux; 0 skips the phase."""
    minibatches: int | None = None
    """Auxiliary minibatches per epoch; None means 16 per policy iteration, as in the paper."""
    step_size: float = 5e-4
    """Step size of the auxiliary phase's own Adam."""
    clone_coefficient: float = 1.0
    """Coefficient beta_clone of KL[old, new]."""
    storage: Literal["auto", "ram", "disk"] = "auto"
    """Storage of a phase's observations; auto uses memory up to 256 MB, and above that the disk if it has enough
    space."""

    @property
    def minibatches_per_epoch(self) -> int:
        """Auxiliary minibatches per epoch with None replaced by 16 per policy iteration."""
        return 16 * self.policy_iterations if self.minibatches is None else self.minibatches


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation while training, with sampled actions, in separate environments that do not affect training."""

    every: int | None = None
    """Environment steps between evaluations, at the first iteration that ends at or beyond each multiple; None for no
    evaluations."""
    episodes: int = 20
    """Complete episodes of an evaluation."""
    num_envs: int | None = None
    """Environments that run in parallel; None means one for each episode, up to 64."""
    max_steps: int | None = None
    """Steps after which an episode is cut and counted as unfinished; None waits for its end."""
    options: dict[str, Scalar] = field(default_factory=dict)
    """Options of the environment that differ from env.options, as pairs: num_levels 0."""
    keep_best: bool = True
    """Keep the policy with the highest mean return in checkpoints/best.ckpt."""
    stop_at: float | None = None
    """End training when the mean return of an evaluation reaches this."""


@dataclass(frozen=True)
class LogConfig:
    """Logs in addition to progress.csv."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (extra anybatch[wandb])."""
    wandb_project: str = "anybatch"
    """Project in Weights & Biases."""
    noise_scale: bool = True
    """Estimate the gradient noise scale; the scaling rules hold for batches up to about a quarter of it."""


@dataclass(frozen=True)
class TrainConfig:
    """Complete description of a training run, except for its seed and folder."""

    total_env_steps: int = 100_000_000
    """Environment steps to train for, over all environments."""
    workers: int = 4
    """Data-parallel workers for which the hyperparameters were tuned; used only by the scaling rule of the auxiliary
    phase. torchrun sets the actual number of workers."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the encoders impala and nature, and of custom image encoders; auto means bf16 if the hardware
    supports it. Everything else is fp32."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto."""
    micro_batch: int | None = None
    """Maximum number of samples in one forward-backward pass; limits memory without changing the gradient, unless
    policy.second_moment is set. None means 256 on a CPU, so that activations fit its caches, and 2048 on a GPU."""
    compile: bool = False
    """Compile gradient steps, and acting in PyTorch unless rollout.source.kind is asynchronous: on a CPU, small
    networks take a third of the time, after 15 s of compilation in the first run and 2 s in later ones; needs a C++
    compiler. On a GPU compilation takes a minute."""
    keep_freed_memory: bool = True
    """Keep freed memory in the process (glibc) while training on a CPU: faster, but uses more memory."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints, at the end of an iteration or inside an auxiliary phase; one also follows every
    iteration of 1.5 s or more."""
    keep_checkpoints: int = 2
    """Checkpoints kept in the run folder."""
    env: EnvConfig = field(default_factory=EnvConfig)
    observation: ObservationConfig = field(default_factory=ObservationConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    aux: AuxiliaryConfig = field(default_factory=AuxiliaryConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def stale(self) -> bool:
        """Whether rollouts can come from older weights than those being trained."""
        return self.rollout.source.lag > 0

    @property
    def iteration_batch(self) -> int:
        """Samples in one alternation between sampling and optimisation, N*T."""
        return self.env.num_envs * self.rollout.steps

    @property
    def optimization_batch(self) -> float:
        """Samples in one gradient step, N*T/minibatches."""
        return self.iteration_batch / self.optimizer.minibatches
