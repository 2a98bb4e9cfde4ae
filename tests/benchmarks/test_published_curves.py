"""The published curves: reading them, their comparison, and the same numbers in the docs."""

from __future__ import annotations

import csv
import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from anybatch.envs.procgen import NORMALIZATION
from anybatch.errors import AnybatchError
from published_curves import (
    NAMES,
    Comparison,
    Curves,
    compare,
    final_returns,
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
