"""The site builds strictly: no dead link, no reference to a name that does not exist; and it has every module."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("docs", "src", "tools")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    zensical = Path(sys.executable).with_name("zensical")
    if not zensical.exists():
        pytest.skip("needs pip install 'anybatch[docs]'")
    return subprocess.run([zensical, "build", "--strict", "--clean"], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_builds_strictly(tmp_path: Path) -> None:
    for part in PARTS:  # into a folder of its own, so that nothing is written into the repository
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site/api/algorithm/index.html").read_text()
    assert 'id="anybatch.objectives.decoupled_clip_loss"' in page
    assert ":func:<code>" not in page  # roles have become links
    assert 'href="#anybatch.objectives.capped_behavior"' in page


@pytest.mark.slow
def test_strict_notices_what_is_broken(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings.replace("paths: [src]", f"paths: [{ROOT / 'src'}]"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n\n[gone](gone.md) [anchor](b.md#no-such-heading)\n")
    (tmp_path / "docs/b.md").write_text("# B\n\n[x][anybatch.no_such_thing]\n\n::: anybatch.errors\n")
    built = build(tmp_path)
    output = re.sub(r"\x1b\[[0-9;]*m", "", built.stdout + built.stderr)
    assert built.returncode != 0
    for words in ("page does not exist", "anchor does not exist", "anybatch.no_such_thing"):
        assert words in output


def modules() -> set[str]:
    """Every public module, dotted."""
    paths = (path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src/anybatch").rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return {name for name in names if not any(part.startswith("_") for part in name.split("."))}


def test_reference_has_every_module() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE)) - {"anybatch"}
    absent = {name for name in modules() - {"anybatch"} if not any(f"{name}.".startswith(f"{x}.") for x in listed)}
    assert not absent, f"give these a line '::: NAME' on a page of docs/api: {', '.join(sorted(absent))}"
    assert listed <= modules()


def test_navigation_has_every_page() -> None:
    listed = set(re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages


def test_links_out_of_the_site_lead_somewhere() -> None:
    """README and other pages outside docs: links to files of the repository."""
    for path in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (ROOT / target).exists(), f"{path.name} links to {target}"
