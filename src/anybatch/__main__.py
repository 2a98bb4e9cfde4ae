"""``python -m anybatch``, the same as the command ``anybatch``."""

from __future__ import annotations

import sys

from anybatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
