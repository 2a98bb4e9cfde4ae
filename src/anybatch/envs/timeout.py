"""A time limit for calls, so that an environment that hangs ends the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from anybatch.envs.base import Observation, Steps, VectorEnv
from anybatch.errors import EnvError


class TimedEnv:
    """A vector environment with a time limit for each call but rendering; see :class:`VectorEnv`.

    They run in a separate thread, because a call that hangs cannot be ended, only abandoned. That costs some tens of
    microseconds a step.
    """

    def __init__(self, env: VectorEnv, seconds: float, env_id: str) -> None:
        """``seconds`` is the time limit for a call of all environments of ``env``."""
        self.num_envs = env.num_envs
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.native_spaces = env.native_spaces
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
        observation: Observation = self._call_with_limit(self._env.reset, "reset")
        return observation

    def step(self, action: np.ndarray) -> Steps:
        steps: Steps = self._call_with_limit(lambda: self._env.step(action), "step")
        return steps

    def save_state(self) -> dict[str, Any] | None:
        state: dict[str, Any] | None = self._call_with_limit(self._env.save_state, "get_state")
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self._call_with_limit(lambda: self._env.load_state(state), "set_state")

    def render(self) -> np.ndarray:
        return self._env.render()

    def close(self) -> None:
        """Close the environments unless they hang, since closing would hang as well; the thread stays if it does."""
        try:
            if not self._hangs:
                self._call_with_limit(self._env.close, "close")
        finally:  # also where an interrupt ended the wait: the thread ends once the call returns
            self._calls.put(None)
        if not self._hangs:
            self._thread.join()

    def _call_with_limit(self, call: Callable[[], Any], name: str) -> Any:
        if not self._hangs:
            self._calls.put(call)
            self._hangs = True  # reset on return: an interrupt may also end the wait
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
            f"A {name} of {self._env_id} has not returned after {self._seconds:g} seconds (env.step_timeout), so the "
            "environment hangs."
        )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put((call(), None))
            except BaseException as error:  # raised again in the calling thread
                self._answers.put((None, error))
