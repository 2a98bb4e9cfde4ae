"""The caller's random generators, and trainings in several threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.distributed.random_state import callers_random_state
from anybatch.models import agent
from anybatch.runs.checkpoint import load_newest
from anybatch.training import resume, train
from small_runs import tiny_ppo


def test_training_leaves_the_callers_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(tiny_ppo(), tmp_path / "run", quiet=True)
    assert torch.equal(torch.get_rng_state(), before)
    resume(tmp_path / "run", total_env_steps=32, quiet=True)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError):
        train(tiny_ppo(), tmp_path / "run", quiet=True)  # there is a run already
    assert torch.equal(torch.get_rng_state(), before)


def test_overlapping_blocks_restore_the_state_before_the_first() -> None:
    before = torch.get_rng_state()
    first, second = callers_random_state(), callers_random_state()
    first.__enter__()
    torch.manual_seed(1)
    second.__enter__()
    torch.manual_seed(2)
    first.__exit__(None, None, None)
    torch.manual_seed(3)
    second.__exit__(None, None, None)
    assert torch.equal(torch.get_rng_state(), before)


def test_trainings_in_threads_are_those_of_their_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = agent.build_encoder

    def slow(*arguments: Any) -> torch.nn.Module:
        time.sleep(0.1)  # in which another thread would seed the generator for its own weights
        return build(*arguments)

    monkeypatch.setattr(agent, "build_encoder", slow)

    def run(seed: int, folder: str) -> None:
        train(tiny_ppo(), tmp_path / f"{folder}{seed}", seed=seed, quiet=True)

    before = torch.get_rng_state()
    threads = [threading.Thread(target=run, args=(seed, "together")) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    for seed in range(3):
        run(seed, "alone")
        states = [load_newest(tmp_path / f"{name}{seed}" / "checkpoints")[0]["state"] for name in ("together", "alone")]
        for name, tensor in states[0]["agent"].items():
            assert torch.equal(tensor, states[1]["agent"][name]), name
