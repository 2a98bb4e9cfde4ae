"""The wheel installs into a clean environment and trains there, with the dependencies that it names and no others."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from anybatch import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that nothing is written into the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for leftover in folder.glob("src/*.egg-info"):
        shutil.rmtree(leftover)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--quiet", "--wheel-dir", folder / "dist", folder], check=True)
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and links to its dependencies' files, as they are installed here."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin/python", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in dependencies("anybatch", set()):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(distribution.locate_file(name))
    return folder


def dependencies(name: str, seen: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """What a distribution needs without its extras, and what that needs, as installed here."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
        )
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if not wanted or key in seen or "extra ==" in str(requirement.marker):
            continue
        seen.add(key)
        try:
            yield importlib.metadata.distribution(key)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or a CUDA library that this build of PyTorch does without
        yield from dependencies(key, seen)


def run(clean: Path, *arguments: str, folder: Path) -> str:
    """Run a program of the clean environment in ``folder``; its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    program, *rest = arguments
    done = subprocess.run([clean / "bin" / program, *rest], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_content(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert wheel.name == f"anybatch-{__version__}-py3-none-any.whl"
    assert "anybatch/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/anybatch").rglob("*.py")}
    assert sources <= set(names)
    assert {name.split("/")[0] for name in names} == {"anybatch", f"anybatch-{__version__}.dist-info"}
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata


@pytest.mark.slow
def test_installs_and_trains(clean: Path, tmp_path: Path) -> None:
    assert "usage: anybatch" in run(clean, "anybatch", "--help", folder=tmp_path)
    assert run(clean, "anybatch", "--version", folder=tmp_path) == f"anybatch {__version__}\n"
    where = (
        "import anybatch, importlib.util as u; print(anybatch.__file__, u.find_spec('envpool'), u.find_spec('pytest'))"
    )
    path, *extras = run(clean, "python", "-c", where, folder=tmp_path).split()
    assert Path(path).is_relative_to(clean)
    assert extras == ["None", "None"]  # what is not among the dependencies is not there
    small = ["--env.num-envs", "8", "--rollout.steps", "64", "--total-env-steps", "8192", "--scaling.off"]
    trained = run(clean, "anybatch", "train", "ppo-ewma", "--env.id", "gym:CartPole-v1", *small, folder=tmp_path)
    assert trained.startswith("done: 8,192 steps")
    (trained_run,) = (str(path) for path in tmp_path.glob("runs/*"))
    assert "(20 episodes)" in run(clean, "anybatch", "eval", trained_run, "--episodes", "20", folder=tmp_path)
    assert "pip install '.[procgen]'" in run(clean, "anybatch", "envs", folder=tmp_path)


def test_one_version_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == __version__
    for path in (ROOT / "src").rglob("*.py"):
        assert path.name == "_version.py" or f'"{__version__}"' not in path.read_text()
