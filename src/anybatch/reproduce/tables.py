"""Tables in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anybatch.reproduce.statistics import Array


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, its first column left-aligned and the others right-aligned.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"The table has {len(header)} columns, but a row has {len(row)} cells: {list(row)}.")
    columns = []
    for index, cells in enumerate(zip(header, *rows, strict=True)):
        cells = tuple(cell.replace("|", r"\|") for cell in cells)
        width = max(3, *(len(cell) for cell in cells))
        rule = "-" * (width - 1) + (":" if index else "-")
        columns.append([cell.rjust(width) if index else cell.ljust(width) for cell in (cells[0], rule, *cells[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def means_by_task(values: Array) -> list[str]:
    """Cells with the mean over seeds for each task, then over all; values are (seeds, tasks)."""
    return [f"{x:.3f}" for x in (*values.mean(0), values.mean())]


def interval(low: float, high: float) -> str:
    """A confidence interval in print; with one seed it is NaN."""
    return "one seed" if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"


def p_value(p: float) -> str:
    """A probability in print: 0.023, 4.1e-07."""
    return f"{p:.1e}" if p < 0.001 else f"{p:.3f}"
