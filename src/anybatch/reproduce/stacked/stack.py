"""R training runs as one program: the loop of :mod:`anybatch.training` with a leading axis."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import Tensor

from anybatch.advantages import explained_variance, gae
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError
from anybatch.models.actions import ActionSpec
from anybatch.models.agent import build_agent
from anybatch.reproduce.stacked.auxiliary_phase import StackedAuxiliaryPhase, auxiliary_phases
from anybatch.reproduce.stacked.minibatches import StackedBatch
from anybatch.reproduce.stacked.networks import StackedNetworks
from anybatch.reproduce.stacked.normalizers import (
    StackedAdvantageNormalizer,
    StackedRewardNormalizer,
    moments_of_runs,
)
from anybatch.reproduce.stacked.optimizers import StackedAdam
from anybatch.reproduce.stacked.policy_phase import Coefficients, StackedLearner, policy_phase, trained
from anybatch.reproduce.stacked.progress import WINDOWS, Columns, ProgressTable
from anybatch.reproduce.stacked.proximal import StackedProximal
from anybatch.reproduce.stacked.rollouts import StackedRollout, StackedSampler, make_stacked_env
from anybatch.reproduce.stacked.shapes import check_common_shape
from anybatch.reproduce.stacked.weights import Views, blocks_of
from anybatch.runs.build import stream_seed
from anybatch.system.memory import keep_freed_memory


@dataclass(frozen=True)
class RunResult:
    """What a run leaves behind."""

    config: TrainConfig
    seed: int
    columns: Columns
    """Its rows, by column of progress.csv; a diverged run's end before the iteration that was not finite."""
    diverged: bool


@dataclass(frozen=True)
class _Stack:
    """Everything that the training of R runs changes."""

    learner: StackedLearner
    sampler: StackedSampler
    views: Views
    """Of the weights that act: the learner's own, without gradient."""
    reward_normalizer: StackedRewardNormalizer | None
    advantage_normalizer: StackedAdvantageNormalizer | None
    phases: list[StackedAuxiliaryPhase]


def run_stacked(
    configs: Sequence[TrainConfig], seeds: Sequence[int], *, rows: int | None = 200, statistics: bool = False
) -> list[RunResult]:
    """Train R runs that differ in numbers alone, each as :func:`anybatch.training.train` would.

    Same seeds give the same environments, initial weights, actions and minibatches as single runs; results differ by
    rounding. A run that diverges does not disturb the others.

    Args:
        configs: R configurations of equal :func:`~anybatch.reproduce.stacked.shapes.shape_key`.
        seeds: R seeds.
        rows: about how many rows to keep of each run, evenly spaced; None keeps every iteration.
        statistics: also compute the statistics of the policy update, which takes about as long as the update itself.

    Returns:
        R results, in the order of the arguments.

    Raises:
        ConfigError: the runs cannot be stacked, or a setting makes no sense.
        EnvError: the environments cannot be made, or broke while they ran.
    """
    if len(configs) != len(seeds) or not configs:
        raise ConfigError(f"a stack needs as many seeds as configurations, not {len(seeds)} for {len(configs)}")
    for config in configs:
        validate(config)
    check_common_shape(configs)
    # neighbours with equal step sizes share a call of the optimiser
    order = sorted(range(len(configs)), key=lambda r: _optimizer_numbers(configs[r]))
    results = _run([configs[r] for r in order], [seeds[r] for r in order], rows, statistics)
    return [result for _, result in sorted(zip(order, results, strict=True), key=lambda pair: pair[0])]


def _run(configs: Sequence[TrainConfig], seeds: Sequence[int], rows: int | None, statistics: bool) -> list[RunResult]:
    config = configs[0]
    env = make_stacked_env(config.env, [stream_seed(seed, "env", 0, 0) for seed in seeds])
    try:
        keep_freed_memory()
        bootstrap = config.env.bootstrap_truncated
        action_spec = ActionSpec(env.action_space)
        learner = _learner(configs, seeds, env.observation_space, action_spec, statistics)
        sampler = StackedSampler(
            env,
            learner.networks,
            action_spec,
            _generators(seeds, "action"),
            bootstrap_truncated=env.bootstrap_truncated if bootstrap is None else bootstrap,
            window=max(WINDOWS.values()),
        )
        stack = _Stack(
            learner=learner,
            sampler=sampler,
            views=learner.views(learner.weights),
            reward_normalizer=(
                StackedRewardNormalizer(len(configs), config.env.num_envs, config.reward)
                if config.reward.normalize
                else None
            ),
            advantage_normalizer=(
                StackedAdvantageNormalizer([c.advantage for c in configs]) if config.advantage.normalize else None
            ),
            phases=auxiliary_phases(learner, configs, _generators(seeds, "auxiliary")),
        )
        return _loop(stack, configs, seeds, rows)
    finally:
        env.close()


def _loop(stack: _Stack, configs: Sequence[TrainConfig], seeds: Sequence[int], rows: int | None) -> list[RunResult]:
    config, learner = configs[0], stack.learner
    delay = config.rollout.source.delay if config.rollout.source.kind == "delayed" else 0
    iterations = max(1, math.ceil(config.total_env_steps / config.iteration_batch) - delay)
    table = ProgressTable(len(configs), iterations, rows)
    alive = torch.ones(len(configs), dtype=torch.bool)
    waiting: deque[StackedRollout] = deque()
    env_steps = gradient_steps = 0
    auxiliary_seen: dict[str, Tensor] = {}
    for iteration in range(1, iterations + 1):
        progress = min(1.0, env_steps / config.total_env_steps)
        for phase in stack.phases:
            for name, value in phase.run_if_due(progress, config.env.num_envs, config.rollout.steps).items():
                before = auxiliary_seen.get(name, value)
                auxiliary_seen[name] = torch.where(torch.isnan(value), before, value)
        for optimizer in learner.optimizers.values():
            optimizer.set_progress(progress)
        while len(waiting) <= delay:
            waiting.append(stack.sampler.collect(stack.views, config.rollout.steps))
            env_steps += config.iteration_batch
        rollout = waiting.popleft()
        wanted = table.wanted(iteration)
        batch, seen, finite = _estimate_advantages(rollout, stack, config, complete=wanted)
        seen |= policy_phase(batch, learner)
        alive &= finite & learner.finite()
        if not alive.any():
            break
        for phase in stack.phases:
            phase.after_iteration(batch)
        gradient_steps += config.optimizer.minibatches * config.optimizer.policy_epochs
        if wanted:
            counters = {"iteration": iteration, "env_steps": env_steps, "gradient_steps": gradient_steps}
            table.append(counters, stack.sampler.episodes, {**seen, **auxiliary_seen}, alive)
            auxiliary_seen = {}
    return [
        RunResult(config, seed, table.columns(run), diverged=not bool(alive[run]))
        for run, (config, seed) in enumerate(zip(configs, seeds, strict=True))
    ]


def _estimate_advantages(
    rollout: StackedRollout, stack: _Stack, config: TrainConfig, *, complete: bool
) -> tuple[StackedBatch, dict[str, Tensor], Tensor]:
    """:func:`anybatch.training.estimate_advantages` for R runs.

    Returns:
        The batch, columns (R,) for the log (all of them if ``complete``), and (R,) bool: the run is still finite.
    """
    reward = rollout.reward
    if stack.reward_normalizer is not None:
        reward = stack.reward_normalizer(reward, rollout.first)
    advantage, target = gae(
        reward,
        rollout.value,
        rollout.next_value,
        rollout.done,
        rollout.terminated,
        discount=config.advantage.discount,
        gae_lambda=config.advantage.gae_lambda,
    )
    mean, var, count = moments_of_runs(advantage)
    seen = {"advantage_mean": mean, "advantage_std": var.sqrt()}
    if complete:
        seen["explained_variance"] = torch.func.vmap(explained_variance)(rollout.value, target)
    if stack.advantage_normalizer is not None:
        stack.advantage_normalizer.update(mean, var, count)
        seen["advantage_std_used"] = stack.advantage_normalizer.moments()[1].sqrt()
        advantage = stack.advantage_normalizer(advantage)
    batch = StackedBatch(
        vectors=rollout.vectors,
        action=rollout.action,
        behavior_logp=rollout.behavior_logp,
        behavior_params=rollout.behavior_params,
        advantage=advantage,
        value_target=target,
    )
    return batch, seen, rollout.finite() & torch.isfinite(var)


def _learner(
    configs: Sequence[TrainConfig],
    seeds: Sequence[int],
    observation_space: gymnasium.Space[Any],
    action_spec: ActionSpec,
    statistics: bool,
) -> StackedLearner:
    config = configs[0]
    agents = [
        build_agent(
            config.model,
            observation_space,
            action_spec.space,
            auxiliary_head=config.aux.enabled,
            seed=stream_seed(seed, "model", 0, 0),
        )
        for seed in seeds
    ]
    networks = StackedNetworks(agents[0], len(agents))
    blocks = blocks_of(agents[0])
    weights = {name: block.rows(agents) for name, block in blocks.items()}
    joint = config.optimizer.policy_epochs == config.optimizer.value_epochs
    numbers = [c.optimizer for c in configs]
    return StackedLearner(
        config=config,
        coefficients=Coefficients.of([c.policy for c in configs]),
        networks=networks,
        action_spec=action_spec,
        blocks=blocks,
        weights=weights,
        proximal=StackedProximal([c.policy for c in configs], weights["policy"]),
        optimizers={
            group: StackedAdam(trained(group, weights), numbers)
            for group in (("joint",) if joint else ("policy", "value"))
        },
        shuffles=_generators(seeds, "shuffle"),
        statistics=statistics,
    )


def _generators(seeds: Sequence[int], purpose: str) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(stream_seed(seed, purpose, 0, 0)) for seed in seeds]


def _optimizer_numbers(config: TrainConfig) -> tuple[float, ...]:
    aux = (float(config.aux.policy_iterations), config.aux.step_size) if config.aux.enabled else ()
    return (*config.optimizer.adam_betas, config.optimizer.step_size, *aux)
