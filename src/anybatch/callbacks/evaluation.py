"""Evaluation while training, the best policy so far, and an end at a return."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybatch.callbacks.callback import Callback
from anybatch.callbacks.context import RunContext
from anybatch.config.schema import EnvConfig, EvalConfig
from anybatch.distributed.random_state import separate_random_states
from anybatch.distributed.state import State
from anybatch.envs.base import close_env
from anybatch.envs.factory import make
from anybatch.envs.registry import given_environments
from anybatch.errors import CheckpointError, ConfigError
from anybatch.runs import checkpoint
from anybatch.runs.build import stream_seed
from anybatch.runs.evaluation import check_spaces, evaluate
from anybatch.runs.files import BEST, CHECKPOINTS
from anybatch.runs.saved_spaces import SavedSpaces

_MAX_ENVS = 64
_CUT = "eval_unfinished"
_COLUMNS = ("eval_return", "eval_return_stderr", "eval_length")


class PeriodicEvaluation(Callback):
    """Evaluates the policy at multiples of a number of environment steps: when an iteration ends at or beyond one.

    The number of episodes is fixed and the same for every batch size, so the returns have none of the delay of
    ``mean_episode_return``, which counts an episode when it ends. Actions are sampled as in training; observations are
    normalised by the training's statistics, which evaluation does not change. Environments and seeds are separate, and
    new each time: training with and without evaluation gives the same bytes.

    It adds the columns ``eval_return``, ``eval_return_stderr`` (standard error), ``eval_length``, ``eval_info_KEY`` for
    the keys of ``env.info_keys``, ``eval_unfinished`` (with ``max_steps``), and ``seconds_evaluation``.
    """

    def __init__(self, config: EvalConfig) -> None:
        """``config.every`` must not be None."""
        assert config.every is not None
        self._config, self._every = config, config.every
        self._env_steps: int | None = None  # at the end of the iteration before
        self._has_told = False

    def start(self, run: RunContext) -> None:
        if self._env_steps is None:
            self._env_steps = run.env_steps
        env = self._env(run)
        if given_environments(env.id) is not None:
            raise ConfigError(
                f"eval.every needs environments in addition to those of training, but {env.id} was "
                "passed as an object: pass a function that creates it"
            )
        if self._every > run.config.total_env_steps:
            run.message(
                f"no evaluation will run: eval.every is {self._every:,}, and total_env_steps is "
                f"{run.config.total_env_steps:,}"
            )
        with separate_random_states(0, run.device):  # an environment that cannot be made is reported at once
            games = make(env, 1, 0)
            try:
                check_spaces(run.policy(), games, env.id)
            finally:
                close_env(games)

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        assert self._env_steps is not None
        number, start = run.env_steps // self._every, time.perf_counter()
        names = [*_COLUMNS, *(f"eval_info_{key}" for key in run.config.env.info_keys)]
        columns = dict.fromkeys(names if self._config.max_steps is None else [*names, _CUT], math.nan)
        if number > self._env_steps // self._every:
            columns |= self._evaluate(run, number)
        row |= {**columns, "seconds_evaluation": round(time.perf_counter() - start, 4)}
        self._env_steps = run.env_steps

    def end(self, run: RunContext) -> None:
        self._env_steps = None  # the object may be used for another run

    def _evaluate(self, run: RunContext, number: int) -> dict[str, float]:
        """Columns of one evaluation, the ``number``-th."""
        config, seed = self._config, stream_seed(run.seed, "evaluation", 0, number)
        env = self._env(run)
        with separate_random_states(seed, run.device):
            result = evaluate(
                run.policy(),
                env,
                config.episodes,
                seed,
                min(config.episodes, _MAX_ENVS) if config.num_envs is None else config.num_envs,
                config.max_steps,
                progress=lambda ended: run.show_status(f"evaluation: {ended:,} of {config.episodes:,} episodes"),
            )
        numbers = (result.mean, result.standard_error, result.mean_length)
        columns = dict(zip(_COLUMNS, numbers, strict=True))
        columns |= {f"eval_info_{key}": result.mean_info(key) for key in env.info_keys}
        if config.max_steps is None:
            return columns
        if result.unfinished and not self._has_told:
            run.message(
                f"eval.max_steps cut {result.unfinished} of {config.episodes} episodes: evaluations with cut episodes "
                "do not count for eval.keep_best, eval.stop_at and pruning, because complete episodes are the short "
                "ones"
            )
            self._has_told = True
        return {**columns, _CUT: result.unfinished}

    def _env(self, run: RunContext) -> EnvConfig:
        trained = run.config.env
        return replace(trained, options={**trained.options, **self._config.options})

    def state_dict(self) -> State:
        return {} if self._env_steps is None else {"env_steps": self._env_steps}

    def load_state_dict(self, state: State) -> None:
        self._env_steps = state["env_steps"]


class KeepBest(Callback):
    """Keeps the policy of the row with the highest number in a column, the first of equal ones.

    It is in the file ``checkpoints/best.ckpt`` of the run folder, which ``load_policy(run, best=True)`` and
    ``anybatch eval RUN --best`` read. A run keeps one best policy: ``eval.keep_best false`` leaves it to a callback of
    the user.
    """

    def __init__(self, column: str = "eval_return") -> None:
        """``column``: of progress.csv; rows in which it is empty do not count."""
        self._column = column
        self._best = -math.inf

    def start(self, run: RunContext) -> None:
        self._best, path = -math.inf, self._path(run)  # the object may have been used for another run
        if not run.resumed:
            path.unlink(missing_ok=True)
        elif path.exists():
            replaced = f"the next policy with a number in the column {self._column} replaces it"
            try:
                content = checkpoint.load(path)
                if content["column"] == self._column:
                    self._best = content["value"]
                else:
                    run.message(f"{path} contains the best policy by the column {content['column']}: {replaced}")
            except (CheckpointError, KeyError, TypeError) as error:
                run.message(f"the best policy so far cannot be read, and {replaced}: {error}")

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        value = value_of(row, self._column)
        if not value > self._best:  # NaN included
            return
        self._best, policy = value, run.policy()
        spaces = SavedSpaces((policy.observation_space, policy.action_space), run.config.env.id)
        state = {"spaces": spaces.state_dict(), "agent": policy.agent.state_dict()}
        about = {"iteration": run.iteration, "env_steps": run.env_steps, "column": self._column, "value": value}
        checkpoint.write(self._path(run), {**about, "state": state})

    @staticmethod
    def _path(run: RunContext) -> Path:
        return run.folder / CHECKPOINTS / BEST


class StopAt(Callback):
    """Ends the run when a column reaches a number."""

    def __init__(self, number: float, column: str = "eval_return") -> None:
        """``column``: of progress.csv, ``mean_episode_return`` for example; rows in which it is empty do not count."""
        self._number, self._column = number, column

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        value = value_of(row, self._column)
        if value >= self._number:
            run.stop(f"{self._column} is {value:.4g}, at least {self._number:g}")


def value_of(row: dict[str, Any], column: str) -> float:
    """The number of a column; NaN if it is empty, or of an evaluation in which episodes were cut.

    The complete episodes of such an evaluation are the short ones: only successes, or only failures.

    Raises:
        ConfigError: there is no such column.
    """
    if column not in row:
        raise ConfigError(f"there is no column {column!r}; the columns are {', '.join(row)}")
    cut = column.startswith("eval_") and column != _CUT and (row.get(_CUT) or 0) > 0
    return math.nan if cut or row[column] is None else float(row[column])
