"""Sampling in environments of tensors: nothing leaves the device or waits for it before a rollout is complete."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybatch.envs.base import VectorEnv
from anybatch.envs.tensor import TensorVectorEnv
from anybatch.models.actions import ActionSpec
from anybatch.models.tensor_normalizer import TensorNormalizing
from anybatch.observations import Observation, leaves, map_observation
from anybatch.sampling.acting import Actor
from anybatch.sampling.memory import memory_of, value_after
from anybatch.sampling.rollout import Rollout, Sampled, Sampler, check_finite, collect
from anybatch.system.signals import Interrupts


class TensorEpisodes:
    """:class:`anybatch.sampling.rollout.EpisodeTracker` on a device."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        """All environments start a new episode."""
        self.returns = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.first = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._sampled = Sampled()

    def add(self, reward: Tensor, done: Tensor) -> Tensor:
        """Count T steps of every environment: reward (N, T), done (N, T); returns the first steps, (N, T) bool."""
        first = torch.cat([self.first.unsqueeze(1), done[:, :-1]], dim=1)
        returns, lengths = [], []
        for t in range(done.shape[1]):
            keep = ~first[:, t]
            self.returns = self.returns * keep + reward[:, t]
            self.lengths = self.lengths * keep + 1
            returns.append(self.returns)
            lengths.append(self.lengths)
        ended = done.T  # in the order of their ends
        self._sampled.episode_returns += torch.stack(returns)[ended].tolist()
        self._sampled.episode_lengths += torch.stack(lengths)[ended].tolist()
        self._sampled.env_steps += done.numel()
        self.first = done[:, -1].clone()
        return first

    def drain(self) -> Sampled:
        """Return the counts since the last call, and start again from zero."""
        sampled, self._sampled = self._sampled, Sampled()
        return sampled

    def restart(self) -> None:
        """Note that all environments start a new episode; the counts stay."""
        self.first = torch.ones_like(self.first)

    def state_dict(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        return {name: getattr(self, name).clone() for name in ("returns", "lengths", "first")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name in ("returns", "lengths", "first"):
            setattr(self, name, state[name].to(self.first.device, copy=True))


class TensorSampler(Sampler):
    """A :class:`anybatch.sampling.rollout.Sampler` of environments of tensors."""

    env: TensorVectorEnv

    def __init__(
        self, env: TensorVectorEnv, action_spec: ActionSpec, *, bootstrap_truncated: bool, generator: torch.Generator
    ) -> None:
        super().__init__(env, action_spec, bootstrap_truncated=bootstrap_truncated, generator=generator)
        self.episodes: Any = TensorEpisodes(env.num_envs, env.device)
        self.warned = False
        """Whether the missing of last observations was reported."""

    def _reset(self) -> Observation:
        return self.env.reset_tensors()

    def _to_tensor(self, array: Any) -> Tensor:
        tensor: Tensor = array.clone()
        return tensor

    def _from_tensor(self, tensor: Tensor) -> Any:
        return tensor.to(self.env.device, copy=True)


def make_sampler(
    env: VectorEnv, action_spec: ActionSpec, *, bootstrap_truncated: bool | None, generator: torch.Generator
) -> Sampler:
    """The sampler of environments of arrays or of tensors; ``bootstrap_truncated`` None takes their default."""
    bootstrap = env.bootstrap_truncated if bootstrap_truncated is None else bootstrap_truncated
    kind: Any = TensorSampler if isinstance(env, TensorVectorEnv) else Sampler
    sampler: Sampler = kind(env, action_spec, bootstrap_truncated=bootstrap, generator=generator)
    return sampler


def collect_any(
    sampler: Sampler, agent: Actor, steps: int, *, device: torch.device, interrupts: Interrupts, version: int = 0
) -> Rollout:
    """:func:`anybatch.sampling.rollout.collect`, or :func:`collect_tensors` in environments of tensors."""
    function: Callable[..., Rollout] = collect_tensors if isinstance(sampler, TensorSampler) else collect
    return function(sampler, agent, steps, device=device, interrupts=interrupts, version=version)


class _Columns:
    """Tensors (N, T, ...) that are filled one step at a time."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._steps, self._device = steps, device
        self.whole: Observation | None = None

    def put(self, t: int, step: Observation) -> None:
        """Write column ``t`` from (N, ...); the tensors are made with the first one."""
        if self.whole is None:
            self.whole = map_observation(
                lambda x: torch.empty((len(x), self._steps, *x.shape[1:]), dtype=x.dtype, device=self._device), step
            )
        for column, x in zip(leaves(self.whole), leaves(step), strict=True):
            column[:, t] = x

    def tensor(self) -> Tensor:
        """The tensor, of data that are no dictionary."""
        assert isinstance(self.whole, Tensor)
        return self.whole


@torch.no_grad()
def collect_tensors(
    sampler: TensorSampler, agent: Actor, steps: int, *, device: torch.device, interrupts: Interrupts, version: int = 0
) -> Rollout:
    """:func:`anybatch.sampling.rollout.collect` in environments of tensors.

    The value of an episode that a time limit cut is bootstrapped from its last observation where the environment gives
    that, and else from V(s_t), as is usual with such simulators; a warning says so once.

    Raises:
        EnvError: the environment broke its contract; numbers are checked when the rollout is complete.
        DivergenceError: the policy's outputs are not finite.
    """
    env, spec = sampler.env, sampler.action_spec
    observation: Any = sampler.take_observation(interrupts)
    normalizer = agent.observation_normalizer
    normalized = None if normalizer is None else TensorNormalizing(normalizer, device)
    seen, reward, terminated, truncated, finals = (_Columns(steps, device) for _ in range(5))
    has_final = [False] * steps
    memory = memory_of(agent, sampler.state, sampler.episodes.first)
    agent = memory or agent
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []
    noise = spec.noise((steps, env.num_envs), sampler.generator, device).unbind(0)
    for t in range(steps):
        interrupts.check()
        observation = _moved(observation, device)
        acted_on = observation if normalized is None else normalized.step(observation)
        seen.put(t, acted_on)
        params, value = agent(acted_on)
        action = spec.distribution(params).transform(noise[t])
        outputs.append((action, params, value))
        with interrupts.interruptible():
            step = env.step_tensors(spec.tensor_to_env(action))
        observation = step.observation
        reward.put(t, step.reward.float())
        terminated.put(t, step.terminated)
        truncated.put(t, step.truncated)
        if memory:
            memory.ended(step.terminated | step.truncated)
        if sampler.bootstrap_truncated and step.final_observation is not None:
            has_final[t] = True
            finals.put(t, _moved(step.final_observation, device))
    sampler.observation = map_observation(lambda x: x.clone(), observation)  # the environment may reuse its tensors
    sampler.state = memory.state if memory else None
    scaled: Callable[[Observation], Observation] = (lambda x: x) if normalized is None else normalized
    last_value = agent.value(scaled(_moved(observation, device)))
    action, params, value = (torch.stack(x, dim=1) for x in zip(*outputs, strict=True))
    cut, ended = truncated.tensor() & ~terminated.tensor(), terminated.tensor()
    next_value = torch.cat([value[:, 1:], last_value.unsqueeze(1)], dim=1)
    if sampler.bootstrap_truncated:
        next_value = torch.where(cut, value, next_value)
        if any(has_final):
            _write_final_values(next_value, cut & torch.tensor(has_final, device=device), finals, scaled, agent)
        _warn_of_missing(sampler, cut, has_final)
    moments = None if normalized is None else normalized.moments()
    logp = spec.distribution(params).log_prob(action)
    assert seen.whole is not None
    env.check(seen.whole, params, reward.tensor(), moments)
    check_finite(value, logp)
    done = cut | ended
    return Rollout(
        observation=seen.whole,
        action=action,
        behavior_logp=logp,
        behavior_params=params,
        reward=reward.tensor(),
        value=value,
        next_value=next_value,
        first=sampler.episodes.add(reward.tensor().to(env.device), done.to(env.device)).to(device),
        done=done,
        terminated=ended if sampler.bootstrap_truncated else done,
        version=version,
        observation_moments=moments,
        state=memory.stored() if memory else None,
    )


def _moved(observation: Observation, device: torch.device) -> Observation:
    return map_observation(lambda x: x.to(device, non_blocking=True), observation)


def _write_final_values(
    next_value: Tensor,
    where: Tensor,
    finals: _Columns,
    scaled: Callable[[Observation], Observation],
    agent: Actor,
) -> None:
    """Put the values of last observations (N, T, ...) into next values (N, T), ``where`` (N, T) they count."""
    assert finals.whole is not None
    at_a_time = len(next_value)
    for index in where.nonzero().split(at_a_time):  # as many as act in a step, which bounds memory
        if not len(index):
            return
        env, t = index.unbind(1)
        last = scaled(map_observation(lambda x, e=env, t=t: x[e, t], finals.whole))  # type: ignore[misc]
        next_value[env, t] = value_after(agent, env, t, last)


def _warn_of_missing(sampler: TensorSampler, cut: Tensor, has_final: list[bool]) -> None:
    if sampler.warned or all(has_final):
        return
    if bool((cut & ~torch.tensor(has_final, device=cut.device)).any()):
        sampler.warned = True
        warnings.warn(
            f"{sampler.env.env_id} gives no info['final_obs']: the value after a time limit is taken to be that before "
            "it, V(s_t)",
            stacklevel=2,
        )
