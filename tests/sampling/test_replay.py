"""Passes over the data of the last iterations: which sample is trained on when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.config.io import override
from anybatch.config.schema import OptimizerConfig
from anybatch.minibatches import Batch
from anybatch.presets import ppo_ewma
from anybatch.runs import checkpoint
from anybatch.runs.files import CHECKPOINTS
from anybatch.sampling.replay import RecentBatches, ages, kept_iterations, passes
from anybatch.training import train
from small_runs import tiny_ppo


def numbered(number: int) -> Batch:
    """A batch of one sample whose advantage tells the iteration."""
    x = torch.tensor([[float(number)]])
    return Batch(x, x, x, x.unsqueeze(-1), x, x)


def trained_on(iterations: int, epochs: int, window: float) -> list[list[tuple[int, int]]]:
    """The pass and the data of each pass, by iteration."""
    config = OptimizerConfig(policy_epochs=epochs, value_epochs=epochs, epoch_window=window)
    recent, done = RecentBatches.of(config), []
    for iteration in range(iterations):
        batches = recent.and_newest(numbered(iteration))
        done.append([(epoch, int(batch.advantage)) for epoch, batch in passes(batches, epochs, window)])
    return done


def test_ages_worked_out_by_hand() -> None:
    assert ages(3, 1) == [0, 0, 0]
    assert ages(3, 4) == [0, 1, 2]  # 0, 1.33, 2.67
    assert ages(3, 16) == [0, 5, 10]  # 0, 5.33, 10.67
    assert ages(10, 4) == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]  # 0, .4, .8, 1.2, 1.6, 2, 2.4, 2.8, 3.2, 3.6
    assert ages(1, 7) == [0]
    assert ages(3, 1.4) == [0, 0, 0]  # 0, .47, .93
    assert ages(7, 7) == [0, 1, 2, 3, 4, 5, 6]  # e * 7 / 7 must not round to just below e


def test_each_sample_has_its_passes_at_these_iterations() -> None:
    assert trained_on(5, epochs=3, window=4) == [
        [(0, 0)],  # older data does not exist yet: fewer gradient steps
        [(0, 1), (1, 0)],
        [(0, 2), (1, 1), (2, 0)],
        [(0, 3), (1, 2), (2, 1)],
        [(0, 4), (1, 3), (2, 2)],
    ]
    assert trained_on(2, epochs=3, window=1) == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]


@pytest.mark.parametrize(("epochs", "window"), [(3, 4), (10, 4), (10, 64), (2, 5.5)])
def test_every_sample_is_trained_on_as_often_as_there_are_epochs(epochs: int, window: float) -> None:
    last = ages(epochs, window)[-1]
    done = trained_on(2 * last + 2, epochs, window)
    counts = Counter(number for one in done for _, number in one)
    # but for the last iterations, whose later passes the run does not reach
    assert all(counts[number] == epochs for number in range(len(done) - last))
    assert all(len(one) == epochs for one in done[last:])


def test_only_data_with_passes_to_come_is_kept() -> None:
    config = OptimizerConfig(policy_epochs=1, value_epochs=3, epoch_window=4)
    assert kept_iterations(config) == 2  # of ages 0, 1, 2
    recent = RecentBatches.of(config)
    for iteration in range(5):
        recent.and_newest(numbered(iteration))
    saved = recent.state_dict()
    assert [int(values["advantage"]) for values in saved["batches"]] == [4, 3]
    assert RecentBatches.of(OptimizerConfig()).and_newest(numbered(0))[0].advantage == 0
    restored = RecentBatches(1)
    restored.load_state_dict(saved)  # an edited configuration needs fewer
    assert [int(batch.advantage) for batch in restored.and_newest(numbered(5))] == [5, 4]


def test_a_span_within_the_iteration_changes_no_bit(tmp_path: Path) -> None:
    epochs: dict[str, Any] = {"policy_epochs": 3, "value_epochs": 3, "total_env_steps": 64, "proximal": "ewma"}
    agents = []
    for window in (1.0, 1.4, 4.0):  # 1.4: ages 0, 0, 0
        config = override(tiny_ppo(), {**epochs, "epoch_window": window})
        train(config, tmp_path / str(window), quiet=True)
        agents.append(checkpoint.load_newest(tmp_path / str(window) / CHECKPOINTS)[0]["state"]["agent"])
    assert all(torch.equal(agents[0][name], agents[1][name]) for name in agents[0])
    assert any(not torch.equal(agents[0][name], agents[2][name]) for name in agents[0])


def test_the_presets_make_all_passes_at_once() -> None:
    assert kept_iterations(ppo_ewma().optimizer) == 0
