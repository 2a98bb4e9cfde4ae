"""Sharing the environments of a checkpoint out to another number of workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anybatch.distributed.collectives import envs_per_worker
from anybatch.runs.resharding import regrouped

SEGMENTS, STEPS = 2, 3


def worker(envs: list[int], number: int, *, savable: bool = True) -> dict[str, Any]:
    """The part of a worker whose environments have these numbers."""
    x = torch.tensor(envs, dtype=torch.float64)
    # (segment, environment, time), each sample telling all three
    samples = torch.tensor([100 * s + 10 * e + t for s in range(SEGMENTS) for e in envs for t in range(STEPS)])
    sampler = {
        "env": {"envs": [{"number": env} for env in envs]} if savable else None,
        "observation": {"a": torch.stack([x, -x], dim=1)} if savable else None,
        "episodes": {"returns": x + 0.5, "first": x > 2},
        "generator": torch.tensor([number]),
    }
    return {
        "shuffle": torch.tensor([number]),
        "torch": torch.tensor([number]),
        "return": x + 0.25,
        "source": {"sampler": sampler, "waiting": [{"reward": x.view(-1, 1), "version": 7}]},
        "auxiliary": {
            "shuffle": torch.tensor([number]),
            "steps": 5,
            "segments": {
                "count": SEGMENTS,
                "first": 4,
                "discarded": False,
                "arrays": {"observation0": torch.stack([samples, samples], dim=1), "value_target": samples},
            },
        },
    }


def together(parts: list[int], **how: Any) -> list[dict[str, Any]]:
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return [
        worker(list(range(a, a + n)), number, **how) for number, (a, n) in enumerate(zip(starts, parts, strict=True))
    ]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (1, 4)])
def test_environments_keep_their_order_and_their_data(before: int, after: int) -> None:
    old, new = together(envs_per_worker(5, before)), together(envs_per_worker(5, after))
    for number in range(after):
        fresh = {**new[number], "return": None, "source": new[number]["source"]}
        got = regrouped(old, fresh, number, envs_per_worker(5, after))
        assert equal(got, new[number])  # random numbers: the old ones where there are any, which are told by number
        for one in (*old, fresh, new[number]):
            one.pop("return", None)  # as without a reward normaliser
        assert equal(regrouped(old, fresh, number, envs_per_worker(5, after)), new[number])
        old = together(envs_per_worker(5, before))


def test_environments_that_cannot_be_saved_start_anew() -> None:
    got = regrouped(together([3, 2], savable=False), worker([0], 0), 0, [5])
    assert got["source"]["sampler"]["env"] is None and got["source"]["sampler"]["observation"] is None
    assert len(got["return"]) == 5


def test_segments_in_files_of_other_workers_are_given_up() -> None:
    old = together([3, 2])
    for one in old:
        del one["auxiliary"]["segments"]["arrays"]
    got = regrouped(old, worker([0], 0), 0, [5])
    assert got["auxiliary"]["segments"] == {"count": 0, "first": 4 + SEGMENTS, "discarded": True}


def test_sampling_ahead_of_training_begins_anew() -> None:
    old = together([3, 2])
    for one in old:
        one["source"] = {**one["source"], "first": 0, "current": 3, "published": {}}
    assert regrouped(old, worker([0], 0), 0, [5])["source"].keys() == {"sampler"}
