"""Environments that are stepped in groups, by turns, so that the policy computes for one while another steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from anybatch.envs import snapshot
from anybatch.envs.base import Observation, Steps, VectorEnv
from anybatch.envs.spaces import concatenated
from anybatch.errors import EnvError


class GroupedEnv:
    """G vector environments of one kind as one of N; see :class:`anybatch.envs.base.VectorEnv`.

    Whoever gains from it steps the `groups` by themselves; :meth:`step` steps one after the other.
    """

    def __init__(self, envs: Sequence[VectorEnv]) -> None:
        sizes = [env.num_envs for env in envs]
        ends = np.cumsum(sizes).tolist()
        self.groups = [(slice(end - size, end), env) for size, end, env in zip(sizes, ends, envs, strict=True)]
        """The rows (of N) of each group, and its environments."""
        self.num_envs = sum(sizes)
        self.observation_space = envs[0].observation_space
        self.action_space = envs[0].action_space
        self.bootstrap_truncated = envs[0].bootstrap_truncated

    def reset(self) -> Observation:
        """Begin an episode everywhere."""
        return concatenated([env.reset() for _, env in self.groups])

    def step(self, action: np.ndarray) -> Steps:
        """Act everywhere."""
        steps = [env.step(action[rows]) for rows, env in self.groups]
        final = [step.final_observation for step in steps if step.final_observation is not None]
        return Steps(
            concatenated([step.observation for step in steps]),
            np.concatenate([step.reward for step in steps]),
            np.concatenate([step.terminated for step in steps]),
            np.concatenate([step.truncated for step in steps]),
            np.concatenate([step.final_index + rows.start for step, (rows, _) in zip(steps, self.groups, strict=True)]),
            concatenated(final) if final else None,
        )

    def save_state(self) -> dict[str, Any] | None:
        """As the same environments in one group would save it, where these have a state each."""
        states = []
        for _, env in self.groups:
            state = env.save_state()
            if state is None:
                return None
            states.append(state)
        if all(list(state) == ["envs"] for state in states):
            return {"envs": [one for state in states for one in state["envs"]]}
        return {"groups": states}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there; raises EnvError if the state is of another number of environments or groups."""
        if "envs" in state:
            states = snapshot.states_of(state, self.num_envs)
            for rows, env in self.groups:
                env.load_state({"envs": states[rows]})
            return
        if len(state.get("groups", ())) != len(self.groups):
            raise EnvError(f"The saved state is not of {len(self.groups)} groups of environments (env.groups).")
        for (_, env), one in zip(self.groups, state["groups"], strict=True):
            env.load_state(one)

    def render(self) -> np.ndarray:
        """The frame of environment 0."""
        return self.groups[0][1].render()

    def close(self) -> None:
        """Close all groups."""
        with contextlib.ExitStack() as closing:  # all of them, whatever one raises
            for _, env in self.groups:
                closing.callback(env.close)


def groups_of(env: VectorEnv) -> list[tuple[slice, VectorEnv]]:
    """The groups of a :class:`GroupedEnv`, with their rows; any other environment is a group of its own."""
    return env.groups if isinstance(env, GroupedEnv) else [(slice(0, env.num_envs), env)]
