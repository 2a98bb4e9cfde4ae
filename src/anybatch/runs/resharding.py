"""The parts of a run in a checkpoint, and the state that one data-parallel worker restores from it.

Entries that all workers hold with the same bits are kept once, in the state of worker 0; the entries of each worker are
kept beside them. With another number of workers the environments, and the data of each, are distributed again in their
old order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anybatch.distributed.state import Slot, State, Stateful
from anybatch.errors import CheckpointError

Parts = Mapping[str, Stateful]
"""Parts of a run by the name that a checkpoint gives them."""


def state_of(parts: Parts) -> State:
    """The state of all parts of this worker."""
    return {name: part.state_dict() for name, part in parts.items()}


def worker_entries(parts: Parts, state: State) -> State:
    """The entries of :func:`state_of` that belong to this worker."""
    return {
        name: {key: value for key, value in state[name].items() if key in part.worker_keys}
        for name, part in parts.items()
        if part.worker_keys and name in state  # a checkpoint of before may have none
    }


def restore(parts: Parts, content: State, rank: int, envs_per_worker: Sequence[int]) -> list[str]:
    """Load a checkpoint into the parts of one worker.

    Args:
        parts: freshly built.
        content: ``state`` of worker 0, and ``workers``, the :func:`worker_entries` of each, if there are several.
        rank: number of the worker.
        envs_per_worker: environments of each worker now.

    Returns:
        A sentence for each thing that could not be restored.

    Raises:
        KeyError, ValueError, RuntimeError: the checkpoint is of other environments or networks.
    """
    state = content["state"]
    workers = content.get("workers") or [worker_entries(parts, state)]
    lost = []
    if len(workers) == len(envs_per_worker):
        entries = workers[rank]
    else:
        start = sum(envs_per_worker[:rank])
        slot = Slot(rank, slice(start, start + envs_per_worker[rank]))
        entries = {name: parts[name].split(parts[name].merge([w[name] for w in workers]), slot) for name in workers[0]}
        before, after = _workers(len(workers)), _workers(len(envs_per_worker))
        lost.append(
            f"the checkpoint was written by {before}, but this run has {after}: environments are redistributed, and "
            "actions are drawn with different random numbers"
        )
    for name, part in parts.items():
        if name in ("spaces", "recent") and name not in state:  # before checkpoints had them
            continue
        if name not in state:
            if name != "noise_scale":
                raise CheckpointError(
                    f"the checkpoint has no state of {name.replace('_', ' ')}, which was switched on in config.yaml: "
                    "switch it off, or begin another run with --init-from"
                )
            lost.append("the gradient noise scale is measured from here on")
            continue
        lost += part.load_state_dict({**state[name], **entries.get(name, {})}) or []
    return lost


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
