"""The stored measurements of growth: their table, and that nothing grows faster than its data."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from growth import ROOT, SIZES, table

RESULTS: dict[str, Any] = json.loads((ROOT / "results" / "growth" / "growth.json").read_text())
NOISE = 1.25  # of costs on a machine that other programs used


@pytest.mark.parametrize("kind", SIZES)
def test_nothing_grows_faster_than_its_data(kind: str) -> None:
    measured = RESULTS[kind]
    assert [int(size) for size in measured] == SIZES[kind]
    costs = [x["seconds"] for x in measured.values()]
    assert max(costs[-2:]) < NOISE * min(costs)  # for each environment step
    for (size, before), (larger, after) in pairwise(measured.items()):
        assert after["peak_mib"] / before["peak_mib"] < max(NOISE, int(larger) / int(size))


def test_the_start_is_as_fast_as_it_should_be() -> None:
    assert RESULTS["start"]["import_seconds"] < 0.2 and RESULTS["start"]["first_step_seconds"] < 3.0


def test_table() -> None:
    lines = table({"stack": {"512": {"seconds": 7.3e-6, "peak_mib": 1567.6}}}).splitlines()
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")] == ["stacked runs (Catch)", "512", "7.3", "1,568"]
