"""Distributing the environments of a checkpoint over another number of workers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch

from anybatch.distributed.collectives import envs_per_worker
from anybatch.distributed.state import RandomState, Slot, State, Stateful
from anybatch.models.actions import ActionSpec
from anybatch.normalize import RewardNormalizer
from anybatch.phase_storage.store import SegmentStore
from anybatch.sampling.replay import RecentBatches
from anybatch.sampling.rollout import Sampler
from anybatch.sampling.sources import Delayed, Synchronous
from anybatch.sampling.threaded import Asynchronous
from anybatch.system.signals import Interrupts

SEGMENTS, STEPS, ENVS = 2, 3, 5


def generator(number: int) -> torch.Tensor:
    return torch.Generator().manual_seed(number).get_state()


FRESH = generator(99)  # of a worker that the checkpoint does not know


def sampler() -> Sampler:
    spec = ActionSpec(gymnasium.spaces.Discrete(2))
    env: Any = SimpleNamespace(num_envs=1)
    return Sampler(env, spec, bootstrap_truncated=True, generator=torch.Generator().manual_seed(99))


def sampler_state(envs: list[int], number: int, *, savable: bool = True) -> State:
    x = torch.tensor(envs, dtype=torch.float64)
    return {
        "env": {"envs": [{"number": env} for env in envs]} if savable else None,
        "observation": {"a": torch.stack([x, -x], dim=1)} if savable else None,
        "episodes": {"returns": x + 0.5, "first": x > 2},
        "generator": generator(number),
    }


def segments_state(envs: list[int], number: int) -> State:
    # (segment, environment, time), each sample telling all three
    samples = torch.tensor([100 * s + 10 * e + t for s in range(SEGMENTS) for e in envs for t in range(STEPS)])
    arrays = {"observation0": torch.stack([samples, samples], dim=1), "value_target": samples}
    return {"count": SEGMENTS, "first": 4, "discarded": False, "arrays": arrays}


def segment_store() -> SegmentStore:
    store = SegmentStore.__new__(SegmentStore)
    store.layout = SimpleNamespace(steps=STEPS)  # type: ignore[assignment]
    return store


def waiting_state(envs: list[int], number: int) -> State:
    rollout = {"reward": torch.tensor(envs, dtype=torch.float64).view(-1, 1), "version": 7}
    return {"sampler": sampler_state(envs, number), "waiting": [rollout]}


def recent_state(envs: list[int], number: int) -> State:
    x = torch.tensor(envs, dtype=torch.float64).view(-1, 1)
    return {"batches": [{"advantage": x + 10 * age, "observation": {"a": x}, "state": None} for age in range(2)]}


PARTS: dict[str, tuple[Callable[[], Any], Callable[[list[int], int], State]]] = {
    "reward normalizer": (
        lambda: RewardNormalizer(1),
        lambda envs, number: {"return": torch.tensor(envs, dtype=torch.float64) + 0.25},
    ),
    "random numbers": (
        lambda: RandomState(torch.Generator().manual_seed(99)),
        lambda envs, number: {"generator": generator(number)},
    ),
    "synchronous source": (
        lambda: Synchronous(lambda _: pytest.fail("samples"), sampler()),
        lambda envs, number: {"sampler": sampler_state(envs, number)},
    ),
    "delayed source": (
        lambda: Delayed(lambda _: pytest.fail("samples"), sampler(), 1, torch.device("cpu")),
        waiting_state,
    ),
    "passes to come": (lambda: RecentBatches(2), recent_state),
    "segments": (segment_store, segments_state),
}


def of_workers(envs_per_worker: list[int], state: Callable[[list[int], int], State]) -> list[State]:
    starts = [sum(envs_per_worker[:i]) for i in range(len(envs_per_worker))]
    return [
        state(list(range(start, start + count)), number)
        for number, (start, count) in enumerate(zip(starts, envs_per_worker, strict=True))
    ]


def with_fresh_generator(state: Any, is_new: bool) -> Any:
    """The expected state: a worker that the checkpoint does not know keeps its own random numbers."""
    if isinstance(state, dict):
        return {
            key: FRESH if key == "generator" and is_new else with_fresh_generator(x, is_new) for key, x in state.items()
        }
    return state


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def slot(envs_per_worker: list[int], rank: int) -> Slot:
    start = sum(envs_per_worker[:rank])
    return Slot(rank, slice(start, start + envs_per_worker[rank]))


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (1, 4)])
def test_environments_keep_their_order_and_their_data(name: str, before: int, after: int) -> None:
    make, state = PARTS[name]
    part: Stateful = make()
    merged = part.merge(of_workers(envs_per_worker(ENVS, before), state))
    for rank, expected in enumerate(of_workers(envs_per_worker(ENVS, after), state)):
        got = part.split(merged, slot(envs_per_worker(ENVS, after), rank))
        assert equal(got, with_fresh_generator(expected, rank >= before))


def test_environments_that_cannot_be_saved_start_anew() -> None:
    part = sampler()
    states = of_workers([3, 2], lambda envs, number: sampler_state(envs, number, savable=False))
    got = part.split(part.merge(states), Slot(0, slice(0, 5)))
    assert got["env"] is None and got["observation"] is None
    assert len(got["episodes"]["returns"]) == 5


def test_segments_in_files_of_other_workers_are_discarded() -> None:
    states = of_workers([3, 2], segments_state)
    for state in states:
        del state["arrays"]
    store = segment_store()
    got = store.split(store.merge(states), Slot(0, slice(0, 5)))
    assert got == {"count": 0, "first": 4 + SEGMENTS, "discarded": True}


def test_sampling_ahead_of_training_starts_anew() -> None:
    states = of_workers([3, 2], waiting_state)
    agent: Any = torch.nn.Identity()
    source = Asynchronous(
        lambda *_: pytest.fail("samples"),
        sampler(),
        agent,
        max_lag=1,
        deterministic=True,
        interrupts=Interrupts(),
        device=torch.device("cpu"),
    )
    got = source.split(source.merge([{**state, "first": 0, "current": 3} for state in states]), Slot(0, slice(0, 5)))
    assert got.keys() == {"sampler"} and got["sampler"]["env"] is None
