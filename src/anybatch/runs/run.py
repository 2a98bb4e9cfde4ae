"""A run folder: config.yaml, progress.csv, TensorBoard events and checkpoints/."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from anybatch._version import __version__
from anybatch.config import fields
from anybatch.config.io import OTHER_ENTRIES, from_dict, read_yaml, to_dict, to_yaml
from anybatch.config.schedules import CONSTANT, SCHEDULES, factor, scheduled_numbers
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import check_integer
from anybatch.diagnostics.doctor import LiveDoctor
from anybatch.distributed.collectives import (
    all_gather,
    any_worker,
    gather_to_main,
    is_main,
    on_main,
    wait_for_all,
    world_size,
)
from anybatch.distributed.state import State, Stateful, on_cpu
from anybatch.envs.registry import environment_id, is_importable
from anybatch.errors import CheckpointError, ConfigError, Interrupted, shown
from anybatch.runs import checkpoint
from anybatch.runs.edited import circumstances, differences
from anybatch.runs.files import CHECKPOINTS, CONFIG, PROGRESS, SCALING_JSON, SCALING_TABLE
from anybatch.runs.loggers import Logs, open_logs
from anybatch.runs.progress import Row, read_progress
from anybatch.runs.resharding import state_of, worker_entries
from anybatch.runs.trust import require_trust, signature
from anybatch.sampling.rollout import Sampled
from anybatch.scaling import table
from anybatch.scaling.changes import Change
from anybatch.system.atomic_files import remove_leftovers, write_text

_IN_MAIN = "__main__:"  # an import path that names something else in every program
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
_INIT_FROM = "init_from"  # an entry of config.yaml
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

    def write_config(self) -> None:
        """Write the configuration to config.yaml."""
        on_main(lambda: _write_config(self.folder, self.config, self.seed, began_from(self.folder)))

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


def create_run(
    folder: Path,
    config: TrainConfig,
    seed: int,
    *,
    quiet: bool,
    changes: Sequence[Change] = (),
    init_from: Path | None = None,
) -> Run:
    """Make a new run folder.

    Args:
        folder: the run folder.
        config: written to it, with the seed.
        seed: that of the run.
        quiet: show no progress.
        changes: how the configuration was scaled, if it was; written to the folder.
        init_from: the run folder that the state comes from, if there is one; recorded in config.yaml.

    Raises:
        ConfigError: the folder already holds a run, or cannot be written.
    """

    def make_folder() -> None:
        if _has_begun(folder):
            raise ConfigError(
                f"out is {str(folder)!r}, which already contains a run; resume it or choose another folder"
            )
        try:
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            if changes:
                write_text(folder / SCALING_TABLE, table(changes) + "\n")
                write_text(folder / SCALING_JSON, json.dumps([asdict(change) for change in changes], indent=2) + "\n")
            _write_config(folder, config, seed, init_from)
        except OSError as error:
            raise ConfigError(f"out is {str(folder)!r}, which cannot be written: {error.strerror}") from error

    on_main(make_folder)
    run = Run(folder, config, seed, quiet=quiet)
    run.open_logs()
    for sentence in _needed_again(config):
        run.message(sentence)
    return run


def _needed_again(config: TrainConfig) -> list[str]:
    """Sentences about what another process cannot find by its name in the configuration."""
    sentences = []
    if not is_importable(config.env.id):
        sentences.append(
            f"env.id is {config.env.id!r}, a callable without an import path, which resume, eval and watch cannot "
            "find in another process: pass it again in Python, with resume(run, env=...), load_policy(run, env=...) or "
            "evaluate(policy, env)"
        )
    if config.model.encoder.startswith(_IN_MAIN):
        sentences.append(
            f"model.encoder is {config.model.encoder!r}: resume, eval and watch need a program that defines it; if it "
            "is in a module, any program finds it"
        )
    return sentences


def encoder_of_this_program(config: TrainConfig) -> list[str]:
    """A sentence for a run whose encoder is looked up in this program, which may not be the one that trained it."""
    if not config.model.encoder.startswith(_IN_MAIN):
        return []
    return [f"model.encoder is {config.model.encoder!r}: the class of that name in this program is used"]


def _write_config(folder: Path, config: TrainConfig, seed: int, init_from: Path | None) -> None:
    start = {} if init_from is None else {_INIT_FROM: str(init_from.absolute())}
    write_text(folder / CONFIG, to_yaml(config, anybatch=__version__, seed=seed, **start, **signature(config)))


def began_from(folder: Path) -> Path | None:
    """The run folder in which a run found its first weights, as its config.yaml records it; None from scratch."""
    recorded = read_yaml(folder / CONFIG).get(_INIT_FROM)
    return None if recorded is None else Path(str(recorded))


def _show_past(doctor: LiveDoctor, path: Path, last_row: int) -> None:
    """Let the doctor look at the rows of a run that is resumed, whose warnings were given then."""
    with contextlib.suppress(CheckpointError, ValueError):  # rows that cannot be read are reported elsewhere
        columns = read_progress(path)
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            if row.get("iteration", math.inf) <= last_row:
                doctor.look(row)


def _has_begun(folder: Path) -> bool:
    """Whether there is something to lose; a run that found no room for its data has written its configuration alone."""
    progress = folder / PROGRESS
    return bool(checkpoint.checkpoints(folder / CHECKPOINTS)) or (progress.exists() and progress.stat().st_size > 0)


def read_config(folder: Path) -> tuple[TrainConfig, int]:
    """The configuration and seed of a run folder.

    Raises:
        CheckpointError: it is not a run folder.
    """
    path = Path(folder).expanduser() / CONFIG
    if not path.exists():
        raise CheckpointError(f"{str(folder)!r} is not a run folder: it has no readable {CONFIG}")
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ConfigError(f"it contains {shown(values)} instead of fields and sections")
        if "anybatch" not in values:
            raise ConfigError("it has no entry anybatch with the version that wrote it")
        if "seed" not in values:
            raise CheckpointError(f"{str(path)!r} has no seed: add the entry seed, an integer")
        seed = check_integer("seed", values["seed"], at_least=0)
        return from_dict({name: value for name, value in values.items() if name not in OTHER_ENTRIES}), seed
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {str(error).splitlines()[0]}") from error


def open_run(
    folder: Path,
    *,
    env: str | Callable[..., Any] | None = None,
    total_env_steps: int | None = None,
    trust_code: bool = False,
    quiet: bool,
) -> tuple[Run, dict[str, Any]]:
    """Read a run folder to continue the run; :meth:`Run.write_config` then keeps what has changed.

    Nothing that the run has written is touched before :meth:`Run.open_logs`.

    Args:
        folder: the run folder.
        env: replaces the environment of the configuration.
        total_env_steps: replaces the configuration's, and continues a run that a callback has ended.
        trust_code: import the code that the configuration names even if this user has not made the run.
        quiet: show no progress.

    Returns:
        The run, at its newest intact checkpoint, and that checkpoint's content.

    Raises:
        CheckpointError: it is not a run folder, or has no intact checkpoint.
        ConfigError: ``total_env_steps`` is not above the steps done, or the configuration names code of somebody else.
    """
    env_id = None if env is None else environment_id(env)
    if total_env_steps is not None:
        total_env_steps = check_integer("total_env_steps", total_env_steps, at_least=1)

    def read() -> tuple[TrainConfig, int, dict[str, Any], list[str]]:
        recorded, seed = read_config(folder)
        require_trust(recorded, folder / CONFIG, trust_code=trust_code, given=() if env is None else ("env.id",))
        content, passed_over = _newest_content(folder, seed)
        remove_leftovers(folder / CHECKPOINTS)
        sentences = [f"{sentence}; continuing from the previous checkpoint" for sentence in passed_over]
        sentences += [*encoder_of_this_program(recorded), *differences(content, recorded, seed)]
        config = recorded
        if total_env_steps is not None:
            if total_env_steps <= content["run"]["env_steps"]:
                raise ConfigError(
                    f"total_env_steps is {total_env_steps}, but the run has already done "
                    f"{content['run']['env_steps']} environment steps"
                )
            config = replace(config, total_env_steps=total_env_steps)
            sentences += _new_horizon(recorded, config, content["run"]["env_steps"])
        if env_id is not None and env_id != config.env.id:
            config = replace(config, env=replace(config.env, id=env_id))
            sentences += [f"env.id was {recorded.env.id!r} and is {env_id!r} from now on", *_needed_again(config)]
        return config, seed, content, sentences

    config, seed, content, sentences = on_main(read)  # the others may be on machines without this folder
    if env_id is not None:  # a callable has an id of its own in every worker
        config = replace(config, env=replace(config.env, id=env_id))
    run = Run(folder, config, seed, quiet=quiet, state=content["run"])
    if total_env_steps is not None:
        run.stopped = None
    for sentence in sentences:
        run.message(sentence)
    return run, content


def _newest_content(folder: Path, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Content of the newest intact checkpoint, and a sentence for each file that was passed over."""
    if not checkpoint.checkpoints(folder / CHECKPOINTS):
        if _has_begun(folder):
            raise CheckpointError(f"{str(folder)!r} no longer contains a checkpoint; train again with another --out")
        file, out, start = shlex.quote(str(folder / CONFIG)), shlex.quote(str(folder)), began_from(folder)
        options = "" if start is None else f" --init-from {shlex.quote(str(start))}"
        raise CheckpointError(
            f"{str(folder)!r} contains no checkpoint yet, because the run was stopped before its first one; to start "
            f"it again: anybatch train {file} --out {out} --seed {seed}{options}"
        )
    return content_of_run(folder)


def content_of_run(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Content of the newest intact checkpoint of a run folder, and a sentence for each file that was passed over.

    Raises:
        CheckpointError: there is none, or its content is not that of a run.
    """
    content, passed_over = checkpoint.load_newest(folder / CHECKPOINTS)
    run = content.get("run") if isinstance(content, dict) else None
    if not _is_state_of_run(run) or not {"seed", "state"} <= content.keys():
        raise CheckpointError(
            f"the newest checkpoint of {str(folder)!r} is not that of a run: an entry is missing or has the wrong type"
        )
    return content, passed_over


def _is_state_of_run(state: Any) -> bool:
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


def _new_horizon(before: TrainConfig, after: TrainConfig, env_steps: int) -> list[str]:
    """A sentence for each schedule, since they depend on ``total_env_steps``."""
    if after.total_env_steps == before.total_env_steps:
        return []
    old, new = (scheduled_numbers(x, min(1.0, env_steps / x.total_env_steps)) for x in (before, after))
    sentences = []
    for column, name in SCHEDULES.items():
        schedule = fields.get(after, name)
        if schedule != CONSTANT:
            sentences.append(
                f"{name} is {schedule}: with total_env_steps {after.total_env_steps:,} instead of "
                f"{before.total_env_steps:,} the {column.replace('_', ' ')} continues at {new[column]:.3g} instead of "
                f"{old[column]:.3g}, and has factor {factor(schedule, 1.0):g} at the new end; progress.csv has it in "
                f"the column {column}"
            )
    return sentences


def _of_all_workers(sampled: Sampled) -> Sampled:
    total = Sampled()
    for one in all_gather(sampled):
        total.add(one)
    return total


def _mean(values: Sequence[float] | deque[int]) -> float:
    return sum(values) / len(values) if values else float("nan")
