"""Plain English in pages, source and examples: phrases that have crept in before are not used again."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AVOIDED = {
    r"go(es)? on with|go(es)? on where": "continue",
    r"told apart|tells? apart": "distinguish, or: significantly different",
    r"\bof one.s own\b": "your own, a separate",
    r"\blies? (in|on|at|within|among|beside|below|above|near)\b": "be in, at, ...",
    r"\bstands? (beside|against)\b": "be beside, compare with",
    r"\bsays? so\b": "print a message, or leave it out",
    r"\bis acted by\b|where nothing else is said": "a verb for what happens",
}
"""Patterns, with the usual words."""
TEXTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "results").rglob("*.md"),
    *(path for folder in ("src", "examples", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")),
    *(ROOT / "notebooks").glob("*.ipynb"),
]


def found(text: str) -> list[str]:
    plain = re.sub(r"\s+(# )?", " ", text)  # a phrase may continue on the next line
    return [match[0] for pattern in AVOIDED for match in re.finditer(pattern, plain, re.IGNORECASE)]


def test_phrases_are_not_used() -> None:
    phrases = {path.relative_to(ROOT).as_posix(): found(path.read_text()) for path in TEXTS}
    assert not {path: words for path, words in phrases.items() if words}


def test_phrases_are_found() -> None:
    assert found("we go on\n    # with a line;\n\nit is told apart, and lies in a folder") == [
        "go on with",
        "told apart",
        "lies in",
    ]
