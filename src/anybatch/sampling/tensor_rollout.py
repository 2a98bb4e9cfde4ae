"""Sampling in environments of tensors: nothing leaves the device or waits for it before a rollout is complete."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybatch.envs.base import VectorEnv
from anybatch.envs.tensor import TensorSteps, TensorVectorEnv
from anybatch.errors import DivergenceError, EnvError
from anybatch.models.actions import ActionSpec
from anybatch.models.layers import fixed_weights
from anybatch.models.normalizer import Unchanged
from anybatch.models.tensor_normalizer import TensorNormalizing
from anybatch.observations import Observation, leaves, map_observation
from anybatch.sampling.acting import Actor
from anybatch.sampling.memory import remembering, value_after
from anybatch.sampling.rollout import INFINITE_ACTIONS, Rollout, Sampled, Sampler, check_finite, collect
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
    with fixed_weights(agent):
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

    def filled(self) -> Observation:
        """All columns, (N, T, ...)."""
        assert self.whole is not None
        return self.whole

    def tensor(self) -> Tensor:
        """The tensor, of data that are no dictionary."""
        assert isinstance(self.whole, Tensor)
        return self.whole


class _Record:
    """Everything that the steps of a rollout give, on the device of the networks."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.observations, self.reward, self.terminated, self.truncated, self.finals = (
            _Columns(steps, device) for _ in range(5)
        )
        self.outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        """Actions, parameters and values of each step."""
        self.has_final = [False] * steps
        """Whether the environment gave last observations in the step."""

    def add(self, t: int, step: TensorSteps, final: Observation | None) -> None:
        """Copy the results of step ``t``, which the environment may overwrite."""
        self.reward.put(t, step.reward.float())
        self.terminated.put(t, step.terminated)
        self.truncated.put(t, step.truncated)
        if final is not None:
            self.has_final[t] = True
            self.finals.put(t, final)

    def cut(self) -> tuple[Tensor, Tensor]:
        """Bool (N, T), a time limit ended the episode; and (T,), the environment gave last observations."""
        cut = self.truncated.tensor() & ~self.terminated.tensor()
        return cut, torch.tensor(self.has_final, device=cut.device)

    def wrong_last(self) -> Tensor | None:
        """Bool (N, T), the last observation of an episode that a time limit ended is not finite; None without any."""
        numbers = leaves(self.finals.filled()) if any(self.has_final) else []
        wrong = [~torch.isfinite(x).reshape(*x.shape[:2], -1).all(2) for x in numbers if x.is_floating_point()]
        cut, known = self.cut()
        return torch.stack(wrong).any(0) & cut & known if wrong else None


def _step_of(env: TensorVectorEnv, action: Tensor, acted_on: Observation) -> TensorSteps:
    """:func:`anybatch.sampling.rollout.step_of`; infinite observations, not checked yet, explain infinite actions."""
    try:
        return env.step_tensors(action)
    except EnvError as error:
        if not bool(torch.isfinite(action).all()) and all(bool(torch.isfinite(x).all()) for x in leaves(acted_on)):
            raise DivergenceError(INFINITE_ACTIONS) from error
        raise


@torch.no_grad()
def collect_tensors(
    sampler: TensorSampler, agent: Actor, steps: int, *, device: torch.device, interrupts: Interrupts, version: int = 0
) -> Rollout:
    """:func:`anybatch.sampling.rollout.collect` in environments of tensors.

    The value of an episode that a time limit cut is bootstrapped from its last observation where the environment gives
    that, and else from V(s_t), as is usual with such simulators; with one warning.

    Raises:
        EnvError: the environment broke its contract; numbers are checked when the rollout is complete.
        DivergenceError: the policy's outputs are not finite.
    """
    env, spec, record = sampler.env, sampler.action_spec, _Record(steps, device)
    observation: Any = sampler.take_observation(interrupts)
    normalizer = agent.observation_normalizer
    normalized: Any = Unchanged() if normalizer is None else TensorNormalizing(normalizer, device)
    agent, memory = remembering(agent, sampler.state, sampler.episodes.first)
    noise = spec.noise((steps, env.num_envs), sampler.generator, device).unbind(0)
    for t in range(steps):
        interrupts.check()
        acted_on = normalized.step(t, _moved(observation, device))
        record.observations.put(t, acted_on)
        params, value = agent(acted_on)
        action = spec.distribution(params).transform(noise[t])
        record.outputs.append((action, params, value))
        with interrupts.interruptible():
            step = _step_of(env, spec.tensor_to_env(action), acted_on)
        observation = step.observation
        final = step.final_observation if sampler.bootstrap_truncated else None
        record.add(t, step, None if final is None else _moved(final, device))
        if memory:
            memory.ended(step.terminated | step.truncated)
    sampler.observation = map_observation(lambda x: x.clone(), observation)  # the environment may reuse its tensors
    sampler.state = memory.state if memory else None
    after = normalized(_moved(observation, device))
    last = agent.value(after)
    action, params, value = (torch.stack(x, dim=1) for x in zip(*record.outputs, strict=True))
    reward, ended, moments = record.reward.tensor(), record.terminated.tensor(), normalized.moments()
    done, observations = record.truncated.tensor() | ended, record.observations.filled()
    logp = spec.distribution(params).log_prob(action)
    # infinite actions explain what the environment returns: check_finite finds them in logp
    env.check(observations, torch.cat([params, logp.unsqueeze(2)], dim=2), reward, moments, record.wrong_last())
    if not bool(torch.isfinite(last).all()) and bool(torch.isfinite(logp).all()):  # observations after the last step
        env.check(map_observation(lambda x: x.unsqueeze(1), after), params[:, -1:], reward[:, -1:])
    check_finite(torch.cat([value, last.unsqueeze(1)], dim=1), logp)
    return Rollout(
        observation=observations,
        action=action,
        behavior_logp=logp,
        behavior_params=params,
        reward=reward,
        value=value,
        next_value=_next_value(sampler, record, value, last, lambda x, i, t: value_after(agent, i, t, normalized(x))),
        first=sampler.episodes.add(reward.to(env.device), done.to(env.device)).to(device),
        done=done,
        terminated=ended if sampler.bootstrap_truncated else done,
        version=version,
        observation_moments=moments,
        state=memory.stored() if memory else None,
    )


def _next_value(
    sampler: TensorSampler,
    record: _Record,
    value: Tensor,
    last: Tensor,
    value_of: Callable[[Observation, Tensor, Tensor], Tensor],
) -> Tensor:
    """V(s_{t+1}) before any reset (N, T), from V(s_t) and the values (N,) after the rollout.

    ``value_of`` gives the values (K,) of observations that ended episodes, of environments and steps (K,).
    """
    next_value = torch.cat([value[:, 1:], last.unsqueeze(1)], dim=1)
    if not sampler.bootstrap_truncated:
        return next_value
    cut, known = record.cut()
    next_value = torch.where(cut, value, next_value)
    if any(record.has_final):
        whole = record.finals.filled()
        for index in (cut & known).nonzero().split(len(value)):  # as many as act in a step, which bounds memory
            env, t = index.unbind(1)
            if len(index):
                next_value[env, t] = value_of(map_observation(lambda x, e=env, t=t: x[e, t], whole), env, t)  # type: ignore[misc]
    if not sampler.warned and not all(record.has_final) and bool((cut & ~known).any()):
        sampler.warned = True
        warnings.warn(
            f"{sampler.env.env_id} lacks info['final_obs']: the value after a time limit is that before it, V(s_t)",
            stacklevel=2,
        )
    return next_value


def _moved(observation: Observation, device: torch.device) -> Observation:
    # towards the CPU, a copy that does not block would be read before it is complete
    return map_observation(lambda x: x.to(device, non_blocking=device.type == "cuda"), observation)
