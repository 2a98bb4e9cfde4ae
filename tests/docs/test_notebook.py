"""The notebook runs from top to bottom, with the short budget in its cells' metadata, and keeps its outputs."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anybatch.cli.main import main
from anybatch.config import read_config_file

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
def test_notebooks_run() -> None:
    if importlib.util.find_spec("nbmake") is None:
        pytest.skip("needs pip install '.[docs]'")
    command = [sys.executable, "-m", "pytest", "--nbmake", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *NOTEBOOKS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(NOTEBOOKS)} passed" in done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_kept_and_small(path: Path) -> None:
    installation, *cells = code_cells(path)
    assert source(installation).startswith("%pip install")  # before anything is imported
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))  # from top to bottom
    assert any(cell["outputs"] for cell in cells)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert path.stat().st_size < 100_000


def test_commands_at_the_end_are_the_configuration_of_the_notebook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "notebooks/batch_size_invariance.ipynb"
    namespace: dict[str, object] = {}
    for cell in code_cells(path)[1:4]:  # settings, configuration, rescaling
        exec(source(cell), namespace)
    last = source(json.loads(path.read_text())["cells"][-1])
    scale, *others = last.partition("```text\n")[2].removesuffix("```").replace("\\\n", " ").splitlines()
    command, _, file = scale.partition(" > ")
    assert others[0].split()[:3] == ["anybatch", "train", file]
    capsys.readouterr()
    assert main(shlex.split(command)[1:]) == 0
    (tmp_path / file).write_text(capsys.readouterr().out)
    assert read_config_file(tmp_path / file) == namespace["scaled"]


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])
