"""Tables of the pages are those of the results, and the tool that refreshes pages changes only outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

import printed

WITH_TOLERANCE = "python benchmarks/published_curves.py"
"""Resampled, so that its last digits depend on NumPy; tests/benchmarks compares it."""


@pytest.mark.parametrize("page", printed.PAGES, ids=lambda path: path.relative_to(printed.ROOT).as_posix())
def test_tables_are_those_of_the_results(page: Path) -> None:
    for source, shown in printed.sources(page.read_text()):
        if source != WITH_TOLERANCE:
            assert shown == printed.content(source, printed.run_in_a_shell).strip(), f"{source}: make printed"


def test_pages_show_results() -> None:
    sources = {source for page in printed.PAGES for source, _ in printed.sources(page.read_text())}
    assert {WITH_TOLERANCE, "results/staleness/scores.md", "python benchmarks/bench_docs.py bench"} <= sources


def test_only_outputs_change() -> None:
    page = (
        "a\n\n```console\n$ one \\\n    --more\nold\n$ two\n```\n\n```text\n$ one\nkept\n```\n\n"
        "<!-- printed: three -->\n\n| old |\n\n<!-- end -->\n\n<!-- printed: LICENSE -->\nold\n<!-- end -->\nb\n"
    )
    after = printed.refreshed(page, lambda command: f"output of {command!r}\n")
    licence = (printed.ROOT / "LICENSE").read_text().strip()
    assert after == (
        "a\n\n```console\n$ one \\\n    --more\noutput of 'one \\\\\\n    --more'\n$ two\noutput of 'two'\n```\n\n"
        "```text\n$ one\nkept\n```\n\n<!-- printed: three -->\n\noutput of 'three'\n\n<!-- end -->\n\n"
        f"<!-- printed: LICENSE -->\n\n{licence}\n\n<!-- end -->\nb\n"
    )
    assert printed.refreshed(after, lambda command: f"output of {command!r}\n") == after
