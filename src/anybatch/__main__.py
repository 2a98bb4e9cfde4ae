"""Start of the command ``anybatch``, also as ``python -m anybatch``."""

from __future__ import annotations

import sys

from anybatch.system.launcher import end_with_launcher
from anybatch.system.start_up import exit_on_signals, ignore_signals


def main() -> int:
    """Run the command of the command line; returns the exit code."""
    # before the imports, which take a while
    exit_on_signals()
    end_with_launcher()
    from anybatch.cli.main import main as run

    try:
        return run()
    finally:
        ignore_signals()


if __name__ == "__main__":
    sys.exit(main())
