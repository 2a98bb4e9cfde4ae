"""The published curves: reading them, their comparison, and the same numbers in the docs."""

from __future__ import annotations

import csv
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from anybatch.envs.procgen import NORMALIZATION
from anybatch.errors import AnybatchError
from anybatch.reproduce.statistics import Array
from published_curves import (
    NAMES,
    Comparison,
    Curves,
    compare,
    final_average,
    final_returns,
    iqm,
    main,
    read_curves,
    table_of_comparisons,
    table_of_results,
)

ROOT = Path(__file__).parents[2]
CURVES = ROOT / "results" / "reference" / "procgen_hard_published_curves.csv.gz"
DOCS = ROOT / "docs" / "published-ppg-vs-ppo.md"
pytestmark = pytest.mark.skipif(not CURVES.is_file(), reason="needs results/reference/ of the repository")


@pytest.fixture(scope="module")
def curves() -> Curves:
    return read_curves()


@pytest.fixture(scope="module")
def comparisons(curves: Curves) -> list[Comparison]:
    return compare(final_returns(curves))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+(?:e-?\d+)?", text)]


def test_every_run_is_read(curves: Curves) -> None:
    assert set(curves.returns) == set(NAMES)
    assert sorted(curves.games) == sorted(NORMALIZATION)
    assert {values.shape for values in curves.returns.values()} == {(3, 16, 429)}
    assert curves.steps.shape == (429,) and curves.steps[0] == 65_536 and curves.steps[-1] == 99_876_864


def test_a_row_is_where_it_belongs(curves: Curves) -> None:
    with gzip.open(CURVES, "rt") as file:
        for row in list(csv.DictReader(file))[::5_000]:
            game, point = curves.games.index(row["env"]), int(np.searchsorted(curves.steps, float(row["env_steps"])))
            assert curves.returns[row["algorithm"]][int(row["seed"]), game, point] == float(row["mean_episode_return"])


def test_ranges_of_normalised_returns() -> None:
    # HARD_GAME_RANGES of the published code of Phasic Policy Gradient
    assert NORMALIZATION == {
        **{"coinrun": (5, 10), "starpilot": (1.5, 35), "caveflyer": (2, 13.4), "dodgeball": (1.5, 19)},
        **{"fruitbot": (-0.5, 27.2), "chaser": (0.5, 14.2), "miner": (1.5, 20), "jumper": (1, 10)},
        **{"leaper": (1.5, 10), "maze": (4, 10), "bigfish": (0, 40), "heist": (2, 10)},
        **{"climber": (1, 12.6), "plunder": (3, 30), "ninja": (2, 10), "bossfight": (0.5, 13)},
    }


def test_final_returns_are_close_to_the_mean_of_the_last_points(curves: Curves) -> None:
    results = final_returns(curves)
    last = curves.steps > curves.steps[-1] - 4_000_000
    for algorithm, values in results.items():
        assert values.shape == (3, 16)
        for column, game in enumerate(curves.games):
            low, high = NORMALIZATION[game]
            plain = curves.returns[algorithm][:, column, last].mean(-1)
            np.testing.assert_allclose(values[:, column], (plain - low) / (high - low), atol=0.01)


def test_published_ppg_beats_ppo(comparisons: list[Comparison]) -> None:
    ppg, with_kl, single = comparisons
    # U sums to 140 of 144 pairs: Z = (140 - 72) / sqrt(84); see test_z_of_the_paper
    assert ppg.z == pytest.approx(68 / np.sqrt(84)) and ppg.improvement == 140 / 144
    assert 0.15 < ppg.low < ppg.difference < ppg.high < 0.2
    for comparison in (with_kl, single):
        assert comparison.low < 0 < comparison.high and comparison.p > 0.05


def test_docs_show_what_is_printed(curves: Curves, comparisons: list[Comparison]) -> None:
    printed = (table_of_results(final_returns(curves)), table_of_comparisons(comparisons))
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    expected = [line for table in printed for line in table.splitlines()]
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        # resampling may differ from one NumPy to another in the last digit
        assert numbers(line) == pytest.approx(numbers(other), abs=0.0015)
        assert re.sub(r"[-+\d.e]+", "", line) == re.sub(r"[-+\d.e]+", "", other)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--curves", str(CURVES)])
    assert "PPG over PPO" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_code:
        main(["--curves", str(tmp_path / "none.csv.gz")])
    assert exit_code.value.code == 2
    assert "There are no published curves at" in capsys.readouterr().err


def test_incomplete_curves_are_refused(tmp_path: Path) -> None:
    rows = [f"{algorithm},maze,0,{steps},1.0" for algorithm in ("ppo", "ppg") for steps in (1, 2)]
    for kept in (rows[:-1], rows[:1] + rows[3:], []):
        path = tmp_path / "curves.csv.gz"
        with gzip.open(path, "wt") as file:
            file.write("\n".join(["algorithm,env,seed,env_steps,mean_episode_return", *kept]))
        with pytest.raises(AnybatchError, match="incomplete"):
            read_curves(path)


def test_final_average_by_hand() -> None:
    # points (0, 0), (4, 4), (6, 10), the last 4 steps: from 2 (value 2) to 4 the mean is 3, from 4 to 6 it is 7
    values = np.array([[0.0, 4.0, 10.0], [1.0, 1.0, 1.0]])
    np.testing.assert_allclose(final_average([0, 4, 6], values, 4), [5, 1])
    np.testing.assert_allclose(final_average([0, 4, 6], values, 2), [7, 1])  # starts at a point
    np.testing.assert_allclose(final_average([0, 4, 6], values, 1), [8.5, 1])  # within the last piece
    np.testing.assert_allclose(final_average([0, 4, 6], values, 6), [22 / 6, 1])  # all of it: 8 + 14 over 6


@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=8),
    st.lists(st.integers(-5, 5), min_size=9, max_size=9),
    st.floats(0.01, 1),
    st.data(),
)
def test_final_average_does_not_depend_on_points_that_a_line_passes(
    gaps: list[int], heights: list[int], share: float, data: st.DataObject
) -> None:
    steps = np.cumsum([0, *gaps]).astype(float)
    values = np.array(heights[: len(steps)], dtype=float)
    extra = data.draw(st.lists(st.floats(0, steps[-1]), max_size=4))
    finer = np.unique([*steps, *extra])
    assume((np.diff(finer) > 1e-6).all())
    expected = final_average(steps, values, share * steps[-1])
    assert final_average(finer, np.interp(finer, steps, values), share * steps[-1]) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("steps", "values", "window", "message"),
    [
        ([0, 1, 2], [0, 1], 1, "do not fit"),
        ([0, 2, 1], [0, 1, 2], 1, "increasing"),
        ([0], [0], 1, "two points"),
        ([1, 2, 3], [0, 1, 2], 3, "covers 2"),
        ([1, 2, 3], [0, 1, 2], 0, "window"),
    ],
)
def test_windows_outside_a_curve_are_refused(
    steps: list[float], values: list[float], window: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        final_average(steps, values, window)


@given(hnp.arrays(float, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.floats(-9, 9)))
def test_iqm_is_scipys_trimmed_mean(values: Array) -> None:
    assert iqm(values) == pytest.approx(stats.trim_mean(values, 0.25, axis=None), abs=1e-9)


def test_iqm_by_hand() -> None:
    assert iqm([[100, 1, 2], [-50, 4, 5]]) == 3  # 6 // 4 = 1 goes at each end: 1 2 4 5
    with pytest.raises(ValueError, match="NaN"):
        iqm([[1.0, np.nan]])
