"""Evaluation of policies."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch

from anybatch.config.schema import EnvConfig, TrainConfig
from anybatch.config.validation import check_integer
from anybatch.envs.base import Observation as EnvObservation
from anybatch.envs.base import VectorEnv, close_env
from anybatch.envs.factory import make, native_spaces
from anybatch.envs.masks import mask_entry
from anybatch.envs.registry import environment_id, given_environments, is_known
from anybatch.envs.spaces import Actions, Observations
from anybatch.errors import CheckpointError, ConfigError, DivergenceError, shown
from anybatch.models.agent import Agent, build_agent
from anybatch.models.precision import resolve_device, resolve_precision
from anybatch.runs import checkpoint
from anybatch.runs.edited import other_distributions, written_with
from anybatch.runs.files import BEST, CHECKPOINTS, CONFIG
from anybatch.runs.folder import encoder_of_this_program, read_config
from anybatch.runs.owned import checked_folder
from anybatch.runs.saved_spaces import Spaces, difference, restore_spaces
from anybatch.runs.trust import require_trust
from anybatch.sampling.memory import PolicyMemory
from anybatch.sampling.rollout import step_of, to_device
from anybatch.system.signals import check_interrupt, interruptible, separate_calls

_MAX_ENVS = 64

Space: TypeAlias = gymnasium.Space[Any]

EnvChoice = str | EnvConfig | Callable[..., Any] | None
"""An environment's id, configuration, or a callable that makes it; None for the one that a policy was trained in."""


@dataclass(frozen=True)
class LoadedPolicy:
    """A trained policy: observations in, actions out, both as the environment gives and takes them."""

    agent: Agent
    config: TrainConfig
    """Configuration of its training."""
    device: torch.device
    """Device of the networks."""
    observation_space: gymnasium.Space[Any]
    """Space of a single observation."""
    action_space: gymnasium.Space[Any]
    """Space of a single action."""

    def act(
        self,
        observation: Any,
        generator: torch.Generator | None = None,
        *,
        greedy: bool = False,
        memory: PolicyMemory | None = None,
    ) -> Any:
        """Choose an action for an observation, or one for each observation of a batch.

        Args:
            observation: an element of ``observation_space``, or a batch (B, ...) of them; for a Dict space a dictionary
                of such arrays. Tensors instead of arrays give a tensor on their device, of int64 for integers.
            generator: generator for sampled actions, on the policy's device; None for torch's global one.
            greedy: take the most likely action instead of sampling.
            memory: of a recurrent policy, from :meth:`memory`; ``memory.reset()`` begins a new episode.

        Returns:
            An element of ``action_space``, or (B, ...) of them.

        Raises:
            EnvError: an observation does not fit the space, or is not finite.
            DivergenceError: the networks' outputs are not finite.
            ConfigError: the policy is recurrent, and there is no memory.
        """
        arrays, device = _as_arrays(observation)
        batch, one = self._observations.one_or_batch(arrays)
        action = choose_actions(self, batch, generator, greedy=greedy, memory=memory)
        native = self._actions.native(action, len(action))
        chosen = native[0] if one else native
        if device is None:
            return chosen
        tensor = torch.as_tensor(chosen, device=device)
        return tensor if tensor.is_floating_point() else tensor.long()  # as tensor environments get them in training

    @staticmethod
    def memory() -> PolicyMemory:
        """A memory of no past, for :meth:`act` of a recurrent policy."""
        return PolicyMemory()

    @cached_property
    def _observations(self) -> Observations:
        return observations_of(self.config.env, self.observation_space, self.action_space)

    @cached_property
    def _actions(self) -> Actions:
        return Actions(self.action_space, self.config.env.id)


def _as_arrays(observation: Any) -> tuple[Any, torch.device | None]:
    """An observation with arrays in place of tensors, and the device of the tensors; None if it has none."""
    if isinstance(observation, torch.Tensor):
        known = observation.float() if observation.dtype == torch.bfloat16 else observation  # NumPy has no bfloat16
        return known.detach().cpu().numpy(), observation.device
    if isinstance(observation, Mapping):
        pairs = {key: _as_arrays(x) for key, x in observation.items()}
        return {key: x for key, (x, _) in pairs.items()}, next((d for _, d in pairs.values() if d is not None), None)
    if isinstance(observation, tuple):
        entries = [_as_arrays(x) for x in observation]
        return tuple(x for x, _ in entries), next((d for _, d in entries if d is not None), None)
    return observation, None


@dataclass(frozen=True)
class Evaluation:
    """Returns of episodes, not normalised."""

    returns: list[float]
    """Return of each complete episode."""
    lengths: list[int]
    """Steps of each complete episode."""
    unfinished_returns: list[float] = field(default_factory=list)
    """Return so far of each episode that ``max_steps`` cut."""
    info: dict[str, list[float]] = field(default_factory=dict)
    """For each key of env.info_keys its number at the end of each complete episode that had one."""

    @property
    def unfinished(self) -> int:
        """Episodes that ``max_steps`` cut."""
        return len(self.unfinished_returns)

    @property
    def mean(self) -> float:
        """Mean return of the complete episodes; NaN if there is none."""
        return float(np.mean(self.returns)) if self.returns else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; NaN for less than two episodes."""
        count = len(self.returns)
        return float(np.std(self.returns, ddof=1)) / math.sqrt(count) if count > 1 else math.nan

    @property
    def mean_length(self) -> float:
        """Mean number of steps of the complete episodes; NaN if there is none."""
        return float(np.mean(self.lengths)) if self.lengths else math.nan

    def mean_info(self, key: str) -> float:
        """Mean of the numbers of a key; NaN if there is none."""
        return float(np.mean(self.info[key])) if self.info.get(key) else math.nan

    def __str__(self) -> str:
        """``mean +- standard error (episodes)``, and the number of unfinished ones if there are any."""
        count = len(self.returns)
        if not count:
            return f"no episode was completed ({self.unfinished} unfinished)"
        error = f" +- {self.standard_error:.2f}" if count > 1 else ""
        unfinished = f", and {self.unfinished} unfinished episodes not counted" if self.unfinished else ""
        return f"{self.mean:.2f}{error} ({count} episode{'s' if count > 1 else ''}{unfinished})"


def load_policy(
    run_dir: str | Path,
    *,
    best: bool = False,
    device: str = "auto",
    precision: str | None = None,
    env: str | Callable[..., Any] | None = None,
    trust_code: bool = False,
) -> LoadedPolicy:
    """Load the policy of a run from its newest intact checkpoint; the environment is not started.

    Args:
        run_dir: the run folder.
        best: the policy with the highest mean return in an evaluation during training (``eval.every``) instead.
        device: cpu, cuda, cuda:N, or auto.
        precision: fp32, bf16 or auto; None for that of the training. Exporting needs fp32.
        env: the environment's id or callable, to be made with the run's options when it is evaluated; a callable
            without an import path has to be passed in every process.
        trust_code: import the code that the run's config.yaml names (environment, encoder) even if this user has not
            made the run on this machine.

    Raises:
        CheckpointError: the folder is not a run folder, or has no intact checkpoint that fits its configuration.
        ConfigError: the device or precision does not exist, or the configuration names code of somebody else.
    """
    folder = checked_folder("run_dir", run_dir)
    config, _ = read_config(folder)
    require_trust(config, folder / CONFIG, trust_code=trust_code, given=() if env is None else ("env.id",))
    for sentence in encoder_of_this_program(config):
        warnings.warn(sentence, stacklevel=2)
    if env is not None:
        config = replace(config, env=replace(config.env, id=environment_id(env)))
    content, passed_over = (_best(folder), []) if best else checkpoint.load_newest(folder / CHECKPOINTS)
    for sentence in passed_over:
        warnings.warn(f"{sentence}; using the previous checkpoint", stacklevel=2)
    for sentence in other_distributions(written_with(content, config), config):
        warnings.warn(sentence, stacklevel=2)
    with checkpoint.must_fit(run_dir):
        state = content["state"]
        # checkpoints of before have no spaces
        saved = restore_spaces(state["spaces"]) if "spaces" in state else native_spaces(config.env)
        policy = _build_policy(config, saved, device=device, precision=precision)
        policy.agent.load_state_dict(state["agent"])
    for name, parameter in policy.agent.named_parameters():
        if not torch.isfinite(parameter).all():
            raise CheckpointError(
                f"the {'best policy' if best else 'newest checkpoint'} of {str(run_dir)!r} contains weights that are "
                f"not finite ({name}): training had diverged"
            )
    return policy


def _best(folder: Path) -> dict[str, Any]:
    path = folder / CHECKPOINTS / BEST
    if not path.exists():
        raise CheckpointError(
            f"{str(folder)!r} has no best policy: training keeps one if eval.every and eval.keep_best are set, after "
            "the first evaluation with a complete episode"
        )
    return checkpoint.load(path)


def initial_policy(config: TrainConfig, *, seed: int = 0, device: str = "auto") -> LoadedPolicy:
    """Create an untrained policy for a configuration, as a baseline.

    Raises:
        ConfigError: ``config`` is not a configuration, or the seed not an integer of at least 0.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"config is {shown(config)}, but must be a TrainConfig, as a preset returns it")
    seed = check_integer("seed", seed, at_least=0)
    return _build_policy(config, native_spaces(config.env), device=device, seed=seed)


def _build_policy(
    config: TrainConfig, spaces: Spaces, *, device: str, precision: str | None = None, seed: int = 0
) -> LoadedPolicy:
    where = resolve_device(device)
    observation_space, action_space = spaces
    agent = build_agent(
        config.model,
        observations_of(config.env, observation_space, action_space).space,
        Actions(action_space, config.env.id).space,
        observation=config.observation,
        precision=resolve_precision(config.precision if precision is None else precision, where),
        auxiliary_head=config.aux.enabled,
        seed=seed,
    )
    # without dropout, and with the stored statistics of batch normalisation
    return LoadedPolicy(agent.to(where).eval(), config, where, observation_space, action_space)


@separate_calls()
def evaluate(
    policy: LoadedPolicy,
    env: EnvChoice = None,
    episodes: int = 100,
    seed: int = 0,
    num_envs: int | None = None,
    max_steps: int | None = None,
    *,
    greedy: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Evaluate a policy on complete episodes.

    Every environment runs a fixed number of episodes, so that short ones are not over-represented.

    Args:
        policy: policy to evaluate.
        env: environment's id, configuration, or a callable that makes it; None for the policy's training environment.
            An id is made without options, a callable with those of training if it is the training environment.
        episodes: number of episodes, at least 1.
        seed: seed of environments and actions.
        num_envs: copies of the environment that play at the same time, at most one an episode; None for as many as in
            training, or in a given configuration, but at most 64. With 1 only one copy is ever made.
        max_steps: steps after which an episode is cut and counted as unfinished; None waits for its end.
        greedy: take the most likely action instead of sampling.
        progress: called with the number of episodes that have ended, whenever one does.

    Raises:
        ConfigError: a number is out of range, the environment is unknown, or its spaces are not those of the policy.
        EnvError: the environment cannot be made, or broke its contract.
        DivergenceError: the policy's outputs are not finite.
    """
    episodes = check_integer("episodes", episodes, at_least=1)
    seed = check_integer("seed", seed, at_least=0)
    if max_steps is not None:
        max_steps = check_integer("max_steps", max_steps, at_least=1)
    config = choose_env(policy, env)
    if num_envs is None:
        num_envs = min(config.num_envs, _MAX_ENVS)
    playing = min(episodes, check_integer("num_envs", num_envs, at_least=1))
    count = given_environments(config.id) or playing  # of an object that was passed, the others play for nothing
    playing = min(playing, count)
    games = make(replace(config, num_envs=count), count, seed)
    try:
        check_spaces(policy, games, config.id)
        generator = action_generator(policy, seed)
        episodes_by_env = np.zeros(count, dtype=np.int64)
        episodes_by_env[:playing] = episodes // playing
        episodes_by_env[: episodes % playing] += 1
        memory = policy.memory()
        return _play(
            games,
            lambda observation: choose_actions(policy, observation, generator, greedy=greedy, memory=memory),
            episodes_by_env,
            math.inf if max_steps is None else max_steps,
            memory,
            progress or (lambda ended: None),
        )
    finally:
        close_env(games)


def _play(
    games: VectorEnv,
    act: Callable[[EnvObservation], np.ndarray],
    quota: np.ndarray,
    max_steps: float,
    memory: PolicyMemory,
    progress: Callable[[int], object],
) -> Evaluation:
    """Play ``quota`` (N,) episodes in each environment; an episode of ``max_steps`` steps is unfinished."""
    result, episodes = Evaluation([], []), int(quota.sum())
    while quota.any():
        observation = games.reset()
        memory.reset()
        total, length = np.zeros(len(quota)), np.zeros(len(quota), dtype=np.int64)
        # one environment alone cannot be reset: after an unfinished episode it waits until all are reset
        playing = quota > 0
        while playing.any():
            check_interrupt()
            action = act(observation)
            with interruptible():
                step = step_of(games, action)
            observation = step.observation
            memory.reset(step.done)
            reward, done = step.counted
            total += reward
            length += 1
            for index in np.flatnonzero(playing & done):
                result.returns.append(float(total[index]))
                result.lengths.append(int(length[index]))
                for key, numbers in (step.episode_info or {}).items():
                    if not np.isnan(numbers[index]):
                        result.info.setdefault(key, []).append(float(numbers[index]))
            cut = playing & ~done & (length >= max_steps)
            result.unfinished_returns.extend(total[cut].tolist())
            over = playing & (done | cut)
            quota -= over
            if over.any():
                progress(episodes - int(quota.sum()))
            playing = playing & ~cut & (quota > 0)
            total[done] = 0
            length[done] = 0
    return result


def choose_actions(
    policy: LoadedPolicy,
    observation: EnvObservation,
    generator: torch.Generator | None,
    *,
    greedy: bool = False,
    memory: PolicyMemory | None = None,
) -> np.ndarray:
    """Actions that :class:`anybatch.envs.VectorEnv` takes, for observations (B, ...) that it gave."""
    if memory is None and policy.agent.state_size:
        raise ConfigError(
            "the policy is recurrent: create memory = policy.memory() once, pass it to every call of act, and call "
            "memory.reset() at the beginning of an episode"
        )
    with torch.no_grad():
        normalized = to_device(policy.agent.normalize(observation), policy.device)
        params = memory.params(policy.agent.policy, normalized) if memory else policy.agent.policy(normalized)
        if not torch.isfinite(params).all():
            raise DivergenceError("the policy's outputs are not finite: its weights are not finite or too large")
        distribution = policy.agent.action_spec.distribution(params)
        action = distribution.mode() if greedy else distribution.sample(generator)
    return policy.agent.action_spec.to_env(action)


def action_generator(policy: LoadedPolicy, seed: int) -> torch.Generator:
    """Generator of a policy's sampled actions; ``seed`` may have any number of digits."""
    return torch.Generator(policy.device).manual_seed(seed % 2**64)


def choose_env(policy: LoadedPolicy, env: EnvChoice) -> EnvConfig:
    """Configuration of the environment in which a policy is to act.

    A callable gets the options of training if it is the training environment: the same object, or one that stands in
    for a callable that this process does not know. ``num_envs`` is that of training unless ``env`` is a configuration.
    """
    given: Any = policy
    if not isinstance(given, LoadedPolicy):
        raise ConfigError(f"policy is {shown(given)}, but must be a LoadedPolicy, as load_policy(run_dir) returns it")
    trained = policy.config.env
    if env is None:
        return trained
    if isinstance(env, EnvConfig):
        return env
    env_id = environment_id(env)
    if not isinstance(env, str) and (env_id == trained.id or not is_known(trained.id)):
        return replace(trained, id=env_id)
    # all but the options; what another environment's info holds is not known
    keys = trained.info_keys if env_id == trained.id else ()
    return replace(trained, id=env_id, options={}, bootstrap_truncated=None, info_keys=keys)


def observations_of(env: EnvConfig, observation_space: Space, action_space: Space) -> Observations:
    """Checks and converts observations of an environment with these native spaces."""
    return Observations(observation_space, env.id, mask_entry(env.action_mask, observation_space, action_space, env.id))


def check_spaces(policy: LoadedPolicy, games: VectorEnv, env_id: str) -> None:
    """Raise ConfigError if an environment has other spaces than a policy."""
    if sentence := difference((policy.observation_space, policy.action_space), games.native_spaces, env_id):
        raise ConfigError(sentence)


def unseen_levels(config: EnvConfig) -> EnvConfig | None:
    """The same Procgen game with all levels, if training used a limited set of them; otherwise None.

    Training used levels ``start_level`` to ``start_level + num_levels - 1``; with ``num_levels 0`` it used all.
    """
    is_procgen = isinstance(config.id, str) and config.id.startswith("procgen:")
    if not is_procgen or not config.options.get("num_levels"):
        return None
    return replace(config, options={**config.options, "num_levels": 0, "start_level": 0})
