"""The interface of a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anybatch.callbacks.context import RunContext
from anybatch.distributed.state import State


class Callback:
    """Code that training calls between iterations; derive from this class and override what you need.

    With several data-parallel workers, worker 0 calls the callbacks while the others wait, however long it takes.
    Callbacks must leave the global random generators alone if the run is to be repeatable; ``run.policy()`` and
    :func:`anybatch.runs.evaluate` do. An exception ends the run with an error that names the callback.
    """

    def start(self, run: RunContext) -> None:
        """Called once before the first iteration; of a resumed run after :meth:`load_state_dict`."""

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        """Called after every iteration.

        Args:
            run: the run, to look at and to stop.
            row: the iteration's row of progress.csv, before it is written. A callback may add columns that hold
                numbers, NaN for none, best in every row; columns of others must stay as they are.
        """

    def checkpoint(self, run: RunContext, path: Path) -> None:
        """Called after a checkpoint was written to ``path``."""

    def end(self, run: RunContext) -> None:
        """Called once after the last iteration and checkpoint, or after an error (``run.error``)."""

    def state_dict(self) -> State:
        """State for checkpoints: tensors and plain values, nested in dictionaries and lists.

        A checkpoint holds it as it is after :meth:`after_iteration` of the checkpoint's iteration, so a run that is
        resumed with the same callbacks ends as one that was never stopped.
        """
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore what :meth:`state_dict` gave."""
