"""What of a checkpoint belongs to one data-parallel worker: its environments, its data and its random numbers.

A checkpoint holds what all workers share once, and these parts of each. With another number of workers the
environments, with what is kept of each, are shared out anew in their old order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
"""What a part keeps in a checkpoint."""

_RANDOM = ("shuffle", "torch", "torch_cuda")  # the last one on a GPU alone


def own_part(state: State) -> State:
    """The part of :meth:`anybatch.runs.build.Parts.state_dict` that is this worker's alone."""
    own = {name: state[name] for name in (*_RANDOM, "source") if name in state}
    if "reward_normalizer" in state:
        own["return"] = state["reward_normalizer"]["return"]
    if "auxiliary" in state:
        own["auxiliary"] = {name: x for name, x in state["auxiliary"].items() if name != "optimizer"}
    return own


def with_own_part(state: State, own: State) -> State:
    """The state that :func:`own_part` was taken from, ``state`` being another worker's."""
    result = {**state, **{name: own[name] for name in (*_RANDOM, "source") if name in own}}
    if "return" in own:
        result["reward_normalizer"] = {**state["reward_normalizer"], "return": own["return"]}
    if "auxiliary" in own:
        result["auxiliary"] = {**state["auxiliary"], **own["auxiliary"]}
    return result


def on_cpu(state: Any) -> Any:
    """The same state with its tensors in main memory."""
    if isinstance(state, dict):
        return {name: on_cpu(x) for name, x in state.items()}
    if isinstance(state, list):
        return [on_cpu(x) for x in state]
    return state.cpu() if isinstance(state, Tensor) else state


def state_of_worker(content: State, fresh: State, number: int, shares: Sequence[int]) -> tuple[State, list[str]]:
    """What a worker goes on from.

    Args:
        content: of a checkpoint.
        fresh: the worker's state as it was made, for random numbers that the checkpoint does not have.
        number: of the worker.
        shares: environments of each worker now.

    Returns:
        A state for :meth:`anybatch.runs.build.Parts.load_state_dict`, and sentences for the user.

    Raises:
        KeyError, ValueError, RuntimeError: the checkpoint is of other environments.
    """
    state = content["state"]
    workers = content.get("workers", [own_part(state)])
    if len(workers) == len(shares):
        return with_own_part(state, workers[number]), []
    own = regrouped(workers, own_part(fresh), number, shares)
    were, are = _count(len(workers)), _count(len(shares))
    return with_own_part(state, own), [
        f"the checkpoint is of {were}, and now there {'is' if len(shares) == 1 else 'are'} {are}: environments are "
        "shared out anew, and random numbers are others than they would have been"
    ]


def regrouped(workers: Sequence[State], fresh: State, number: int, shares: Sequence[int]) -> State:
    """One worker's part, from those of another number of workers.

    Args:
        workers: :func:`own_part` of each, as they were.
        fresh: that of the worker asked for, as it was made.
        number: which worker is asked for.
        shares: environments of each worker now.
    """
    start = sum(shares[:number])
    mine = slice(start, start + shares[number])
    kept = workers[number] if number < len(workers) else fresh

    def deal(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))[mine].clone()

    own = {name: kept[name] for name in _RANDOM if name in kept}
    sources = [worker["source"] for worker in workers]
    own["source"] = _source(sources, kept["source"], mine, deal)
    if "return" in workers[0]:
        own["return"] = deal([worker["return"] for worker in workers])
    if "auxiliary" in workers[0]:
        phases = [worker["auxiliary"] for worker in workers]
        segments = _segments([phase["segments"] for phase in phases], sum(shares), mine)
        own["auxiliary"] = {**phases[0], "shuffle": kept["auxiliary"]["shuffle"], "segments": segments}
    return own


def _source(sources: Sequence[State], kept: State, mine: slice, deal: Callable[[Sequence[Tensor]], Tensor]) -> State:
    if "sampler" not in sources[0]:  # Ray's workers, which are not saved
        return {}
    samplers = [source["sampler"] for source in sources]
    episodes = {name: deal([s["episodes"][name] for s in samplers]) for name in samplers[0]["episodes"]}
    sampler: State = {"env": None, "observation": None, "episodes": episodes, "generator": kept["sampler"]["generator"]}
    if "first" in sources[0]:  # sampling ahead of training: it begins anew
        return {"sampler": sampler}
    if all(s["env"] is not None and list(s["env"]) == ["envs"] for s in samplers):
        sampler["env"] = {"envs": [env for s in samplers for env in s["env"]["envs"]][mine]}
        sampler["observation"] = _deal_tree([s["observation"] for s in samplers], deal)
    source: State = {"sampler": sampler}
    if "waiting" in sources[0]:
        source["waiting"] = [
            _deal_tree(rollouts, deal) for rollouts in zip(*(s["waiting"] for s in sources), strict=True)
        ]
    return source


def _deal_tree(trees: Sequence[Any], deal: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Tensors (N, ...), or dictionaries of them; anything else is the same for all."""
    if isinstance(trees[0], dict):
        return {name: _deal_tree([tree[name] for tree in trees], deal) for name in trees[0]}
    return deal(trees) if isinstance(trees[0], Tensor) else trees[0]


def _segments(segments: Sequence[State], total_envs: int, mine: slice) -> State:
    """A phase's data (segment, environment, time) with the environments shared out anew, if the checkpoint has it."""
    first = segments[0]
    if not first["count"]:
        return first
    if not all("arrays" in one for one in segments):  # in files of the workers that there were
        return {"count": 0, "first": first["first"] + first["count"], "discarded": True}

    sizes = [len(one["arrays"]["value_target"]) for one in segments]
    num_envs = [size * total_envs // sum(sizes) for size in sizes]

    def deal(name: str) -> Tensor:
        apart = [one["arrays"][name] for one in segments]
        by_env = [x.view(first["count"], n, -1, *x.shape[1:]) for x, n in zip(apart, num_envs, strict=True)]
        return torch.cat(by_env, dim=1)[:, mine].flatten(0, 2)

    return {**first, "arrays": {name: deal(name) for name in first["arrays"]}}


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"
