"""Logs of a run: progress.csv, TensorBoard events, Weights & Biases, and the display of its progress.

Every sink gets one row per iteration, a dictionary from column to number, with `write(row)`, and ends with `close()`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from anybatch.config.schema import LogConfig
from anybatch.errors import AnybatchError, install_command
from anybatch.runs.files import PROGRESS
from anybatch.runs.progress import ProgressLog, Row, as_text, read_progress
from anybatch.system import atomic_files as atomic
from anybatch.system.display import Display


class Sink(Protocol):
    """Destination of rows."""

    def write(self, row: Row) -> None:
        """Write the row of one iteration."""

    def close(self) -> None:
        """Flush and release resources; a second call does nothing."""


class TensorBoardLog:
    """One TensorBoard scalar per column, against environment steps, in the folder `tensorboard` of the run."""

    def __init__(self, run_dir: Path, *, purge_step: int | None = None) -> None:
        """Open the events file. Events from `purge_step` on, in a run that is resumed, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = Path(run_dir) / "tensorboard"
        self._hook = threading.excepthook
        threading.excepthook = self._in_thread
        self._writer: Any = SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)

    def write(self, row: Row) -> None:
        """Write the numbers of the row that are not missing."""
        with atomic.naming(self._folder):
            for column, value in row.items():
                if column != "env_steps" and as_text(value):
                    self._writer.add_scalar(column, float(value), global_step=int(row["env_steps"]))

    def close(self) -> None:
        """Flush and close the events file."""
        if threading.excepthook == self._in_thread:
            threading.excepthook = self._hook
        with atomic.naming(self._folder):
            self._writer.close()

    def _in_thread(self, failure: Any) -> None:
        """Leave errors of TensorBoard's thread to the next call, which raises them again, without a second report."""
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__name__ == "_AsyncWriterThread"):
            self._hook(failure)


class WandbLog:
    """A Weights & Biases run with the run's configuration, which is continued when the run is resumed."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb

            # a folder called wandb beside the program can be imported, too, as an empty package
            start, refused = wandb.init, wandb.errors.Error
        except (ImportError, AttributeError):
            raise AnybatchError(
                f"Logging to Weights & Biases needs wandb: {install_command('wandb')}, or omit --log.wandb."
            ) from None
        identity = Path(run_dir) / "wandb-id.txt"
        if not identity.exists():
            atomic.write_text(identity, secrets.token_hex(4) + "\n")
        try:
            self._run: Any = start(
                project=project,
                name=Path(run_dir).resolve().name,
                id=identity.read_text().strip(),
                dir=str(run_dir),
                resume="allow",
                config=dict(config),
                allow_val_change=True,  # config.yaml may have been edited since
            )
        except refused as error:
            raise AnybatchError(
                f"Weights & Biases cannot be started: {str(error).splitlines()[0]}; with WANDB_MODE=offline in the "
                "environment it writes to the run folder, and `wandb sync` uploads that later"
            ) from error
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, row: Row) -> None:
        """Log the row; the horizontal axis is environment steps."""
        numbers = {column: float(value) for column, value in row.items() if as_text(value)}
        self._try(lambda run: run.log(numbers))

    def close(self) -> None:
        """Finish the run."""
        self._try(lambda run: run.finish())

    def _try(self, call: Callable[[Any], object]) -> None:
        """Training does not end because Weights & Biases fails: then nothing more is sent."""
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:
            self._run = None
            reason = (str(error).splitlines() or [""])[0]
            warnings.warn(
                f"Weights & Biases failed ({type(error).__name__}: {reason}): the run continues without it; "
                "progress.csv has every row",
                stacklevel=2,
            )


class ProgressDisplay:
    """Progress, environment steps per second, mean return, time so far and time left, on standard error."""

    def __init__(self, total_env_steps: int, *, start_env_steps: int = 0) -> None:
        self._display = Display(total_env_steps, "steps", done=start_env_steps)
        self._evaluated = ""

    def write(self, row: Row) -> None:
        """Move on to the row's environment steps."""
        shown = as_text(row.get("mean_episode_return"))
        if as_text(row.get("eval_return")):
            self._evaluated = f"  evaluation {float(row['eval_return']):.2f}"
        mean_return = f"{float(shown):.2f}" if shown else "-"
        self._display.update(int(row["env_steps"]), f"return {mean_return}{self._evaluated}")

    def note(self, text: str) -> None:
        """Show a text while no environment steps are made; the next row replaces it."""
        self._display.note(text)

    def close(self) -> None:
        """Release the terminal."""
        self._display.close()


class Logs:
    """All sinks of a run as one."""

    def __init__(self, sinks: Iterable[Sink], columns: Iterable[str] = ()) -> None:
        """``columns`` are those of a progress.csv to which a resumed run appends."""
        self._sinks = list(sinks)
        self._earlier = list(columns)

    def columns_without(self, row: Row) -> list[str]:
        """Columns of the rows before this run was resumed that its first row does not have; later none."""
        return [column for column in self._earlier if column not in row]

    def write(self, row: Row) -> None:
        """Write the row to every sink, progress.csv first."""
        self._earlier = []
        for sink in self._sinks:
            sink.write(row)

    def note(self, text: str) -> None:
        """Show a text as the progress until the next row."""
        for sink in self._sinks:
            if isinstance(sink, ProgressDisplay):
                sink.note(text)

    def close(self) -> None:
        """Close every sink, even if closing one of them fails."""
        with contextlib.ExitStack() as stack:
            while self._sinks:
                stack.callback(self._sinks.pop(0).close)

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_logs(
    run_dir: Path,
    config: LogConfig,
    total_env_steps: int,
    quiet: bool = False,
    *,
    resume_after: int | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> Logs:
    """Open the sinks of a configuration in the run's folder.

    `recorded` is what Weights & Biases shows as the run's configuration.
    `resume_after` is the last iteration that a resumed run keeps, or None for none. Later rows are moved from
    progress.csv to progress-lost.csv, and later TensorBoard events are hidden.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:  # closes the sinks that are open if opening another one fails

        def keep(sink: Sink) -> Sink:
            opened.callback(sink.close)
            return sink

        progress = ProgressLog(run_dir / PROGRESS)
        sinks = [keep(progress)]
        redone = progress.truncate_after(resume_after or 0)
        earlier = read_progress(progress.path)
        env_steps = int(max(earlier.get("env_steps", []), default=0))
        if config.wandb:
            sinks.append(keep(WandbLog(run_dir, config.wandb_project, recorded or {})))
        if config.tensorboard:
            sinks.append(keep(TensorBoardLog(run_dir, purge_step=env_steps + 1 if redone or env_steps else None)))
        if not quiet:
            sinks.append(keep(ProgressDisplay(total_env_steps, start_env_steps=env_steps)))
        opened.pop_all()
    return Logs(sinks, earlier)
