"""Qt 5 for Procgen, out of the PyQt5-Qt5 wheel: its libraries are in no place where the loader would look."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

# In the order in which they need each other.
_LIBRARIES = ("libicudata.so*", "libicuuc.so*", "libicui18n.so*", "libQt5Core.so.5", "libQt5Gui.so.5")


@functools.cache
def load_qt() -> bool:
    """Load the wheel's Qt into this process, once; False if the wheel is missing or its libraries do not load.

    False need not be the end: the system's own Qt 5 does as well.
    """
    wheel = importlib.util.find_spec("PyQt5")
    for root in (wheel.submodule_search_locations or []) if wheel else []:
        folder = Path(root) / "Qt5" / "lib"
        paths = [sorted(folder.glob(pattern)) for pattern in _LIBRARIES]
        try:
            for found in paths:
                if found:
                    ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            return False
        return bool(paths[-1])
    return False
