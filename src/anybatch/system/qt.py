"""Qt 5 for Procgen, from the PyQt5-Qt5 wheel, whose libraries are not on the loader's path."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

# In the order of their dependencies.
_LIBRARIES = ("libicudata.so*", "libicuuc.so*", "libicui18n.so*", "libQt5Core.so.5", "libQt5Gui.so.5")


@functools.cache
def load_qt() -> bool:
    """Load the wheel's Qt into this process, once; False if that fails. The system's Qt 5 may be present instead."""
    wheel = importlib.util.find_spec("PyQt5")
    for root in (wheel.submodule_search_locations or []) if wheel else []:
        folder = Path(root) / "Qt5" / "lib"
        paths = [sorted(folder.glob(pattern)) for pattern in _LIBRARIES]
        try:
            for matches in paths:
                if matches:
                    ctypes.CDLL(str(matches[0]), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            return False
        return bool(paths[-1])
    return False
