"""The notebook runs from top to bottom; its cells' metadata hold the short budget that it runs with here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
def test_notebooks_run() -> None:
    if importlib.util.find_spec("nbmake") is None:
        pytest.skip("needs pip install 'anybatch[docs]'")
    command = [sys.executable, "-m", "pytest", "--nbmake", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *NOTEBOOKS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(NOTEBOOKS)} passed" in done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_ready_for_colab(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert "".join(cells[0]["source"]).startswith("%pip install")  # before anything is imported
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)  # committed without results
