"""``anybatch report``: an HTML page about results or runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def main(
    folders: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[FOLDER...]", help_behavior_hint="")] = (),
    /,
    out: Path | None = None,
) -> int:
    """Write one HTML page: figures, tables, commands, seeds, versions, machine.

    Args:
        folders: Folders of `anybatch reproduce run`, or run folders; by default runs/reproduce-laptop.
        out: File to write, or folder for report.html; by default the first folder.
    """
    from anybatch.reproduce.report import write_report

    print(f"wrote {write_report(list(folders) or [Path('runs') / 'reproduce-laptop'], out)}")
    return 0
