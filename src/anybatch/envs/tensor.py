"""Environments of tensors: simulators that step thousands of instances on a device, without NumPy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from torch import Tensor

from anybatch.config.masks import ActionMask
from anybatch.envs.base import Observation as ArrayObservation
from anybatch.envs.base import Steps
from anybatch.envs.contract import call_render, spaces_of, user_code
from anybatch.envs.masks import mask_entry
from anybatch.envs.snapshot import custom_state, restore_custom_state
from anybatch.envs.spaces import Actions, Observations, UnfitError, check_reward, picture
from anybatch.errors import EnvError
from anybatch.observations import Observation, map_observation

_FINAL_KEYS = ("final_obs", "final_observation")
_TIME_OUTS = "time_outs"


class TensorEnv(Protocol):
    """N instances of an environment that give and take tensors with a leading axis N on their device.

    Finished instances are reset within :meth:`step`: the observation is then the first one of the next episode.
    """

    num_envs: int
    """N."""
    observation_space: gymnasium.Space[Any]
    """Of a single instance; if there is a ``single_observation_space``, that one counts."""
    action_space: gymnasium.Space[Any]
    """Of a single instance; if there is a ``single_action_space``, that one counts."""
    device: torch.device | str
    """Device of all tensors."""

    def reset(self) -> Any:
        """Begin an episode everywhere; returns the observations, or (observations, info).

        An argument ``seed``, if there is one, gets an integer at the beginning of a run.
        """

    def step(self, action: Tensor) -> tuple[Any, ...]:
        """Act in every instance.

        Returns (observation, reward, terminated, truncated, info), or (observation, reward, done, info) with
        ``info["time_outs"]``, the dones that a time limit caused. ``info["final_obs"]``, or ``final_observation``, may
        hold the observations (N, ...) before resets; rows of other instances are not read.
        """


@dataclass(frozen=True)
class TensorSteps:
    """Results of one step of N instances, on their device; the environment may overwrite them in its next step."""

    observation: Observation
    """(N, ...) to act on next: after the end of an episode, the first observation of the next one."""
    reward: Tensor
    """(N,)"""
    terminated: Tensor
    """(N,) bool: the episode reached a terminal state."""
    truncated: Tensor
    """(N,) bool: the episode was cut by a time limit."""
    final_observation: Observation | None
    """(N, ...) observations before resets; None if the environment does not tell them."""


class TensorObservations(Observations):
    """Checks and converts the tensors of observations, on their device.

    :meth:`wrong` finds numbers that are not finite, integers outside of their space and masks that allow nothing, for
    many steps at once.
    """

    def tensors(self, raw: Any, count: int) -> Observation:
        """Observations (count, ...) in the dtypes that the networks take; raises EnvError if they do not fit."""
        result = {}
        for name, leaf in self._leaves.items():
            try:
                x = self._entry(raw, leaf)
                if not isinstance(x, Tensor):
                    raise UnfitError(f"is a {type(x).__name__}, but must be a tensor")
                is_mask = isinstance(leaf.space, ActionMask)
                if x.shape != (count, *(leaf.native.shape or ())):
                    raise UnfitError(
                        f"has shape {tuple(x.shape)}, but its space has {(count, *(leaf.native.shape or ()))}"
                    )
                dtype, is_float = _torch_dtype(leaf.dtype), leaf.dtype.kind == "f"
                narrower = not is_float and not x.is_floating_point() and _is_narrower(dtype, x.dtype)
                if (x.is_floating_point() and not is_float and not is_mask) or (narrower and leaf.unbounded):
                    raise UnfitError(f"has dtype {x.dtype}, but its space has {leaf.dtype}")
            except UnfitError as error:
                raise self._error(error, name, None) from error
            x = x.detach()
            if is_mask and x.dtype not in (dtype, torch.bool):
                x = torch.where((x == 0) | (x == 1), x, 2)  # a half would become 0; wrong() finds 2
            elif narrower:  # what is outside stays outside
                x = _comparable(x).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            x = x.to(dtype)
            x = x.flatten(1) if is_mask else x
            result[name] = x if leaf.start is None else x - torch.as_tensor(leaf.start, device=x.device)
        return result if self._is_dict else result["None"]

    def wrong(self, observation: Observation) -> list[Tensor]:
        """Positions of wrong numbers in observations (N, T, ...): bool (N, T, ...) for each entry that can have one."""
        wrong_entries = []
        for name, leaf in self._leaves.items():
            x = observation[name] if isinstance(observation, dict) else observation
            if leaf.dtype.kind == "f":
                wrong_entries.append(~torch.isfinite(x))
            elif self._mask is not None and isinstance(leaf.space, ActionMask):
                wrong_entries += [~part.bool().any(-1) for part in x.split(list(self._mask.sizes), dim=-1)]
                wrong_entries.append((x != 0) & (x != 1))
            elif leaf.bounds is not None and not leaf.unbounded:
                bounds = (np.asarray(bound) - (0 if leaf.start is None else leaf.start) for bound in leaf.bounds)
                low, high = (torch.as_tensor(bound.astype(np.int64), device=x.device) for bound in bounds)
                x = _comparable(x)
                wrong_entries.append((x < low) | (x > high))
        return wrong_entries

    def check_integers(self, observation: ArrayObservation) -> None:
        """Raise EnvError if a row (N, ...) has integers outside of their space, or a mask that is not 1 and 0."""
        for name, leaf in self._leaves.items():
            array = observation[name] if isinstance(observation, dict) else observation
            try:
                if isinstance(leaf.space, ActionMask):
                    wrong = ((array != 0) & (array != 1)).any(axis=1)
                    if wrong.any():
                        raise UnfitError("has a number other than 1 and 0", int(wrong.argmax()))
                elif leaf.dtype.kind != "f":
                    leaf.convert(array if leaf.start is None else array + leaf.start, (len(array),), copy=False)
            except UnfitError as error:
                raise self._error(error, name, error.row) from error


class TensorActions(Actions):
    """Turns actions that are tensors into those of one environment id."""

    def native_tensor(self, action: Tensor) -> Tensor:
        """:meth:`native` of a tensor; all integers are int64. The result shares no memory with ``action``."""
        numbers = self._numbers(action.device)
        if self._leaf.dtype.kind == "f":
            native = action.to(_torch_dtype(self._native_dtype), copy=True)
            return native.clamp(*numbers) if numbers else native  # a float32 bound can be just outside the float64 one
        action = action.to(torch.int64, copy=True)
        return action + numbers[0] if numbers else action

    def _numbers(self, device: torch.device) -> tuple[Tensor, ...]:
        """Bounds of a float64 Box, or the start of a numbering; copied to a device once, for a copy waits for it."""
        if device not in self._on_devices:
            box = self._leaf.native
            numbers: tuple[Any, ...] = () if self._leaf.start is None else (self._leaf.start,)
            if isinstance(box, gymnasium.spaces.Box) and self._native_dtype == np.float64:
                numbers = (box.low, box.high)
            self._on_devices[device] = tuple(torch.as_tensor(x, device=device) for x in numbers)
        return self._on_devices[device]

    @functools.cached_property
    def _on_devices(self) -> dict[torch.device, tuple[Tensor, ...]]:
        return {}


@functools.cache
def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether an integer dtype lacks numbers of another one."""
    if other == torch.bool or dtype == torch.bool:
        return False
    return torch.iinfo(dtype).min > torch.iinfo(other).min or torch.iinfo(dtype).max < torch.iinfo(other).max


def _comparable(x: Tensor) -> Tensor:
    """The tensor in int64 if PyTorch cannot compare its dtype."""
    return x.long() if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class TensorVectorEnv:
    """Adapter of a :class:`TensorEnv`.

    :meth:`reset_tensors` and :meth:`step_tensors` stay on the device and never wait for it: they check shapes and
    dtypes alone, and sampling checks numbers once a rollout. The methods of :class:`anybatch.envs.base.VectorEnv`, with
    arrays, are for evaluation.
    """

    bootstrap_truncated = True
    takes_one_seed = True

    def __init__(
        self, env: TensorEnv, seed: int, *, env_id: str, action_mask: str = "auto", owned: bool = True
    ) -> None:
        """Adapt ``env``.

        Args:
            env: the environment.
            seed: given to the first reset if that takes one.
            env_id: for messages.
            action_mask: env.action_mask; a mask has to be an entry of the observation.
            owned: whether to close ``env`` with this object.

        Raises:
            EnvError: a space is not supported.
        """
        self.num_envs = int(env.num_envs)
        """N."""
        self.device = torch.device(env.device)
        self.env_id = env_id
        self._env, self._owned = env, owned
        self.native_spaces = observation_space, action_space = spaces_of(env, env_id, ("single_", ""))
        mask = mask_entry(action_mask, observation_space, action_space, env_id)
        self._observations = TensorObservations(observation_space, env_id, mask)
        self._actions = TensorActions(action_space, env_id)
        self.observation_space: gymnasium.Space[Any] = self._observations.space
        self.action_space: gymnasium.Space[Any] = self._actions.space
        self._seed: int | None = seed
        self._last: ArrayObservation | None = None
        self._checked = False  # whether a step's results have been looked at

    def reset_tensors(self) -> Observation:
        """Begin an episode everywhere and return the observations (N, ...)."""
        with user_code(f"reset of {self.env_id}"):
            takes_seed = self._seed is not None and "seed" in inspect.signature(self._env.reset).parameters
            raw = self._env.reset(**({"seed": self._seed} if takes_seed else {}))
        self._seed = None
        if isinstance(raw, tuple) and len(raw) == 2 and isinstance(raw[1], Mapping | None):
            # a Tuple of two entries, the second a Dict, looks like (observations, info)
            is_tuple = isinstance(self.native_spaces[0], gymnasium.spaces.Tuple)
            raw = raw[0] if isinstance(raw[0], tuple | list) or not is_tuple else raw
        return self._observations.tensors(raw, self.num_envs)

    def step_tensors(self, action: Tensor) -> TensorSteps:
        """Act in every instance; ``action`` is that of :meth:`anybatch.envs.base.VectorEnv.step` as a tensor."""
        with user_code(f"step of {self.env_id}"):
            result = self._env.step(self._actions.native_tensor(action.to(self.device)))
        if not isinstance(result, tuple) or len(result) not in (4, 5) or not isinstance(result[-1], Mapping):
            what = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise EnvError(
                f"step of {self.env_id} must return (observation, reward, terminated, truncated, info) or "
                f"(observation, reward, done, info), with a dictionary as info, but returned {what}."
            )
        raw, reward, *flags, info = result
        if len(flags) == 1:
            time_outs = info.get(_TIME_OUTS)
            if not self._checked:
                self._check_vector("done", flags[0])
                self._check_vector(f"info[{_TIME_OUTS!r}]", flags[0] if time_outs is None else time_outs)
            done = flags[0].bool()
            # some simulators leave the flags of earlier steps in info
            truncated = torch.zeros_like(done) if time_outs is None else done & time_outs.bool()
            flags = [done & ~truncated, truncated]
        if not self._checked:
            for name, x in zip(("reward", "terminated", "truncated"), (reward, *flags), strict=True):
                self._check_vector(name, x)
            self._checked = True
        final = next((info[key] for key in _FINAL_KEYS if key in info), None)
        return TensorSteps(
            observation=self._observations.tensors(raw, self.num_envs),
            reward=reward,
            terminated=flags[0].bool(),
            truncated=flags[1].bool(),
            final_observation=None if final is None else self._observations.tensors(final, self.num_envs),
        )

    def check(
        self,
        observation: Observation,
        params: Tensor,
        reward: Tensor,
        moments: Tensor | None = None,
        wrong_last: Tensor | None = None,
    ) -> None:
        """Check a rollout's numbers, in one wait for the device, and name the first wrong one.

        Args:
            observation: (N, T, ...) acted on; integers must be in their space, and masks must allow something.
            params: (N, T, P) of the policy; nothing is raised if they were wrong first.
            reward: (N, T).
            moments: (N, ...) of the raw observations, where ``observation`` is normalised: clipping hides infinity.
            wrong_last: (N, T) bool, the step ended an episode whose last observation is needed and not finite.

        Raises:
            EnvError: one is not finite or outside of its space, or a mask allows nothing.
        """
        entries = self._observations.wrong(observation)
        last = torch.zeros_like(reward, dtype=torch.bool) if wrong_last is None else wrong_last
        everything = (*entries, ~torch.isfinite(params), ~torch.isfinite(reward), last)
        wrong = [x.reshape(*x.shape[:2], -1).any(2) for x in everything]
        raw = torch.isfinite(moments).flatten(1).all(1) if moments is not None else torch.ones_like(reward[:, 0]).bool()
        if not bool(torch.stack(wrong).any() | ~raw.all()):
            return
        if not bool(torch.stack(wrong).any()):
            self._blame(raw)
        t, kind = min((int(x.any(0).nonzero()[0]), kind) for kind, x in enumerate(wrong) if bool(x.any()))
        env = int(wrong[kind][:, t].nonzero()[0])
        if kind == len(wrong) - 1:
            raise EnvError(f"The last observation of an episode of environment {env} of {self.env_id} is not finite.")
        if kind == len(wrong) - 2:
            raise EnvError(f"The reward of environment {env} of {self.env_id} is {float(reward[env, t])}.")
        if kind < len(entries):
            self._blame(raw)
            rows = map_observation(lambda x: x[:, t].cpu().numpy(), observation)
            self._observations.check_finite(rows)
            self._observations.check_integers(rows)
            self._observations.check_masks(rows)

    def _blame(self, finite: Tensor) -> None:
        """Raise EnvError if observations of environments are not all ``finite``, (N,) bool.

        One that is not may have spoiled the statistics that normalise the others, and so their actions.
        """
        wrong = (~finite).nonzero().flatten().tolist()
        if wrong:
            who = f"environment {wrong[0]}" if len(wrong) == 1 else f"{len(wrong)} environments"
            raise EnvError(f"Observations of {who} of {self.env_id} are not finite.")

    def reset(self) -> ArrayObservation:
        self._last = self._arrays(self.reset_tensors())
        self._observations.check_masks(self._last)
        return self._last

    def step(self, action: np.ndarray) -> Steps:
        steps = self.step_tensors(torch.from_numpy(action))
        observation = self._arrays(steps.observation)
        reward = steps.reward.detach().cpu().float().numpy().copy()
        terminated, truncated = (x.cpu().numpy().copy() for x in (steps.terminated, steps.truncated))
        check_reward(reward, self.env_id)
        self._observations.check_masks(observation)
        index = np.flatnonzero(truncated & ~terminated)
        final = None
        if len(index) and steps.final_observation is not None:
            rows = torch.from_numpy(index).to(self.device)
            final = self._arrays(map_observation(lambda x: x[rows], steps.final_observation), index)
        self._last = observation
        return Steps(observation, reward, terminated, truncated, index, final)

    def save_state(self) -> dict[str, Any] | None:
        """The result of the environment's method ``get_state()``; None if it has none, or not plain data."""
        return custom_state(self._env, self.env_id)

    def load_state(self, state: dict[str, Any]) -> None:
        """Pass the state to the environment's method ``set_state(state)``; its tensors may be on another device."""
        restore_custom_state(self._env, state, self.env_id)
        self._seed = None

    def render(self) -> np.ndarray:
        """The result of the environment's method ``render()``, or its image observation."""
        render = getattr(self._env, "render", None)
        frame = call_render(render, self.env_id) if callable(render) else None
        if frame is None:
            return picture(self._last, self.env_id)
        frame = frame.detach().cpu().numpy() if isinstance(frame, Tensor) else np.asarray(frame)
        return frame[0] if frame.ndim == 4 else frame

    def close(self) -> None:
        if self._owned and hasattr(self._env, "close"):
            with user_code(f"close of {self.env_id}"):
                self._env.close()

    def _arrays(self, observation: Observation, env_index: np.ndarray | None = None) -> ArrayObservation:
        arrays = map_observation(lambda x: x.detach().cpu().numpy().copy(), observation)
        self._observations.check_finite(arrays, env_index)
        self._observations.check_integers(arrays)
        return arrays

    def _check_vector(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor) or x.shape != (self.num_envs,):
            got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise EnvError(
                f"step of {self.env_id} must return a tensor ({self.num_envs},) as {name}, but returned {got}."
            )
