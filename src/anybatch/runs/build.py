"""Build the components of a run from its configuration."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from anybatch.auxiliary_phase import AuxiliaryPhase
from anybatch.config.chunks import shared_trajectories
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate_envs_per_worker
from anybatch.diagnostics.noise_scale import NoiseScale, window_steps
from anybatch.distributed.collectives import (
    broadcast_,
    envs_per_worker,
    is_distributed,
    local_device,
    local_num_envs,
    rank,
    world_size,
)
from anybatch.distributed.random_state import seeding
from anybatch.distributed.state import GlobalRandomState, RandomState, Replicated, Stateful, replicated_tensors
from anybatch.envs.base import VectorEnv
from anybatch.envs.factory import make
from anybatch.envs.registry import check_importable
from anybatch.errors import AnybatchError, ConfigError
from anybatch.gradients import check_compiler
from anybatch.models.agent import build_agent
from anybatch.models.precision import prepare_device, resolve_device, resolve_precision
from anybatch.normalize import AdvantageNormalizer, RewardNormalizer
from anybatch.optimizers import Optimizers
from anybatch.phase_storage.layout import layout_of
from anybatch.phase_storage.store import SegmentStore
from anybatch.policy_phase import Learner
from anybatch.proximal import BehaviorProximal, EwmaProximal, ProximalPolicy, RecentProximal
from anybatch.runs.saved_spaces import SavedSpaces
from anybatch.sampling.cuda_graph import GraphedAgent, can_be_recorded
from anybatch.sampling.ray import RayActors, Seeds
from anybatch.sampling.replay import RecentBatches
from anybatch.sampling.rollout import Rollout, Sampler
from anybatch.sampling.rollout_size import check_size
from anybatch.sampling.sources import Delayed, RolloutSource, Synchronous
from anybatch.sampling.tensor_rollout import collect_any, make_sampler
from anybatch.sampling.threaded import Asynchronous
from anybatch.system.signals import Interrupts


@dataclass(frozen=True)
class Components:
    """Everything that one iteration of training uses and changes."""

    source: RolloutSource
    learner: Learner
    reward_normalizer: RewardNormalizer | None
    advantage_normalizer: AdvantageNormalizer | None
    env: VectorEnv
    auxiliary: AuxiliaryPhase | None = None
    """PPG's auxiliary phase; None without one."""

    @property
    def stateful(self) -> dict[str, Stateful]:
        """The parts that a checkpoint keeps, in the order in which they are restored."""
        learner = self.learner
        parts: dict[str, Stateful | None] = {
            "spaces": SavedSpaces(self.env.native_spaces, learner.config.env.id),
            "agent": Replicated(learner.agent),
            "optimizers": Replicated(learner.optimizers),
            "proximal": Replicated(learner.proximal),
            "recent": learner.recent,
            "shuffle": RandomState(learner.shuffle),
            "torch": GlobalRandomState(learner.device),
            "noise_scale": Replicated(learner.noise) if learner.noise else None,
            "reward_normalizer": self.reward_normalizer,
            "advantage_normalizer": Replicated(self.advantage_normalizer) if self.advantage_normalizer else None,
            "auxiliary": self.auxiliary,
            "source": self.source,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def replicated_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tensors that have the same bits on every worker, by the name that an error gives them."""
        parts = self.stateful
        kinds: dict[str, list[str]] = {
            "networks": ["agent"],
            "proximal policy": ["proximal"],
            "moments": [name for name in ("reward_normalizer", "advantage_normalizer") if name in parts],
        }
        return {
            kind: [tensor for name in names for tensor in replicated_tensors(parts[name])]
            for kind, names in kinds.items()
        }


def build(config: TrainConfig, seed: int, env_stream: int = 0, *, segments: Path | None = None) -> Components:
    """Make everything that a run consists of, each part with its own stream of the seed.

    Args:
        config: what to train.
        seed: the run's seed.
        env_stream: which of the seed's streams the environments take.
        segments: folder where the auxiliary phase may keep its data; None leaves memory only.

    Raises:
        ConfigError: a setting does not fit, or the auxiliary phase's data does not fit anywhere.
        EnvError: the environment cannot be made.
    """
    validate_envs_per_worker(config, envs_per_worker(config.env.num_envs, world_size()))
    num_envs = local_num_envs(config.env.num_envs)

    def stream(name: str) -> int:
        """Seed of one purpose; a checkpoint restores its generator, except for a worker that it does not know."""
        return stream_seed(seed, name, rank(), env_stream)

    with seeding:
        torch.manual_seed(stream("torch"))  # for random layers of a user's encoder, such as dropout
    device = resolve_device(local_device(config.device))
    prepare_device(device)
    check_size(config, num_envs, device)
    # Ray's workers make their own environments
    env = make(config.env, 1 if config.rollout.source.ray_workers else num_envs, stream("env"))
    with contextlib.ExitStack() as undo:
        undo.callback(env.close)
        check_size(config, num_envs, device, env.observation_space)
        learner = _learner(config, env, device, stream_seed(seed, "model", 0, 0), stream("shuffle"))
        auxiliary = _auxiliary(config, learner, env, num_envs, stream("auxiliary"), segments)
        sampler = make_sampler(
            env,
            learner.action_spec,
            bootstrap_truncated=config.env.bootstrap_truncated,
            generator=torch.Generator(device).manual_seed(stream("action")),
        )
        # last, because it may start Ray
        source = _source(config, sampler, learner, device, _ray_seeds(config, seed, env_stream))
        undo.pop_all()
    reward, advantage = config.reward, config.advantage
    return Components(
        source=source,
        learner=learner,
        reward_normalizer=(
            RewardNormalizer(num_envs, reward.return_discount, reward.bound) if reward.normalize else None
        ),
        advantage_normalizer=AdvantageNormalizer(advantage.span) if advantage.normalize else None,
        env=env,
        auxiliary=auxiliary,
    )


def _learner(config: TrainConfig, env: VectorEnv, device: torch.device, model_seed: int, shuffle_seed: int) -> Learner:
    with _networks_that_fit():
        agent = build_agent(
            config.model,
            env.observation_space,
            env.action_space,
            observation=config.observation,
            precision=resolve_precision(config.precision, device),
            auxiliary_head=config.aux.enabled,
            seed=model_seed,
        ).to(device)
    broadcast_(agent)
    learner = Learner(
        config=config,
        agent=agent,
        action_spec=agent.action_spec,
        proximal=build_proximal(config, agent.policy),
        optimizers=Optimizers(agent, config.optimizer),
        shuffle=torch.Generator().manual_seed(shuffle_seed),
        interrupts=Interrupts(echo=2.0 if is_distributed() else 0.0),
        recent=RecentBatches.of(config.optimizer, device),
        noise=_noise_scale(config, device) if config.log.noise_scale else None,
    )
    if config.compile:
        check_compiler(device)
        _compile(learner)
    return learner


def stream_seed(seed: int, name: str, worker: int, number: int) -> int:
    """A seed for one purpose of one worker; different arguments give independent ones."""
    words = [seed, *name.encode(), worker, number]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def _auxiliary(
    config: TrainConfig, learner: Learner, env: VectorEnv, num_envs: int, seed: int, folder: Path | None
) -> AuxiliaryPhase | None:
    if not config.aux.enabled or config.aux.epochs == 0:  # without epochs there is no phase: PPO with these networks
        return None
    layout = layout_of(
        env.observation_space,
        learner.action_spec.num_params,
        segments=config.aux.policy_iterations,
        num_envs=num_envs,
        steps=config.rollout.steps,
    )
    store = SegmentStore(layout, config.aux.storage, folder)
    return AuxiliaryPhase(learner, store, torch.Generator().manual_seed(seed))


def build_proximal(config: TrainConfig, policy: torch.nn.Module) -> ProximalPolicy:
    """The proximal policy that ``config`` names, of the policy network."""
    if config.policy.proximal == "ewma":
        return EwmaProximal(policy, config.policy.center_of_mass)
    if config.policy.proximal == "recent":
        return RecentProximal(policy)
    return BehaviorProximal()


def _compile(learner: Learner) -> None:
    """Fuse the operations of acting; the phases fuse those of a gradient step.

    Not of values alone, which are asked for in as many shapes as there are numbers of truncated episodes.
    """
    learner.agent.compile(dynamic=False)
    if learner.config.aux.enabled:
        learner.agent.policy.compile(dynamic=False)  # for the old policy's outputs before an auxiliary phase


def _noise_scale(config: TrainConfig, device: torch.device) -> NoiseScale:
    age = config.policy.center_of_mass if config.policy.proximal == "ewma" else 0.0
    minibatches, shuffle = config.optimizer.minibatches, config.optimizer.shuffle
    envs = envs_per_worker(config.env.num_envs, world_size())
    shared = any(shared_trajectories(n, minibatches, shuffle) for n in envs)
    return NoiseScale(
        window_steps(minibatches, age, shared_trajectories=shared),
        adam=config.optimizer.kind == "adam",
        iteration=minibatches if shared else None,
        device=device,
    )


def _ray_seeds(config: TrainConfig, seed: int, env_stream: int) -> Seeds:
    first = rank() * config.rollout.source.ray_workers

    def seeds(number: int, starts: int) -> tuple[int, int]:
        again = "-again" * starts  # a worker that replaces a dead one must not replay its levels
        env, action = (stream_seed(seed, name + again, first + number, env_stream) for name in ("env", "action"))
        return env, action

    return seeds


def _source(
    config: TrainConfig, sampler: Sampler, learner: Learner, device: torch.device, ray_seeds: Seeds
) -> RolloutSource:
    source = config.rollout.source
    if source.ray_workers:
        check_importable(config.env.id, config.model.encoder, "Ray workers")
        num_envs = local_num_envs(config.env.num_envs)
        return RayActors(config, num_envs, ray_seeds, learner.agent, interrupts=learner.interrupts, device=device)
    collect_with = functools.partial(collect_any, sampler, steps=config.rollout.steps, device=device)
    if source.kind == "asynchronous":
        return Asynchronous(
            collect_with,
            sampler,
            learner.agent,
            max_lag=source.max_lag,
            deterministic=source.deterministic,
            interrupts=learner.interrupts,
            device=device,
            steps=config.rollout.steps,
        )

    # only here, where the GPU does nothing else meanwhile: a recording must not catch another thread's work
    actor = GraphedAgent(learner.agent) if can_be_recorded(learner.agent, device) else learner.agent

    def collect_one(version: int) -> Rollout:
        return collect_with(actor, version=version, interrupts=learner.interrupts)

    if source.kind == "delayed":
        return Delayed(collect_one, sampler, source.delay, device, config.rollout.steps)
    return Synchronous(collect_one, sampler)


@contextlib.contextmanager
def _networks_that_fit() -> Iterator[None]:
    """Explain the failure to allocate networks in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        line = str(error).splitlines()[0] if str(error) else "out of memory"
        if isinstance(error, AnybatchError) or not re.search(r"alloc|overflow|out of memory", line):
            raise
        raise ConfigError(f"the networks of model.options do not fit into memory: {line}") from error
