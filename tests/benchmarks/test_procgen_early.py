"""Early Procgen training: which runs belong to a preset, and the printed comparison in results/procgen-early."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from procgen_early import draw, of_preset

RESULTS = Path(__file__).parents[2] / "results" / "procgen-early"


def test_runs_of_a_preset_are_not_those_of_another() -> None:
    names = ["ppo-coinrun-seed1", "ppo-ewma-coinrun-seed1", "ppg-coinrun-seed1", "ppo-coinrun-seed10", "ppo-coinrun"]
    paths = [Path("runs") / name for name in names]
    assert [path.name for path in of_preset("ppo", paths)] == ["ppo-coinrun-seed1", "ppo-coinrun-seed10"]
    assert [path.name for path in of_preset("ppo-ewma", paths)] == ["ppo-ewma-coinrun-seed1"]


@pytest.mark.skipif(not RESULTS.is_dir(), reason="needs results/procgen-early of the repository")
def test_readme_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    presets = {path.name.rsplit("-", 2)[0] for path in RESULTS.glob("*-seed*.csv")}
    assert {"ppo", "ppg"} <= presets
    shutil.copytree(RESULTS, tmp_path / "results")
    for preset in sorted(presets):
        draw(preset, tmp_path / "runs", tmp_path / "results")
        printed = capsys.readouterr().out
        assert "published" in printed and printed in (RESULTS / "README.md").read_text(), preset
