"""A run as its callbacks see it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from anybatch.config.schema import TrainConfig
from anybatch.runs.build import Components
from anybatch.runs.evaluation import LoadedPolicy
from anybatch.runs.run import Run


class RunContext:
    """A run in progress: what it is, how far it is, its policy, and the request to stop."""

    resumed: bool
    """Whether the run continues from a checkpoint."""
    stop_reason: str | None
    """The argument of the first :meth:`stop`; None while there was none."""
    error: BaseException | None
    """In :meth:`Callback.end`: the exception that ended training; None after an orderly end."""

    def __init__(self, run: Run, components: Components, *, resumed: bool) -> None:
        """Training makes one for each run."""
        self._run = run
        self._components = components
        self.resumed = resumed
        self.stop_reason: str | None = run.stopped
        self.error: BaseException | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._run.folder

    @property
    def config(self) -> TrainConfig:
        """The run's configuration."""
        return self._run.config

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self._run.seed

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._run.iteration

    @property
    def env_steps(self) -> int:
        """Environment steps done, over all environments."""
        return self._run.env_steps

    @property
    def finished(self) -> bool:
        """Whether the environment steps of the configuration are done, or a callback has asked to stop."""
        return self.stop_reason is not None or self._run.finished

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return self._components.learner.device

    def policy(self) -> LoadedPolicy:
        """A copy of the policy as it is now, which training does not change and which does not change training."""
        learner = self._components.learner
        agent = copy.deepcopy(learner.agent).requires_grad_(False).eval()
        return LoadedPolicy(agent, self.config, learner.device, *self._components.env.native_spaces)

    def stop(self, reason: str) -> None:
        """End the run in an orderly way after this iteration, with a checkpoint and exit code 0.

        Args:
            reason: for the user, such as "return 475 reached"; kept in the result of training and in the checkpoint.
        """
        if self.stop_reason is None:
            self.stop_reason = str(reason)

    def message(self, text: str) -> None:
        """Print a line for the user."""
        self._run.message(text)

    def show_status(self, text: str) -> None:
        """Show a text as the run's progress until the next row."""
        self._run.show_status(text)
