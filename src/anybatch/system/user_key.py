"""A random key of this user on this machine, with which anybatch recognises the files that it has written for them."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

_BYTES = 32


def user_key() -> bytes | None:
    """The key, made when it is first needed; None if the user's data folder cannot be written."""
    try:
        path = _data_folder() / "anybatch" / "key"
        temporary = path.with_name(f".key.{secrets.token_hex(8)}")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb", opener=_private) as file:
                file.write(secrets.token_bytes(_BYTES))
            try:
                os.link(temporary, path)  # complete or not at all, and never replacing that of another process
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                with open(path, "xb", opener=_private) as file:
                    file.write(temporary.read_bytes())
            finally:
                temporary.unlink()
    except FileExistsError:
        pass
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    try:
        key = path.read_bytes()
    except OSError:
        return None
    return key if len(key) == _BYTES else None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _data_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
