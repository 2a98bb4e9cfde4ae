"""Style shared by all figures. Needs the extra anybatch[plot]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anybatch.errors import AnybatchError

# Okabe and Ito's palette, which colour-blind readers can distinguish
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"

_STYLE = {
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "font.size": 11,
    "axes.titlesize": 11,
    "legend.fontsize": 9.5,
    "legend.title_fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}


def pyplot() -> Any:
    """Import Matplotlib's pyplot, set up to draw to files.

    Raises:
        AnybatchError: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise AnybatchError("figures need Matplotlib: pip install 'anybatch[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


@contextmanager
def figure(path: Path, *, columns: int = 1, rows: int = 1, width: float = 5.0, height: float = 3.2) -> Iterator[Any]:
    """Yield the axes of a new figure, and write it to ``path`` at the end.

    Args:
        path: the PNG (or PDF, SVG) file.
        columns: panels side by side.
        rows: panels above each other.
        width: inches per panel.
        height: inches per panel.

    Yields:
        One Axes, or an array (rows * columns,) of them.
    """
    plt = pyplot()
    with plt.rc_context(_STYLE):
        fig, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained")
        yield axes if rows * columns == 1 else axes.reshape(-1)
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path)
        plt.close(fig)


def in_millions(axis: Any, label: str = "environment steps") -> None:
    """Label a horizontal axis of steps in thousands or millions."""
    from matplotlib.ticker import FuncFormatter

    def text(value: float, _: int) -> str:
        if abs(value) >= 1e6:
            return f"{value / 1e6:g}M"
        return f"{value / 1e3:g}k" if value else "0"

    axis.xaxis.set_major_formatter(FuncFormatter(text))
    axis.set_xlabel(label)
