"""R training runs as one program: the loop of :mod:`anybatch.training` over data with a run axis."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.auxiliary_phase import AuxiliaryPhase
from anybatch.config.schema import OptimizerConfig, TrainConfig
from anybatch.config.validation import check_integer, validate
from anybatch.envs.base import VectorEnv
from anybatch.envs.factory import make
from anybatch.envs.tensor import TensorVectorEnv
from anybatch.errors import ConfigError, DivergenceError
from anybatch.minibatches import RunGenerators
from anybatch.models.agent import build_agent
from anybatch.normalize import AdvantageNormalizer, RewardNormalizer
from anybatch.optimizers import Optimizers
from anybatch.phase_storage.layout import layout_of
from anybatch.policy_phase import Learner
from anybatch.proximal import ProximalPolicy
from anybatch.reproduce.evaluations import Evaluations
from anybatch.reproduce.stacked.evaluation import Evaluator
from anybatch.reproduce.stacked.networks import StackedAgent
from anybatch.reproduce.stacked.optimizers import StackedAdam
from anybatch.reproduce.stacked.progress import Columns, StackedRun
from anybatch.reproduce.stacked.proximal import MixedProximal
from anybatch.reproduce.stacked.rollouts import StackedSampler
from anybatch.reproduce.stacked.shapes import check_common_shape, not_stackable
from anybatch.reproduce.stacked.store import StackedStore
from anybatch.runs.build import Components, build_proximal, stream_seed
from anybatch.sampling.replay import RecentBatches
from anybatch.sampling.sources import Delayed
from anybatch.system.memory import keep_freed_memory
from anybatch.system.signals import Interrupts
from anybatch.training import training_loop


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run."""

    config: TrainConfig
    seed: int
    columns: Columns
    """Rows by column of progress.csv; those of a diverged run end before the iteration that was not finite."""
    diverged: bool


def run_stacked(
    configs: Sequence[TrainConfig],
    seeds: Sequence[int],
    *,
    rows: int | None = 200,
    statistics: bool = False,
    evaluations: Evaluations | None = None,
) -> list[RunResult]:
    """Train R runs that differ in numbers alone, each as :func:`anybatch.training.train` would.

    Same seeds give the same environments, initial weights, actions and minibatches as single runs; results differ by
    rounding. A run that diverges does not disturb the others.

    Args:
        configs: R configurations of equal :func:`~anybatch.reproduce.stacked.shapes.shape_key`.
        seeds: R seeds.
        rows: about how many rows to keep of each run, evenly spaced; None keeps every iteration.
        statistics: also compute the statistics of the policy update, which takes about as long as the update itself.
        evaluations: also evaluate the policies at equal numbers of environment steps, in the column ``eval_return``;
            training is the same, bit for bit.

    Returns:
        R results, in the order of the arguments.

    Raises:
        ConfigError: the runs cannot be stacked, or a setting makes no sense.
        EnvError: the environments cannot be made, or failed.
    """
    if len(configs) != len(seeds) or not configs:
        raise ConfigError(f"a stack needs as many seeds as configurations, not {len(seeds)} for {len(configs)}")
    if rows is not None:
        check_integer("rows", rows, at_least=1)
    for config in configs:
        validate(config)
    check_common_shape(configs)
    # neighbours with equal step sizes share a call of the optimiser
    order = sorted(range(len(configs)), key=lambda run: _optimizer_numbers(configs[run]))
    chosen = [configs[run] for run in order], [seeds[run] for run in order]
    results = _run(*chosen, rows, statistics, evaluations)
    return [result for _, result in sorted(zip(order, results, strict=True), key=lambda pair: pair[0])]


def _run(
    configs: Sequence[TrainConfig],
    seeds: Sequence[int],
    rows: int | None,
    statistics: bool,
    evaluations: Evaluations | None,
) -> list[RunResult]:
    config = _common_config(configs)
    with contextlib.ExitStack() as stack:
        env = make(config.env, len(seeds) * config.env.num_envs, _stream_seeds(seeds, "env"))
        stack.callback(env.close)
        if isinstance(env, TensorVectorEnv):
            raise not_stackable(f"env.id is {config.env.id}, which is a tensor environment")
        keep_freed_memory()
        learner = _learner(config, configs, seeds, env, statistics)
        bootstrap = config.env.bootstrap_truncated
        sampler = StackedSampler(
            env,
            learner.agent,
            _generators(seeds, "action"),
            bootstrap_truncated=env.bootstrap_truncated if bootstrap is None else bootstrap,
        )
        evaluation = None
        if evaluations is not None:
            copies = make(config.env, len(seeds) * evaluations.episodes, _stream_seeds(seeds, "evaluation env"))
            stack.callback(copies.close)
            evaluation = evaluations, Evaluator(copies, learner.agent, _generators(seeds, "evaluation action"))
        run = StackedRun(config, learner, sampler.episodes, rows, evaluation)
        try:
            training_loop(run, _components(config, configs, seeds, env, learner, sampler))
        except DivergenceError:  # of all runs
            run.alive[:] = False
    outcomes = zip(configs, seeds, run.alive.tolist(), strict=True)
    return [RunResult(config, seed, run.columns(i), not alive) for i, (config, seed, alive) in enumerate(outcomes)]


def _common_config(configs: Sequence[TrainConfig]) -> TrainConfig:
    """One configuration for all runs, with tensors for the numbers in which they may differ.

    Coefficients of the losses are (R, 1), to multiply samples (R, B), or floats where all runs have the same; that of
    the entropy is (R,), to multiply means of each run. Spans and centres of mass are float64 (R,). Step sizes are left
    to :class:`~anybatch.reproduce.stacked.optimizers.StackedAdam`.
    """
    first = configs[0]

    def numbers(section: str, name: str) -> list[float]:
        return [getattr(getattr(config, section), name) for config in configs]

    def coefficient(section: str, name: str) -> Any:
        values = numbers(section, name)
        return values[0] if len(set(values)) == 1 else torch.tensor(values).unsqueeze(1)

    policy: dict[str, Any] = {
        **{name: coefficient("policy", name) for name in ("clip", "kl_coefficient", "max_importance_ratio")},
        "entropy_coefficient": torch.tensor(numbers("policy", "entropy_coefficient")),
        "center_of_mass": torch.tensor(numbers("policy", "center_of_mass"), dtype=torch.float64),
    }
    span: Any = torch.tensor(numbers("advantage", "span"), dtype=torch.float64)
    return replace(
        first,
        # by default one thread: these environments take less time than handing them to another does
        env=replace(first.env, threads=first.env.threads or 1),
        policy=replace(first.policy, **policy),
        advantage=replace(first.advantage, span=span),
        aux=replace(first.aux, clone_coefficient=coefficient("aux", "clone_coefficient")),
        micro_batch=first.iteration_batch,
        compile=False,
    )


def _learner(
    config: TrainConfig, configs: Sequence[TrainConfig], seeds: Sequence[int], env: VectorEnv, statistics: bool
) -> Learner:
    spaces = env.observation_space, env.action_space
    agents = [
        build_agent(config.model, *spaces, observation=config.observation, auxiliary_head=config.aux.enabled, seed=seed)
        for seed in _stream_seeds(seeds, "model")
    ]
    agent, adams = StackedAgent(agents), [c.optimizer for c in configs]
    return Learner(
        config=config,
        agent=agent,
        action_spec=agent.action_spec,
        proximal=_proximal([c.policy.proximal for c in configs], config, agent),
        optimizers=Optimizers(agent, config.optimizer, lambda matrices, _: StackedAdam(matrices, adams)),
        shuffle=_generators(seeds, "shuffle"),
        interrupts=Interrupts(),
        recent=RecentBatches.of(config.optimizer),
        policy_statistics=statistics or config.optimizer.adaptive_step,
    )


def _proximal(kinds: Sequence[str], config: TrainConfig, agent: StackedAgent) -> ProximalPolicy:
    if len(set(kinds)) == 1:
        return build_proximal(config, agent.policy)
    return MixedProximal(agent.policy, kinds, config.policy.center_of_mass)


def _components(
    config: TrainConfig,
    configs: Sequence[TrainConfig],
    seeds: Sequence[int],
    env: VectorEnv,
    learner: Learner,
    sampler: StackedSampler,
) -> Components:
    reward, source, num_envs, steps = config.reward, config.rollout.source, config.env.num_envs, config.rollout.steps
    auxiliary = None
    if config.aux.enabled and config.aux.epochs:
        layout = layout_of(
            env.observation_space,
            learner.action_spec.num_params,
            segments=config.aux.policy_iterations,
            num_envs=num_envs,
            steps=steps,
        )
        adams = [OptimizerConfig(step_size=c.aux.step_size, schedule=c.optimizer.schedule) for c in configs]
        auxiliary = AuxiliaryPhase(
            learner,
            StackedStore(layout, len(seeds)),
            _generators(seeds, "auxiliary"),
            lambda matrices, _: StackedAdam(matrices, adams),
        )
    return Components(
        source=Delayed(
            functools.partial(sampler.collect, steps),
            sampler,  # type: ignore[arg-type]  # has the episodes, which is all that is used of it
            source.delay if source.kind == "delayed" else 0,
            learner.device,
        ),
        learner=learner,
        reward_normalizer=(
            RewardNormalizer(num_envs, reward.return_discount, reward.bound, runs=len(seeds))
            if reward.normalize
            else None
        ),
        advantage_normalizer=AdvantageNormalizer(config.advantage.span) if config.advantage.normalize else None,
        env=env,
        auxiliary=auxiliary,
    )


def _generators(seeds: Sequence[int], purpose: str) -> RunGenerators:
    return RunGenerators(torch.Generator().manual_seed(seed) for seed in _stream_seeds(seeds, purpose))


def _stream_seeds(seeds: Sequence[int], purpose: str) -> list[int]:
    return [stream_seed(seed, purpose, 0, 0) for seed in seeds]


def _optimizer_numbers(config: TrainConfig) -> tuple[float, ...]:
    aux = (config.aux.step_size,) if config.aux.enabled else ()
    return (*config.optimizer.adam_betas, config.optimizer.step_size, *aux)
