"""The site builds strictly, shows every public name, and has no markup that a browser would show as it is typed."""

from __future__ import annotations

import ast
import html
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import anybatch

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("docs", "examples", "src", "tools")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    zensical = Path(sys.executable).with_name("zensical")
    if not zensical.exists():
        pytest.skip("needs pip install '.[docs]'")
    return subprocess.run([zensical, "build", "--strict", "--clean"], cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, in a folder of its own so that nothing is written into the repository."""
    folder = tmp_path_factory.mktemp("site")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    built = build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@pytest.mark.slow
def test_reference_shows_every_exported_name(site: Path) -> None:
    shown = {
        name for page in site.glob("api/**/index.html") for name in re.findall(r' id="([\w.]+)"', page.read_text())
    }
    for package, names in exported().items():
        assert {f"{package}.{name}" for name in names} <= shown
    assert "anybatch.objectives.decoupled_clip_loss" in shown
    assert "anybatch.config.TrainConfig.env" in shown  # a field without a docstring
    assert "anybatch.integrations.token_objectives.Truncate.__post_init__" not in shown
    assert not {name for name in shown if "._" in name and "__" not in name}


@pytest.mark.slow
def test_roles_become_links(site: Path) -> None:
    page = (site / "api/algorithm/index.html").read_text()
    assert ":func:<code>" not in page
    assert 'href="#anybatch.objectives.capped_behavior"' in page


@pytest.mark.slow
def test_pages_have_no_broken_markup(site: Path) -> None:
    assert list(site.glob("*/index.html"))
    for page in site.rglob("index.html"):
        assert not list(broken_markup(page)), page.relative_to(site)


class Page(HTMLParser):
    """The images of a page, and its text outside code, each part with the elements around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self._around: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attrs).get("src") or "")
        elif tag not in ("br", "hr", "input", "link", "meta"):
            self._around.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while tag in self._around and self._around.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"code", "pre", "script", "style"} & set(self._around):
            self.texts.append((tuple(self._around), data))


def broken_markup(path: Path) -> Iterator[str]:
    """Images that are not there, and text that shows reStructuredText or turns products into emphasis."""
    text_of_all = html.unescape(re.sub(r"<[^>]+>", "", path.read_text()))
    if re.search(r"--\s*8\s*<\s*--", text_of_all):
        yield "a file is not included"
    page = Page(path.read_text())
    for image in page.images:
        if not image.startswith(("https:", "data:")) and not (path.parent / image).is_file():
            yield f"no image {image}"
    for (_, before), (around, text) in itertools.pairwise([((), ""), *page.texts]):
        if around and around[-1] == "em" and re.search(r"[\w(]\Z", before):
            yield f"an asterisk became emphasis: {text!r}"
        if "blockquote" in around:
            yield f"a doctest became a quotation: {text!r}"
        if re.search(r"===|>>>|::(\s|$)|:(func|class|mod|meth):|\|--", text):
            yield f"unknown markup: {text!r}"


def test_broken_markup_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text(
        '<img src="a.png"><p>N<em>T samples, N</em>T/M</p><blockquote><p>x</p></blockquote><p>=== ===</p><p>a::</p>'
        "<p>fine: <em>proximal</em> <code>a:: >>> ===</code><br></p><p>:func:<code>f</code></p>"
        "<pre><span>--8</span> &lt; <span>--</span>a.py</pre>"
    )
    assert list(broken_markup(page)) == [
        "a file is not included",
        "no image a.png",
        "an asterisk became emphasis: 'T samples, N'",
        "a doctest became a quotation: 'x'",
        "unknown markup: '=== ==='",
        "unknown markup: 'a::'",
        "unknown markup: ':func:'",
    ]


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


def exported() -> dict[str, list[str]]:
    """Package -> the names in its ``__all__``, for packages below anybatch that export some."""
    found = {}
    for init in (ROOT / "src/anybatch").glob("*/**/__init__.py"):
        package = ".".join(init.parent.relative_to(ROOT / "src").parts)
        for node in ast.parse(init.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[package] = ast.literal_eval(node.value)
    return found


def test_reference_has_every_public_module() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(r"^::: (\S+)", pages, re.MULTILINE)
    top = {f"anybatch.{path.stem}" for path in (ROOT / "src/anybatch").glob("[a-z]*.py")}
    integrations = {f"anybatch.integrations.{x.stem}" for x in (ROOT / "src/anybatch/integrations").glob("[a-z]*.py")}
    assert sorted(listed) == sorted({*exported(), *top, *integrations})


def test_reference_has_every_shortcut() -> None:
    table = (ROOT / "docs/api/index.md").read_text()
    assert set(re.findall(r"^\| `anybatch\.(\w+)`", table, re.MULTILINE)) == set(anybatch.__all__)


def test_figures_are_those_of_the_results() -> None:
    """Pages cannot show files outside docs, so docs/figures holds copies of the figures that they show."""
    for copy in (ROOT / "docs/figures").rglob("*.png"):
        original = ROOT / "results" / copy.relative_to(ROOT / "docs/figures")
        assert copy.read_bytes() == original.read_bytes(), f"cp {original} {copy}"


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
