"""Trust in import paths that a file names.

A configuration can name Python code: an environment ``import.path:function`` or ``gym:MODULE:ID``, or an encoder
``import.path:Class``. Whoever loads somebody else's run folder would run it. anybatch therefore signs the
configurations that it writes with a key of the user (:func:`anybatch.system.user_key.user_key`), and refuses code that
a file without this signature names, unless the user says that they trust it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from anybatch.config.io import read_yaml
from anybatch.config.schema import TrainConfig
from anybatch.envs.registry import is_importable
from anybatch.errors import ConfigError, shown
from anybatch.system.user_key import user_key

SIGNATURE = "signature"
"""Entry of a configuration file."""

_WITHOUT_CODE = ("procgen", "envpool")


def code_named(config: TrainConfig) -> dict[str, str]:
    """The fields of a configuration that name Python code to import, with their values."""
    family, _, name = config.env.id.partition(":")
    if family == "gym":  # GymV21Environment and its like make what their options name
        env = ":" in name or name.startswith("GymV2")
    else:
        env = bool(name) and family not in _WITHOUT_CODE and is_importable(config.env.id)
    named = {"env.id": config.env.id} if env else {}
    return named | ({"model.encoder": config.model.encoder} if ":" in config.model.encoder else {})


def signature(config: TrainConfig) -> dict[str, str]:
    """Entry for a configuration file that marks its code as trusted by this user; empty if there is no code."""
    key = user_key() if code_named(config) else None
    return {} if key is None else {SIGNATURE: _digest(config, key)}


def require_trust(config: TrainConfig, file: Path, *, trust_code: bool, given: Collection[str] = ()) -> None:
    """Check that this user trusts the code that a configuration names.

    Args:
        config: the configuration.
        file: the file that it comes from.
        trust_code: whether the user allows it.
        given: fields that the user has set, instead of the file.

    Raises:
        ConfigError: the file was not written by anybatch for this user, and names code.
    """
    named = {name: value for name, value in code_named(config).items() if name not in given}
    if not named or trust_code or _is_signed(config, file):
        return
    fields = " and ".join(f"{name} {shown(value)}" for name, value in named.items())
    reason = (
        "was not written by you with anybatch on this machine"
        if user_key() is not None
        else "may not be yours: the key in your data folder, which signs your runs, can be neither read nor created"
    )
    raise ConfigError(
        f"{str(file)!r} names Python code, {fields}, and {reason}, so the code is not imported; if you trust it, "
        "repeat with --trust-code (in Python trust_code=True)"
    )


def _is_signed(config: TrainConfig, file: Path) -> bool:
    content: Any = read_yaml(file)
    written = content.get(SIGNATURE) if isinstance(content, Mapping) else None
    key = user_key() if isinstance(written, str) else None
    return key is not None and hmac.compare_digest(str(written).encode(), _digest(config, key).encode())


def _digest(config: TrainConfig, key: bytes) -> str:
    names = json.dumps(code_named(config), sort_keys=True)  # the rest may be edited by hand
    return hmac.new(key, names.encode(), hashlib.sha256).hexdigest()
