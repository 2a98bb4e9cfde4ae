"""Style shared by all figures. Needs the extra anybatch[plot]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anybatch.errors import AnybatchError, install_command

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
        raise AnybatchError(f"figures need Matplotlib: {install_command('plot')}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


@contextmanager
def figure(
    path: Path, panels: int = 1, *, columns: int = 4, width: float = 3.0, height: float = 2.4, label: str = ""
) -> Iterator[Any]:
    """Yield the axes (panels,) of a new figure, and write it to ``path``, a PNG, PDF or SVG file, at the end.

    Args:
        path: the file.
        panels: number of panels, in rows from left to right.
        columns: maximum number of panels in a row.
        width: inches per panel.
        height: inches per panel.
        label: of the vertical axis, beside the first panel of each row.
    """
    plt = pyplot()
    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    with plt.rc_context(_STYLE):
        size = (width * columns, height * rows)
        fig, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        for axis in axes[:, 0]:
            axis.set_ylabel(label)
        for axis in axes.flat[panels:]:
            axis.axis("off")
        yield axes.flat[:panels]
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path)
        plt.close(fig)


def in_millions(axis: Any) -> None:
    """Label a horizontal axis of steps in thousands or millions."""
    from matplotlib.ticker import FuncFormatter

    def text(value: float, _: int) -> str:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if value else "0"

    axis.xaxis.set_major_formatter(FuncFormatter(text))
    axis.set_xlabel("environment steps")
