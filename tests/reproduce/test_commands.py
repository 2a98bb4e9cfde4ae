"""``anybatch reproduce`` and ``anybatch report`` from end to end, with few steps of everything."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import demo_invariance
from anybatch.cli.main import main
from anybatch.config.io import override
from anybatch.reproduce.registry import FIGURES

RESULTS = Path(__file__).parents[2] / "results"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FIGURES) and len(lines) == 12
    assert "figure2, figure3" in lines[1] and "table5" in lines[5]


def test_dry_run_says_what_the_paper_takes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["reproduce", "run", "invariance", "--suite", "procgen", "--dry-run"]
    assert main([*command, "--steps-per-second", "1000"]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("| invariance"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # 23 * 16 * 3 runs of 100M steps
    assert cells[1:3] == ["1,104", "110.4G"]
    # 48 runs of 1e8 steps each at 1,000 PPO steps a second: the reference is PPG, 3.674 times as long as PPO
    hours = float(cells[3].replace(",", ""))
    assert hours > 23 * 3.674 * 48 * 1e8 / 1000 / 3600  # small batches take longer
    assert main([*command, "--steps-per-second", "2000"]) == 0
    assert f"| {hours / 2:,.0f} |" in re.sub(" +", " ", capsys.readouterr().out)
    assert main(["reproduce", "run", "figure2", *command[3:], "--steps-per-second", "1000"]) == 0
    assert capsys.readouterr().out == text
    assert main([*command, "--games", "heist", "maze", "--seeds", "1", "--steps", "1000000"]) == 0
    assert "| 46 |" in re.sub(" +", " ", capsys.readouterr().out)
    for reduced in ([], ["--budget", "smoke"], ["--seeds", "1"]):  # the time is that of the whole suite
        assert main(["reproduce", "run", "all", "--suite", "ladder", "--dry-run", *reduced]) == 0
        assert ("on two cores: " in capsys.readouterr().out) == (not reduced)


def test_draw_tasks_without_ppg_from_tables_with_it(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "ladder-quick" / "invariance.csv.gz", tmp_path)
    options = ["--suite", "ladder", "--budget", "quick", "--games", "cartpole", "--out", str(tmp_path)]
    assert main(["reproduce", "draw", "figure2", *options]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce", "paint"], "reproduce needs one of list, run, status, draw, not 'paint'"),
        (["reproduce", "run", "figure-19"], "figure is 'figure-19', but must be all, one of staleness"),
        (["reproduce", "run", "all", "--games", "pong"], "games is 'pong', but must be among"),
        (["reproduce", "run", "all", "--seeds", "0", "--dry-run"], "seeds is 0, but must be at least 1"),
        (["reproduce", "run", "all", "--budget", "quick"], "budget is quick, but suite laptop has full or smoke"),
        (["reproduce", "run", "all", "--dry-run", "--steps-per-second", "0"], "steps-per-second is 0"),
        (["reproduce", "run", "all", "--dry-run", "--steps-per-second", "nan"], "steps-per-second is nan"),
        (["reproduce", "run", "all", "--processes", "-1"], "processes is -1, but must be at least 1"),
        (["reproduce", "run", "figure1", "--suite", "ladder"], "suite ladder has no task for figure1"),
        (["reproduce", "run", "figure1", "--games", "tall-catch"], "none of the chosen games is a task of figure1"),
        (["reproduce", "draw", "all", "--out", __file__], "which is a file, but must be a folder"),
        (["reproduce", "draw", "all", "--out", str(RESULTS / "ladder-quick")], "has results of the suite ladder"),
        (["reproduce", "draw", "staleness", "--out", "nowhere"], "does not exist; run the figure first"),
        (["report", "nowhere"], "'nowhere' is neither a folder of"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.procgen
@pytest.mark.slow
def test_laptop_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--suite", "laptop", "--budget", "smoke", "--out", str(tmp_path)]
    assert main(["reproduce", "run", "all", *options, "--processes", "1"]) == 0
    for name in FIGURES.keys() - {"noise-gap"}:
        assert (tmp_path / f"{name}.md").read_text().strip()
        assert list(tmp_path.glob(f"{name}*.png")), name
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["figures"]["staleness"]["seeds"] == [1000, 2000]
    assert str(tmp_path) not in (tmp_path / "manifest.json").read_text()

    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page) and "http" not in page and str(tmp_path) not in page
    assert page.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png")))
    assert "anybatch reproduce run all --suite laptop --budget smoke --out DIR" in page

    # a second call trains nothing, and gives the same tables
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv.gz") if path.name != "cost.csv.gz"}
    capsys.readouterr()
    assert main(["reproduce", "run", "invariance", *options]) == 0
    done, total = re.findall(r"^(\d+) of (\d+) runs", capsys.readouterr().out, re.M)[0]
    assert done == total
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert main(["reproduce", "status", *options]) == 0
    status = capsys.readouterr().out
    assert all(re.search(rf"^{name} +(\d+) of +\1 runs, table", status, re.M) for name in before_names(before))


def before_names(tables: dict[str, bytes]) -> list[str]:
    return [name.partition(".")[0] for name in tables]


@pytest.mark.procgen
@pytest.mark.slow
def test_ladder_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--suite", "ladder", "--budget", "smoke", "--out", str(tmp_path)]
    assert main(["reproduce", "run", "all", *options, "--processes", "1"]) == 0
    for name in ("invariance", "linear-step", "tests", "equivalence", "noise-gap"):
        assert (tmp_path / f"{name}.md").read_text().strip() and list(tmp_path.glob(f"{name}*.png")), name
    assert "are equivalent in the mean over tasks" in (tmp_path / "claims.md").read_text()
    capsys.readouterr()
    assert main(["reproduce", "run", "all", *options, "--processes", "1"]) == 0
    done, total = re.findall(r"^(\d+) of (\d+) runs", capsys.readouterr().out, re.M)[0]
    assert done == total


@pytest.mark.procgen
@pytest.mark.slow
def test_procgen_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--suite", "procgen", "--budget", "smoke", "--out", str(tmp_path)]
    assert main(["reproduce", "run", "all", *options, "--launcher", "here"]) == 0
    assert all(list(tmp_path.glob(f"{name}*.png")) for name in FIGURES.keys() - {"noise-gap"})
    capsys.readouterr()
    assert main(["reproduce", "status", *options]) == 0
    status = capsys.readouterr().out
    # all adjustments at 2 batches, (a) to (c) at one, (d) at 2, the reference, on 2 games
    assert re.search(r"^invariance +16 of +16 runs, table", status, re.M)
    assert re.search(r"^linear-step +2 of +2 runs, table", status, re.M)
    # the objectives are the same without delay
    assert re.search(r"^staleness +8 of +8 runs, table", status, re.M)
    # a run's own page
    run = next(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert main(["report", str(run), "--out", str(tmp_path / "run.html")]) == 0
    assert "procgen:" in (tmp_path / "run.html").read_text()


@pytest.mark.procgen
def test_demo_compares_batch_sizes(tmp_path: Path) -> None:
    configs = {n: override(c, {"total_env_steps": 4096}) for n, c in demo_invariance.configurations().items()}
    assert [c.env.num_envs for c in configs.values()] == [64, 4, 4]
    default, adjusted, plain = configs.values()
    assert adjusted.optimizer.step_size == pytest.approx(default.optimizer.step_size / 4)
    assert plain.optimizer.step_size == default.optimizer.step_size
    sentence = demo_invariance.compare(tmp_path / "x.png", configs, (1, 2))
    assert len(re.findall(r"-?\d\.\d\d ± \d\.\d\d", sentence)) == 3 and (tmp_path / "x.png").exists()
