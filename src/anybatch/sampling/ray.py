"""Asynchronous sampling on several machines: rollout workers as Ray actors. Needs the extra anybatch[ray].

Each worker steps an equal part of the environments. When iteration i begins, the learner publishes its weights and
requests rollout i + max_lag with them (at the start also the rollouts before it), so every rollout acts with weights
exactly max_lag iterations old, as under :class:`anybatch.sampling.threaded.Asynchronous` with ``deterministic``; with a
single worker the results are bitwise equal. If a worker dies, only its unfinished rollouts are lost: a new worker
begins new episodes and samples them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.config.schema import TrainConfig
from anybatch.distributed.collectives import is_distributed, world_size
from anybatch.distributed.state import Slot, State
from anybatch.envs.factory import make
from anybatch.errors import AnybatchError, ConfigError, EnvError, UserCodeError, install_command, no_ray_cluster
from anybatch.models.agent import Agent, build_agent
from anybatch.models.precision import resolve_precision
from anybatch.sampling.published import load_weights, weights_of
from anybatch.sampling.rollout import Rollout, Sampled
from anybatch.sampling.sources import NEW_EPISODES
from anybatch.sampling.tensor_rollout import collect_any, make_sampler
from anybatch.system.launcher import ray_address
from anybatch.system.signals import Interrupts

_CPU = torch.device("cpu")
_POLL_SECONDS = 0.1
_MAX_DEATHS = 3  # of one worker, less _FORGIVEN for each rollout that it finished; its environments must be at fault
_FORGIVEN = 0.1

Seeds = Callable[[int, int], tuple[int, int]]
"""Seeds of environments and actions, given a worker's number and the number of its earlier starts."""


class Worker:
    """Some of the environments and a copy of the networks, in a separate process."""

    def __init__(self, config: TrainConfig, num_envs: int, env_seed: int, action_seed: int) -> None:
        """Make ``num_envs`` environments; the worker computes on the CPU."""
        env = make(config.env, num_envs, env_seed)
        self._agent = build_agent(
            config.model,
            env.observation_space,
            env.action_space,
            observation=config.observation,
            precision=resolve_precision(config.precision, _CPU),
            auxiliary_head=config.aux.enabled,
        ).requires_grad_(False)
        self._sampler = make_sampler(
            env,
            self._agent.action_spec,
            bootstrap_truncated=config.env.bootstrap_truncated,
            generator=torch.Generator().manual_seed(action_seed),
        )
        self._steps = config.rollout.steps

    def sample(self, weights: dict[str, Any], version: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sample a rollout with the weights after ``version`` iterations; returns it and its counts as plain data."""
        load_weights(self._agent, weights)
        rollout = collect_any(
            self._sampler, self._agent, self._steps, device=_CPU, interrupts=Interrupts(), version=version
        )
        return rollout.state_dict(), asdict(self._sampler.episodes.drain())


@dataclass
class _Request:
    """A rollout that a worker has been asked for."""

    weights: Any
    version: int
    result: Any
    """Ray's reference to the result."""


class RayActors:
    """Samples with Ray actors, every rollout ``max_lag`` iterations ahead of training.

    A checkpoint holds no environments: on resuming they start new episodes, and sampling starts again.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_envs: int,
        seeds: Seeds,
        agent: Agent,
        *,
        interrupts: Interrupts,
        device: torch.device,
    ) -> None:
        """Start the workers, in the cluster that RAY_ADDRESS names, or else on this machine.

        Args:
            config: of the run; ``rollout.source`` gives the number of workers and the lag.
            num_envs: environments of this data-parallel worker, divided evenly.
            seeds: the seeds of each worker.
            agent: the networks being trained; read in :meth:`next` only.
            interrupts: checked while the learner waits.
            device: where rollouts are kept.

        Raises:
            AnybatchError: Ray is not installed.
            ConfigError: several data-parallel workers would each start a cluster.
        """
        try:
            import ray
        except ImportError as error:
            raise AnybatchError(f"rollout.source.ray_workers needs Ray: {install_command('ray')}") from error
        if is_distributed() and not ray.is_initialized() and ray_address() is None:
            raise ConfigError(
                f"rollout.source.ray_workers with {world_size()} data-parallel workers needs one Ray cluster for all "
                "of them: start it with ray start --head, and set RAY_ADDRESS"
            )
        self._ray = ray
        count = config.rollout.source.ray_workers
        self._started_cluster = not ray.is_initialized()
        if self._started_cluster:
            _init(ray, count)
        present = ray.cluster_resources().get("CPU", 0)
        if present < count:
            print(
                f"Ray's cluster has {present:g} CPUs, but rollout.source.ray_workers {count} need one each: the run "
                "waits until there are enough",
                file=sys.stderr,
                flush=True,
            )
        self._config = config
        self._envs_per_ray_worker = num_envs // count
        self._seeds = seeds
        self._agent = agent
        self._interrupts = interrupts
        self._device = device
        self._sampled = Sampled()
        self._last_requested: int | None = None  # number of a rollout
        workers = range(count)
        self._starts = [0 for _ in workers]
        self._deaths = [0.0 for _ in workers]
        self._workers = [self._start(number) for number in workers]
        self._requests: list[deque[_Request]] = [deque() for _ in workers]

    def next(self, iteration: int) -> Rollout:
        """Request the rollout for ``max_lag`` iterations later, and wait for the one of this iteration.

        Raises:
            Interrupted: a stop was requested, and sampling takes long.
            EnvError, DivergenceError, ...: what ended a worker's rollout.
        """
        state = weights_of(self._agent)
        weights = self._ray.put({name: x.cpu() if isinstance(x, Tensor) else x for name, x in state.items()})
        if self._last_requested is None:
            self._last_requested = iteration - 1
        while self._last_requested < iteration + self._config.rollout.source.max_lag:
            self._last_requested += 1
            for number, requests in enumerate(self._requests):
                requests.append(_Request(weights, iteration, self._request(number, weights, iteration)))
        rollouts = []
        for number in range(len(self._workers)):
            rollout, sampled = self._receive(number)
            rollouts.append(Rollout.from_state_dict(rollout, self._device))
            self._sampled.add(Sampled(**sampled))
        return concatenate_rollouts(rollouts)

    def drain(self) -> Sampled:
        """Return the counts of the rollouts returned by :meth:`next` since the last call."""
        sampled, self._sampled = self._sampled, Sampled()
        return sampled

    worker_keys: frozenset[str] = frozenset()  # the environments live in other processes and are not saved

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> list[str]:
        return [NEW_EPISODES]

    def merge(self, workers: Sequence[State]) -> State:
        return {}

    def split(self, merged: State, slot: Slot) -> State:
        return {}

    def close(self) -> bool:
        """End the workers, and Ray with them if it was started here."""
        for worker in self._workers:
            with contextlib.suppress(self._ray.exceptions.RayError):  # the cluster may be gone
                self._ray.kill(worker)
        self._workers = []
        if self._started_cluster:
            self._ray.shutdown()
        return True

    def _start(self, number: int) -> Any:
        seeds = self._seeds(number, self._starts[number])
        self._starts[number] += 1
        return self._ray.remote(Worker).options(num_cpus=1).remote(self._config, self._envs_per_ray_worker, *seeds)

    def _request(self, number: int, weights: Any, version: int) -> Any:
        return self._workers[number].sample.remote(weights, version)

    def _receive(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Wait for the worker's oldest rollout; a worker that has died is replaced."""
        requests = self._requests[number]
        while True:
            try:
                while not self._ray.wait([requests[0].result], timeout=_POLL_SECONDS)[0]:
                    self._interrupts.check()
                result: tuple[dict[str, Any], dict[str, Any]] = self._ray.get(requests[0].result)
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause or error from (error if isinstance(error.cause, UserCodeError) else None)
            except self._ray.exceptions.RayError as error:  # it has died, was killed for memory, or its data is lost
                self._restart(number, error)
            else:
                requests.popleft()
                self._deaths[number] = max(0.0, self._deaths[number] - _FORGIVEN)
                return result

    def _restart(self, number: int, error: Exception) -> None:
        """Replace a dead worker, and request its unfinished rollouts again."""
        self._deaths[number] += 1
        reason = f"Ray worker {number} of {self._config.env.id} has died"
        if self._deaths[number] > _MAX_DEATHS - 1:
            raise EnvError(f"{reason} {self._starts[number]} times, too often to continue: {_reason(error)}") from error
        print(f"{reason} and is started again: {_reason(error)}", file=sys.stderr, flush=True)
        self._workers[number] = self._start(number)
        for order in self._requests[number]:
            if not self._finished(order):
                order.result = self._request(number, order.weights, order.version)

    def _finished(self, order: _Request) -> bool:
        try:
            ready = self._ray.wait([order.result], timeout=0)[0]
            return bool(ready) and self._ray.get(order.result) is not None
        except self._ray.exceptions.RayError:
            return False


def _init(ray: Any, workers: int) -> None:
    """Connect to the cluster of RAY_ADDRESS or ``ray start``, or start one on this machine."""
    options = {"include_dashboard": False, "log_to_driver": False}
    try:
        # more workers than cores are allowed, which Ray would otherwise never start
        try:
            ray.init(num_cpus=max(workers, os.cpu_count() or 1), **options)
        except ValueError:  # a running cluster counts its own CPUs
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:  # RuntimeError: it has another version
        raise EnvError(no_ray_cluster(None, error)) from error


def _reason(error: Exception) -> str:
    """The line of Ray's message that gives the cause: the last one if the environments could not be made."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0]


def concatenate_rollouts(rollouts: list[Rollout]) -> Rollout:
    """Concatenate (N_1, T), (N_2, T), ... along the environments; the version is that of the oldest rollout."""
    states = [rollout.state_dict() for rollout in rollouts]
    tensors: dict[str, Any] = {
        name: torch.cat([s[name] for s in states]) for name, value in states[0].items() if isinstance(value, Tensor)
    }
    observation = states[0]["observation"]
    if isinstance(observation, dict):
        tensors["observation"] = {key: torch.cat([s["observation"][key] for s in states]) for key in observation}
    return Rollout(**tensors, version=min(rollout.version for rollout in rollouts))
