"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned and the others right-aligned.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"The table has {len(header)} columns, but a row has {len(row)} cells: {list(row)}.")
    columns = []
    for index, cells in enumerate(zip(header, *rows, strict=True)):
        width = max(3, *(len(cell) for cell in cells))
        rule = "-" * (width - 1) + (":" if index else "-")
        columns.append([cell.rjust(width) if index else cell.ljust(width) for cell in (cells[0], rule, *cells[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
