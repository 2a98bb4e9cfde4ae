"""A run while it trains: its counters, the rows of its log, and its checkpoints."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from anybatch.config.io import to_dict
from anybatch.config.schedules import scheduled_numbers
from anybatch.config.schema import TrainConfig
from anybatch.diagnostics.doctor import LiveDoctor
from anybatch.distributed.collectives import (
    all_gather,
    any_worker,
    gather_to_main,
    is_main,
    wait_for_all,
    world_size,
)
from anybatch.distributed.state import State, Stateful, on_cpu
from anybatch.errors import CheckpointError, Interrupted
from anybatch.runs import checkpoint
from anybatch.runs.edited import circumstances
from anybatch.runs.files import CHECKPOINTS, DIVERGED, PROGRESS
from anybatch.runs.loggers import Logs, open_logs
from anybatch.runs.progress import Row, read_progress
from anybatch.runs.resharding import state_of, worker_entries
from anybatch.sampling.rollout import Sampled

_LONG_ITERATION_SECONDS = 1.5  # below the patience of a stop request
_COUNTERS: dict[str, Any] = {
    **dict.fromkeys(("iteration", "env_steps", "gradient_steps", "episodes"), int),
    **{"seconds": int | float, "returns": list, "lengths": list, "row": dict | None},
}
_LATER: dict[str, Any] = {
    "info": dict,
    "stopped": str | None,
    "callbacks": dict,
    "open_seconds": float,
}
"""Entries that checkpoints of before do not have."""
_WINDOWS = {"mean_episode_return": 100, "mean_episode_return_400": 400}


class Hooks(Protocol):
    """Callbacks as a run calls them, on all workers; see :class:`anybatch.callbacks.calls.Callbacks`."""

    repeatable: bool

    def after_iteration(self, row: Row) -> None: ...

    def checkpoint(self, path: Path | None) -> None: ...

    def state_dict(self) -> State: ...


class Run:
    """A run's folder, its counters, its log and its checkpoints."""

    hooks: Hooks | None = None
    """Called after each iteration and checkpoint."""
    stopped: str | None = None
    """Reason for which a callback has ended the run; None if none has."""

    def __init__(
        self, folder: Path, config: TrainConfig, seed: int, *, quiet: bool, state: State | None = None
    ) -> None:
        """Begin, or continue from ``state``, which :meth:`state_dict` gave, in an existing run folder."""
        self.folder = folder
        self.config = config
        self.seed = seed
        self.iteration = 0
        self.env_steps = 0
        self.gradient_steps = 0
        self.episodes = 0
        self.seconds = 0.0
        self._seconds_before = 0.0  # of the open iteration, before the run was resumed
        self._row: Row | None = None
        self._returns: deque[float] = deque(maxlen=max(_WINDOWS.values()))
        self._lengths: deque[int] = deque(maxlen=min(_WINDOWS.values()))
        self._info = {key: deque[float](maxlen=min(_WINDOWS.values())) for key in config.env.info_keys}
        if state is not None:
            self._load_state_dict(state)
        self._quiet = quiet
        self._doctor = None if quiet else LiveDoctor(config)
        self._logs: Logs | None = None
        self.start_clock()
        self._checkpoint_at = time.monotonic()

    def open_logs(self) -> None:
        """Open progress.csv and the other logs; rows beyond the checkpoint of a resumed run are moved aside."""
        if not is_main():
            return
        (self.folder / DIVERGED).unlink(missing_ok=True)
        config, last_row = self.config, self.iterations_completed
        if self._doctor is not None and last_row:
            _show_past(self._doctor, self.folder / PROGRESS, last_row)
        self._logs = open_logs(
            self.folder,
            config.log,
            config.total_env_steps,
            quiet=self._quiet,
            resume_after=last_row,
            recorded={**to_dict(config), "seed": self.seed},
        )

    def start_clock(self) -> None:
        """Count the time from here on: making environments and networks is no part of an iteration."""
        self._clock = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether the environment steps of the configuration are done, or a callback has ended the run."""
        return self.stopped is not None or self.env_steps >= self.config.total_env_steps

    @property
    def progress(self) -> float:
        """Fraction of the environment steps that is done, 0 to 1."""
        return min(1.0, self.env_steps / self.config.total_env_steps)

    @property
    def iteration_is_open(self) -> bool:
        """Whether :meth:`end_iteration` has to follow; also after resuming inside an auxiliary phase."""
        return self._row is not None

    @property
    def iterations_completed(self) -> int:
        """Iterations whose rows are written."""
        return self.iteration - self.iteration_is_open

    @property
    def checkpoint_due(self) -> bool:
        """Whether the time between checkpoints has passed."""
        return time.monotonic() - self._checkpoint_at >= self.config.checkpoint_seconds

    @property
    def mean_episode_return(self) -> float:
        """Mean raw return of the last 100 episodes; NaN if none has ended."""
        return _mean(list(self._returns)[-100:])

    def record(self, statistics: Mapping[str, float], sampled: Sampled) -> None:
        """Count an iteration, and prepare its row of progress.csv.

        Args:
            statistics: columns besides the counters.
            sampled: environment steps and ended episodes of this worker since the last iteration; those of the other
                workers are added.
        """
        sampled = _of_all_workers(sampled)
        numbers = scheduled_numbers(self.config, self.progress)
        self.iteration += 1
        self.env_steps += sampled.env_steps
        self.gradient_steps += int(statistics["gradient_steps"])
        self.episodes += len(sampled.episode_returns)
        self._returns.extend(sampled.episode_returns)
        self._lengths.extend(sampled.episode_lengths)
        for key, window in self._info.items():
            window.extend(sampled.episode_info.get(key, []))
        recent = list(self._returns)
        self._row = {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "seconds": math.nan,
            "env_steps_per_second": sampled.env_steps,
            **{name: _mean(recent[-window:]) for name, window in _WINDOWS.items()},
            "mean_episode_length": _mean(self._lengths),
            "episodes": self.episodes,
            **{f"info_{key}": _mean([x for x in window if x == x]) for key, window in self._info.items()},
            **statistics,
            "gradient_steps": self.gradient_steps,
            **{name: statistics.get(name, number) for name, number in numbers.items()},  # it can follow the KL
        }

    def end_iteration(self, parts: Mapping[str, Stateful], timings: Mapping[str, float]) -> None:
        """Write the row of the iteration, and a checkpoint if one is due.

        Args:
            parts: objects that a checkpoint keeps besides this one.
            timings: seconds that each phase of the iteration took, by column.
        """
        assert self._row is not None
        now = time.monotonic()
        elapsed = self._count_seconds(now)
        if math.isnan(self._row["seconds"]):  # else the hooks were interrupted, and the times before them are there
            speed = round(self._row["env_steps_per_second"] / elapsed, 1) if elapsed > 0 else 0.0
            self._row |= {"seconds": round(self.seconds, 3), "env_steps_per_second": speed}
            self._row |= {name: round(seconds, 4) for name, seconds in timings.items()}
        row = dict(self._row)
        if self.hooks is not None:
            self._call_hooks(self.hooks, row, parts)
            self._count_seconds(time.monotonic())
        self._row = None
        if self._logs is not None:
            if gone := self._logs.columns_without(row):
                self.message(f"{PROGRESS} has columns that will be empty from now on: {', '.join(gone)}")
            self._logs.write(row)
            for finding in self._doctor.look(row) if self._doctor else ():
                self.message(str(finding))
        # a long iteration may be abandoned by a stop request, so the work before it is always kept
        long = self._clock - now + elapsed >= _LONG_ITERATION_SECONDS
        if any_worker(is_main() and (self.checkpoint_due or long)):
            self.save(parts)

    def _call_hooks(self, hooks: Hooks, row: Row, parts: Mapping[str, Stateful]) -> None:
        try:
            hooks.after_iteration(row)
        except Interrupted:
            if hooks.repeatable:  # the iteration stays open, and a resumed run ends it
                self.save(parts)
            raise

    def _count_seconds(self, now: float) -> float:
        elapsed = now - self._clock + self._seconds_before
        self.seconds += elapsed
        self._clock, self._seconds_before = now, 0.0
        return elapsed

    def save(self, parts: Mapping[str, Stateful]) -> None:
        """Write a checkpoint; all workers call this at the same point, each with its own parts."""
        self._checkpoint_at = time.monotonic()
        state = state_of(parts)
        entries = worker_entries(parts, state)
        # tensors of other GPUs would be allocated on that of worker 0
        workers, path = gather_to_main(on_cpu(entries) if world_size() > 1 else entries), None
        if workers is not None:
            content = {"run": self.state_dict(), "seed": self.seed, "state": state, **circumstances(self.config)}
            if len(workers) > 1:  # else the state has everything
                content["workers"] = workers
            folder, keep = self.folder / CHECKPOINTS, self.config.keep_checkpoints
            path = checkpoint.save(folder, self.iterations_completed, content, keep)
        wait_for_all()
        if self.hooks is not None:
            self.hooks.checkpoint(path)

    def state_dict(self) -> State:
        """Counters, recent episodes, and the row of an iteration that has not ended."""
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "gradient_steps": self.gradient_steps,
            "episodes": self.episodes,
            "seconds": self.seconds,
            "open_seconds": self._seconds_before + time.monotonic() - self._clock if self.iteration_is_open else 0.0,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "row": None if self._row is None else dict(self._row),
            "info": {key: list(numbers) for key, numbers in self._info.items()},
            "stopped": self.stopped,
            "callbacks": {} if self.hooks is None else self.hooks.state_dict(),
        }

    def _load_state_dict(self, state: State) -> None:
        self.iteration, self.env_steps = state["iteration"], state["env_steps"]
        self.gradient_steps, self.episodes, self.seconds = state["gradient_steps"], state["episodes"], state["seconds"]
        self._returns.extend(state["returns"])
        self._lengths.extend(state["lengths"])
        self._row = state["row"]
        self._seconds_before = state.get("open_seconds", 0.0)
        self.stopped = state.get("stopped")  # checkpoints of before have none
        for key, numbers in state.get("info", {}).items():
            if key in self._info:
                self._info[key].extend(numbers)

    def message(self, text: str) -> None:
        """Print a line for the user."""
        if is_main():
            print(text, file=sys.stderr, flush=True)

    def inform(self, text: str) -> None:
        """Print a line unless the run is quiet."""
        if not self._quiet:
            self.message(text)

    def show_status(self, text: str) -> None:
        """Show the current activity, between two rows."""
        if self._logs is not None:
            self._logs.note(text)

    def close(self) -> None:
        """Flush and close the logs."""
        if self._logs is not None:
            self._logs.close()


def _show_past(doctor: LiveDoctor, path: Path, last_row: int) -> None:
    """Let the doctor look at the rows of a run that is resumed, whose warnings were given then."""
    with contextlib.suppress(CheckpointError, ValueError):  # rows that cannot be read are reported elsewhere
        columns = read_progress(path)
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            if row.get("iteration", math.inf) <= last_row:
                doctor.look(row)


def is_state_of_run(state: Any) -> bool:
    """Whether a checkpoint's entry has the form of :meth:`Run.state_dict`."""
    if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in _COUNTERS.items()):
        return False
    if not all(isinstance(state[name], kind) for name, kind in _LATER.items() if name in state):
        return False
    row, lists = state["row"], [state["returns"], state["lengths"], *state.get("info", {}).values()]
    return (
        all(state[name] >= 0 for name, kind in _COUNTERS.items() if kind is int)
        and all(isinstance(x, list) and all(isinstance(number, int | float) for number in x) for x in lists)
        and (row is None or {"iteration", "env_steps_per_second"} <= row.keys())
    )


def _of_all_workers(sampled: Sampled) -> Sampled:
    total = Sampled()
    for one in all_gather(sampled):
        total.add(one)
    return total


def _mean(values: Sequence[float] | deque[int]) -> float:
    return sum(values) / len(values) if values else float("nan")
