"""The user's key: made once, also where a file system has no hard links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anybatch.system.user_key import user_key


@pytest.mark.parametrize("links", [True, False])
def test_the_key_is_made_once(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    key = user_key()
    assert key is not None and len(key) == 32
    assert user_key() == key
    (path,) = (tmp_path / "anybatch").iterdir()  # and nothing temporary
    assert path.read_bytes() == key and path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(key[:-1])
    assert user_key() is None
