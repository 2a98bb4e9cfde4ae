"""Environments that hang end the run instead of standing still for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from anybatch.envs.base import Observation, Steps, VectorEnv
from anybatch.errors import EnvError


class TimedEnv:
    """A vector environment whose steps and resets may take so long and no longer; see :class:`VectorEnv`.

    They run in a thread of their own, since nothing can break off a call that hangs: it is left behind. Handing a step
    over costs some tens of microseconds.
    """

    def __init__(self, env: VectorEnv, seconds: float, env_id: str) -> None:
        """Take over ``env``; ``seconds`` is the longest that a step or reset of all of them may take."""
        self.num_envs = env.num_envs
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.bootstrap_truncated = env.bootstrap_truncated
        self._env = env
        self._seconds = min(seconds, threading.TIMEOUT_MAX)  # infinity is allowed
        self._env_id = env_id
        self._hangs = False
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="anybatch-stepper", daemon=True)
        self._thread.start()

    def reset(self) -> Observation:
        """Begin an episode everywhere; raises EnvError if that takes too long."""
        observation: Observation = self._timed(self._env.reset, "reset")
        return observation

    def step(self, action: np.ndarray) -> Steps:
        """Act everywhere; raises EnvError if that takes too long."""
        steps: Steps = self._timed(lambda: self._env.step(action), "step")
        return steps

    def save_state(self) -> dict[str, Any] | None:
        """The state of the environments."""
        return self._env.save_state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._env.load_state(state)

    def render(self) -> np.ndarray:
        """The frame of environment 0."""
        return self._env.render()

    def close(self) -> None:
        """Close the environments, unless they hang: they would hang in this as well."""
        self._calls.put(None)
        if not self._hangs:
            self._thread.join()
            self._env.close()

    def _timed(self, call: Callable[[], Any], what: str) -> Any:
        if not self._hangs:
            self._calls.put(call)
            self._hangs = True  # until it has returned: an interrupt may end the wait as well
            try:
                answer, error = self._answers.get(timeout=self._seconds)
            except queue.Empty:
                pass
            else:
                self._hangs = False
                if error is not None:
                    raise error
                return answer
        raise EnvError(
            f"A {what} of {self._env_id} has not returned after {self._seconds:g} seconds (env.step_timeout), so the "
            "environment hangs."
        )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put((call(), None))
            except BaseException as error:  # raised again by the thread that asked
                self._answers.put((None, error))
