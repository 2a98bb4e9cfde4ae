"""Dealing samples out to minibatches: each exactly once, whole trajectories, or equal pieces of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anybatch.config.chunks import time_chunks
from anybatch.errors import ConfigError
from anybatch.minibatches import Batch, Minibatch, RunGenerators, shuffled


def numbered(num_envs: int, steps: int, *, as_dict: bool = False) -> Batch:
    """Sample (n, t) carries the number n * steps + t in every tensor."""
    number = torch.arange(num_envs * steps).view(num_envs, steps)
    vector = torch.stack([number, -number], dim=-1).float()
    return Batch(
        observation={"a": vector, "b": number.to(torch.int32)} if as_dict else vector,
        action=number,
        behavior_logp=number + 0.25,
        behavior_params=torch.stack([number] * 3, dim=-1).float(),
        advantage=number.float(),
        value_target=number + 0.75,
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_rows_belong_together(minibatch: Minibatch) -> None:
    number = minibatch.action
    assert torch.equal(minibatch.behavior_logp, number + 0.25)
    assert torch.equal(minibatch.behavior_params, torch.stack([number] * 3, dim=-1).float())
    assert torch.equal(minibatch.advantage, number.float())
    assert torch.equal(minibatch.value_target, number + 0.75)
    if isinstance(minibatch.observation, dict):
        assert torch.equal(minibatch.observation["a"], torch.stack([number, -number], dim=-1).float())
        assert torch.equal(minibatch.observation["b"], number.to(torch.int32))
    else:
        assert torch.equal(minibatch.observation, torch.stack([number, -number], dim=-1).float())


def deal(batch: Batch, minibatches: int, seed: int = 0) -> list[Tensor]:
    dealt = list(shuffled(batch, minibatches, generator(seed)))
    for minibatch in dealt:
        check_rows_belong_together(minibatch)
    return [minibatch.action for minibatch in dealt]


@pytest.mark.parametrize("as_dict", [False, True])
def test_whole_trajectories_stay_together(as_dict: bool) -> None:
    dealt = deal(numbered(8, 5, as_dict=as_dict), 4)
    assert [len(x) for x in dealt] == [10] * 4
    assert sorted(torch.cat(dealt).tolist()) == list(range(40))
    for numbers in dealt:
        for trajectory in numbers.view(2, 5):
            start = int(trajectory[0])
            assert start % 5 == 0
            assert trajectory.tolist() == list(range(start, start + 5))


def test_one_environment_is_cut_into_8_chunks_of_32() -> None:
    assert time_chunks(1, 256, 8) == 8
    dealt = deal(numbered(1, 256), 8)
    assert len(dealt) == 8
    for numbers in dealt:
        start = int(numbers[0])
        assert start % 32 == 0
        assert numbers.tolist() == list(range(start, start + 32))
    assert sorted(int(x[0]) for x in dealt) == list(range(0, 256, 32))


def test_9_environments_with_4_minibatches_use_every_sample_once() -> None:
    # gcd(9, 4) = 1: each trajectory is cut into 4 pieces, 36 pieces, 9 for each minibatch
    assert time_chunks(9, 8, 4) == 4
    dealt = deal(numbered(9, 8), 4)
    assert [len(x) for x in dealt] == [18] * 4  # 9 pieces of 2 steps
    assert sorted(torch.cat(dealt).tolist()) == list(range(72))
    for numbers in dealt:
        assert (numbers.view(9, 2)[:, 1] == numbers.view(9, 2)[:, 0] + 1).all()


def test_the_fewest_pieces_are_used() -> None:
    # 6 environments, 4 minibatches: gcd 2, so 2 pieces each; 64 and 8 divide: whole trajectories
    assert time_chunks(6, 8, 4) == 2
    assert time_chunks(64, 7, 8) == 1
    assert time_chunks(1, 1, 1) == 1


def test_9_environments_with_4_minibatches_of_uneven_time_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        list(shuffled(numbered(9, 10), 4, generator()))
    sentence = str(refused.value)
    for part in ("optimizer.minibatches 4", "9 environments", "10 steps", "multiple of 4"):
        assert part in sentence
    assert "\n" not in sentence


def test_more_minibatches_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="minibatches 8"):
        time_chunks(1, 4, 8)


def test_the_order_depends_on_the_generator_alone() -> None:
    batch = numbered(16, 4)
    first = torch.cat(deal(batch, 4, seed=1))
    torch.manual_seed(123)
    assert torch.equal(torch.cat(deal(batch, 4, seed=1)), first)
    assert not torch.equal(torch.cat(deal(batch, 4, seed=2)), first)
    source = generator(1)
    epochs = [torch.cat([m.action for m in shuffled(batch, 4, source)]) for _ in range(2)]
    assert torch.equal(epochs[0], first)
    assert not torch.equal(epochs[0], epochs[1])  # a new order every epoch
    other = numbered(16, 4)
    noise = torch.randn(16, 4)
    changed = Batch(**{**vars(other), "advantage": noise})
    assert torch.equal(torch.cat([m.action for m in shuffled(changed, 4, generator(1))]), first)


@pytest.mark.parametrize("as_dict", [False, True])
def test_large_observations_are_gathered_one_minibatch_at_a_time(
    as_dict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same result as small ones."""
    batch = numbered(4, 6, as_dict=as_dict)
    small = [x.tensors() for x in shuffled(batch, 4, generator())]
    monkeypatch.setattr("anybatch.minibatches._SMALL", 0)
    large = [x.tensors() for x in shuffled(batch, 4, generator())]
    for tensors, others in zip(small, large, strict=True):
        assert len(tensors) == (7 if as_dict else 6)
        assert all(map(torch.equal, tensors, others))


def test_every_trajectory_can_land_in_every_minibatch() -> None:
    seen = {(int(n) // 2, m) for seed in range(40) for m, x in enumerate(deal(numbered(4, 2), 2, seed)) for n in x}
    assert seen == {(env, m) for env in range(4) for m in range(2)}


def test_micro_batches_by_hand() -> None:
    (whole,) = shuffled(numbered(2, 5, as_dict=True), 1, generator())
    parts = list(whole.micro_batches(4))
    assert [len(part) for part in parts] == [3, 4, 3]  # 10/4 -> 3 parts, edges 0, 3.33, 6.67, 10
    for part in parts:
        check_rows_belong_together(part)
    assert torch.equal(torch.cat([part.action for part in parts]), whole.action)
    assert list(whole.micro_batches(10)) == [whole]
    assert list(whole.micro_batches(1000)) == [whole]
    assert [len(part) for part in whole.micro_batches(1)] == [1] * 10


@pytest.mark.parametrize("as_dict", [False, True])
def test_stacked_runs_are_dealt_as_single_ones(as_dict: bool) -> None:
    batch, seeds, minibatches = numbered(6, 8, as_dict=as_dict), (3, 4, 5), 4  # each trajectory is cut into 2 chunks
    stack = batch.map(lambda x: torch.stack([x + 100 * run for run in range(3)]))
    together = list(shuffled(stack, minibatches, RunGenerators(generator(seed) for seed in seeds)))
    for run, seed in enumerate(seeds):
        alone = shuffled(batch.map(lambda x, run=run: x + 100 * run), minibatches, generator(seed))  # type: ignore[misc]
        for mixed, single in zip(together, alone, strict=True):
            assert (len(mixed), mixed.runs, single.runs) == (12, 3, 1)
            check_equal(mixed.map(lambda x, run=run: x[run]), single)  # type: ignore[misc]
    parts = list(together[0].micro_batches(5))
    assert [len(part) for part in parts] == [4, 4, 4]
    assert torch.equal(torch.cat([part.behavior_params for part in parts], dim=1), together[0].behavior_params)


def check_equal(a: Minibatch, b: Minibatch) -> None:
    for name, x in vars(a).items():
        y = getattr(b, name)
        if not isinstance(x, Tensor | dict):  # of recurrent networks alone
            assert x == y, name
            continue
        assert all(torch.equal(x[key], y[key]) for key in x) if isinstance(x, dict) else torch.equal(x, y), name


def test_single_samples() -> None:
    dealt = list(shuffled(numbered(2, 6), 3, generator(), "samples"))
    for minibatch in dealt:
        check_rows_belong_together(minibatch)
    numbers = torch.cat([x.action for x in dealt])
    assert [len(x) for x in dealt] == [4] * 3 and sorted(numbers.tolist()) == list(range(12))
    assert time_chunks(2, 6, 3, "samples") == 6
    with pytest.raises(ConfigError, match=r"optimizer\.minibatches is 5, but must divide the 12 samples"):
        time_chunks(2, 6, 5, "samples")
    neighbours = sum(abs(int(a - b)) == 1 for x in dealt for a, b in zip(x.action, x.action[1:], strict=False))
    assert neighbours < 6  # of 9; trajectories would give 9
