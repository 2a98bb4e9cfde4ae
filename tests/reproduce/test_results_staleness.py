"""What results/staleness claims follows from the scores that are kept there."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from anybatch.reproduce import van_elteren
from anybatch.reproduce.statistics import Array, band, bonferroni_threshold

FOLDER = Path(__file__).parents[2] / "results" / "staleness"
TASKS, VARIANTS = ("catch", "acrobot"), ("recent", "decoupled", "behavior", "ewma")
DELAYS = (0, 1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def scores() -> dict[tuple[str, int], Array]:
    """(seeds, tasks) by variant and delay."""
    with gzip.open(FOLDER / "scores.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in rows:
        found.setdefault((row["variant"], row["task"], int(row["delay"])), {})[int(row["seed"])] = float(row["score"])
    seeds = sorted(found["decoupled", "catch", 0])
    return {
        (variant, delay): np.array([[found[variant, task, delay][seed] for task in TASKS] for seed in seeds])
        for variant in VARIANTS
        for delay in DELAYS
    }


@pytest.fixture(scope="module")
def readme() -> str:
    return (FOLDER / "README.md").read_text()


def test_at_least_eight_seeds_that_were_not_tuned_on(scores: dict[tuple[str, int], Array]) -> None:
    assert all(len(values) >= 8 for values in scores.values())
    seeds = {}
    for name in ("scores", "tuning"):
        with gzip.open(FOLDER / f"{name}.csv.gz", "rt", newline="") as file:
            seeds[name] = {int(row["seed"]) for row in csv.DictReader(file)}
    assert not seeds["scores"] & seeds["tuning"]


def test_without_delay_the_three_variants_are_one(scores: dict[tuple[str, int], Array]) -> None:
    for variant in ("recent", "behavior"):
        np.testing.assert_allclose(scores[variant, 0], scores["decoupled", 0], atol=0.02)


@pytest.mark.parametrize("other", ["recent", "behavior"])
def test_decoupled_is_above_both_others_at_the_largest_delay(
    scores: dict[tuple[str, int], Array], readme: str, other: str
) -> None:
    test = van_elteren(scores["decoupled", DELAYS[-1]], scores[other, DELAYS[-1]])
    assert test.z > bonferroni_threshold(0.001, 2)
    assert f"Z {test.z:.2f}" in readme


def test_every_number_of_the_tables_follows(scores: dict[tuple[str, int], Array], readme: str) -> None:
    for (variant, delay), values in scores.items():
        for task in range(len(TASKS)):
            mean, _, error = band(values[:, task])
            assert f"{float(mean):.3f} ± {float(error):.3f}" in readme, (variant, TASKS[task], delay)
    tables = (FOLDER / "scores.md").read_text().strip()
    assert tables in readme
