"""The observation normaliser: its numbers, its time scale, and which parts of an observation it takes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from anybatch.errors import ConfigError
from anybatch.models.normalizer import ObservationNormalizer, rollout_normalizer

VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,))
IMAGE = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
MIXED = gym.spaces.Dict(
    {"a": gym.spaces.Box(-1, 1, (2, 2)), "image": IMAGE, "n": gym.spaces.Discrete(3), "b": gym.spaces.Box(-1, 1, (1,))}
)


def raw(count: int, size: int = 3, seed: int = 0) -> np.ndarray:
    """Vectors far from 0, of very different scales."""
    numbers = np.random.default_rng(seed).normal(size=(count, size))
    return (50 + numbers * np.logspace(-1, 2, size)).astype(np.float32)


def rollout(normalizer: ObservationNormalizer, observations: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Normalise observations (N, T, F) as a rollout does, and add them to the statistics."""
    num_envs, steps = observations.shape[:2]
    pass_through = rollout_normalizer(normalizer, steps, num_envs)
    stored = np.stack([pass_through.step(t, observations[:, t]) for t in range(steps)], axis=1)  # type: ignore[arg-type]
    moments = pass_through.moments()
    assert moments is not None
    normalizer.update(moments, steps)
    return stored, moments


def test_numbers_by_hand() -> None:
    normalizer = ObservationNormalizer(gym.spaces.Box(-9, 9, (1,)), clip=1.5)
    # environments with 1, 3 and 5, 11: means 2 and 8, variances 1 and 9; together mean 5, variance (16+4+0+36)/4 = 14
    _, moments = rollout(normalizer, np.array([[[1], [3]], [[5], [11]]], np.float32))
    assert moments.tolist() == [[[2], [1]], [[8], [9]]]
    assert (float(normalizer.count), normalizer.mean.tolist(), normalizer.squares.tolist()) == (4, [5], [56])
    # (8 - 5) / sqrt(14) = 0.8018, and 100 is clipped
    normalized = normalizer.normalize(np.array([[8], [100]], np.float32))
    np.testing.assert_allclose(normalized, [[3 / np.sqrt(14)], [1.5]], rtol=1e-6)
    # 4 more with mean 5 and variance 0: variance 56 / 8 = 7
    rollout(normalizer, np.full((2, 2, 1), 5, np.float32))
    np.testing.assert_allclose(normalizer.normalize(np.array([[6]], np.float32)), [[1 / np.sqrt(7)]], rtol=1e-6)


@pytest.mark.parametrize("num_envs", [1, 16, 256])
def test_the_time_scale_is_in_samples(num_envs: int) -> None:
    """After the same 4,096 samples the statistics are the same, in however many environments and iterations."""
    samples = raw(4096)
    normalizer = ObservationNormalizer(VECTOR)
    for part in samples.reshape(-1, num_envs, 4, 3):  # iterations of 4 steps: 1024, 64 or 4 of them
        rollout(normalizer, part)
    assert float(normalizer.count) == 4096
    exact = samples.astype(np.float64)
    np.testing.assert_allclose(normalizer.mean, exact.mean(0), rtol=1e-7)
    np.testing.assert_allclose(normalizer.squares / 4096, exact.var(0), rtol=1e-6)


def test_a_rollout_has_one_normalisation_except_the_first() -> None:
    normalizer = ObservationNormalizer(VECTOR)
    first, _ = rollout(normalizer, raw(8).reshape(2, 4, 3))
    # with the statistics of the rollout so far: (x - mean) / std of two samples is 1 and -1, and of later steps bounded
    np.testing.assert_allclose(np.abs(first[:, 0]), 1, rtol=1e-3)
    assert np.abs(first).max() < np.sqrt(8)
    shift, scale = normalizer.shift_and_scale()
    later = raw(8, seed=1).reshape(2, 4, 3)
    stored, _ = rollout(normalizer, later)
    np.testing.assert_array_equal(stored, np.clip((later - shift) * scale, -10, 10))
    assert not np.array_equal(shift, normalizer.shift_and_scale()[0])


def test_a_constant_stays_0() -> None:
    normalizer = ObservationNormalizer(VECTOR)
    constant = np.tile(np.array([1e6, 0.1, -3], np.float32), (2, 5, 1))
    assert not rollout(normalizer, constant)[0].any()
    assert not rollout(normalizer, constant)[0].any()


def test_many_small_rollouts_far_from_0_lose_no_precision() -> None:
    # the naive E[x^2] - E[x]^2 of fp32 numbers near 1e4 with a spread of 0.01 is noise
    samples = (1e4 + 0.01 * np.random.default_rng(0).normal(size=(1, 20_000, 1))).astype(np.float32)
    normalizer = ObservationNormalizer(gym.spaces.Box(-1, 1, (1,)))
    for start in range(0, 20_000, 4):
        rollout(normalizer, samples[:, start : start + 4])
    np.testing.assert_allclose(normalizer.squares / 20_000, samples.astype(np.float64).var(), rtol=1e-4)


def test_dictionaries_normalise_their_vectors() -> None:
    normalizer = ObservationNormalizer(MIXED)
    assert list(normalizer.entries) == ["a", "b"]
    steps = [
        {
            "a": raw(2, 4, seed).reshape(2, 2, 2),
            "image": np.full((2, 8, 8, 3), seed, np.uint8),
            "n": np.array([0, 2]),
            "b": raw(2, 1, seed),
        }
        for seed in range(5)
    ]
    through = rollout_normalizer(normalizer, 5, 2)
    out: Any = [through.step(t, step) for t, step in enumerate(steps)]
    normalizer.update(through.moments(), 5)  # type: ignore[arg-type]
    assert list(out[0]) == list(steps[0])
    assert all(a["image"] is b["image"] and a["n"] is b["n"] for a, b in zip(out, steps, strict=True))
    flat = np.concatenate([np.concatenate([s["a"].reshape(2, 4), s["b"]], 1) for s in steps]).astype(np.float64)
    np.testing.assert_allclose(normalizer.mean, flat.mean(0), rtol=1e-6)
    again: Any = normalizer.normalize(steps[0])
    assert again["a"].shape == (2, 2, 2)
    tensors: Any = normalizer({key: torch.from_numpy(x) for key, x in steps[0].items()})
    assert all(np.array_equal(tensors[key].numpy(), again[key]) for key in steps[0])
    np.testing.assert_allclose(again["a"][0, 1, 0], (flat[0, 2] - flat[:, 2].mean()) / flat[:, 2].std(), rtol=1e-4)


@pytest.mark.parametrize(
    "space",
    [
        IMAGE,
        gym.spaces.Box(0, 1, (8, 8, 3)),
        gym.spaces.Box(0, 200, (7,), np.uint8),
        gym.spaces.Discrete(3),
        gym.spaces.Dict({"image": IMAGE}),
    ],
)
def test_what_is_no_vector_is_refused(space: gym.Space[Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"observation\.normalize is true, but the observation space is .*set it to false"
    ):
        ObservationNormalizer(space)


def test_stacked_statistics_are_those_of_each_run() -> None:
    observations = raw(3 * 2 * 8).reshape(3, 2, 8, 3)
    together, alone = ObservationNormalizer(VECTOR, runs=3), [ObservationNormalizer(VECTOR) for _ in range(3)]
    for steps in (slice(0, 4), slice(4, 8)):
        through = rollout_normalizer(together, 4, 2)
        stored = np.stack([through.step(t, observations[:, :, steps][:, :, t]) for t in range(4)], axis=2)  # type: ignore[arg-type]
        together.update(through.moments(), 4)  # type: ignore[arg-type]
        for run, normalizer in enumerate(alone):
            np.testing.assert_allclose(stored[run], rollout(normalizer, observations[run, :, steps])[0], rtol=1e-6)
    for run, normalizer in enumerate(alone):
        torch.testing.assert_close(together.mean[run], normalizer.mean)
        torch.testing.assert_close(together.squares[run], normalizer.squares)


def test_it_can_be_exported() -> None:
    # (1 - 1) / 2 and (1 - 2) / 2
    normalizer = ObservationNormalizer(gym.spaces.Box(-9, 9, (2,), np.float32))
    four = torch.full((2,), 4.0, dtype=torch.float64)
    normalizer.add(torch.tensor([1.0, 2.0], dtype=torch.float64), four, torch.tensor(10.0, dtype=torch.float64))
    x = torch.ones(1, 2)
    exported = torch.export.export(normalizer, (x,)).module()
    assert exported(x).tolist() == normalizer(x).tolist() == [[pytest.approx(0.0), pytest.approx(-0.5)]]
    assert torch.equal(normalizer(x), torch.from_numpy(normalizer.normalize(x.numpy())))


def test_an_entry_may_be_a_single_number() -> None:
    space = gym.spaces.Dict(x=gym.spaces.Box(-9, 9, (2,), np.float32), time=gym.spaces.Box(0, 9, (), np.float32))
    numbers = {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "time": torch.tensor([5.0, 6.0])}
    assert ObservationNormalizer(space).vectors(numbers).tolist() == [[1, 2, 5], [3, 4, 6]]
