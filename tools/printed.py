"""Write what commands print, and the tables and figures of stored results, into the documentation.

``make printed`` refreshes everything, ``python tools/printed.py PAGE...`` some pages without the figures.

- A ``console`` block holds commands after ``$``; what follows each is what it prints.
- ``<!-- printed: FILE -->`` ... ``<!-- end -->`` holds a file, ``<!-- printed: COMMAND -->`` what a command prints.
- ``docs/figures`` holds copies of figures in ``results``, which are drawn from the tables beside them.

Nothing is trained or measured: the results are those in the repository.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "results").glob("*/README.md"))]
FIGURES = (
    "anybatch reproduce draw all --suite laptop --out results/laptop",
    "anybatch report results/laptop",
    "python benchmarks/staleness.py draw",
    "python benchmarks/growth.py --draw",
)
"""Commands that draw from the tables in ``results``."""
_CONSOLE = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"(<!-- printed: (\S[^>]*?) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def refreshed(page: str, run: Callable[[str], str]) -> str:
    """The text of a page with the newest outputs; ``run`` returns what a command prints."""
    page = _CONSOLE.sub(lambda block: _with_outputs(block[0], run), page)
    return _PRINTED.sub(lambda place: f"{place[1]}\n{content(place[2], run).strip()}\n\n", page)


def content(source: str, run: Callable[[str], str]) -> str:
    """A file of the repository, or what a command prints."""
    return (ROOT / source).read_text() if (ROOT / source).is_file() else run(source)


def sources(page: str) -> list[tuple[str, str]]:
    """Pairs of a file or command and what the page shows of it."""
    return [(source, shown.strip()) for _, source, shown in _PRINTED.findall(page)]


def _with_outputs(block: str, run: Callable[[str], str]) -> str:
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)
    return "".join(f"$ {command}\n{run(command).rstrip()}\n" for command in commands)


def run_in_a_shell(command: str) -> str:
    """What a command of this repository prints at 80 columns, in a folder that holds only the results."""
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    words = [sys.executable, *(("-m", "anybatch") if program == "anybatch" else ()), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("results", "benchmarks"):
            (Path(folder) / name).symlink_to(ROOT / name)
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, "COLUMNS": "80"}, check=True, stdout=subprocess.PIPE, text=True
        )
    return done.stdout


def draw_figures() -> None:
    """Draw the figures again, and copy those that pages of the site show."""
    for command in FIGURES:
        run_in_a_shell(command)
    for copy in (ROOT / "docs/figures").rglob("*.png"):
        shutil.copyfile(ROOT / "results" / copy.relative_to(ROOT / "docs/figures"), copy)


def main(pages: Sequence[str]) -> None:
    """Refresh the named pages, or all pages and figures."""
    if not pages:
        draw_figures()
    for path in [Path(page) for page in pages] or PAGES:
        before = path.read_text()
        after = refreshed(before, run_in_a_shell)
        if after != before:
            path.write_text(after)
            print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
