"""Encoders given as classes, since a configuration is plain text."""

from __future__ import annotations

import sys
from typing import Any

from anybatch.errors import ConfigError, shown


def encoder_path(encoder: Any) -> str:
    """The path ``import.path:Class`` under which any process finds an encoder class.

    A class of the program that was started, ``__main__``, is found by programs that define it too.

    Raises:
        ConfigError: it is no class, or its module does not have it under its name.
    """
    if not isinstance(encoder, type):
        raise ConfigError(
            f"model.encoder is {shown(encoder)}, but must be impala, nature, small-conv, mlp, auto, "
            "import.path:Class, or the class"
        )
    module, name = encoder.__module__, encoder.__qualname__
    if getattr(sys.modules.get(module), name, None) is not encoder:
        raise ConfigError(
            f"model.encoder is the class {name}, which cannot be imported again from {module}: define it at the top "
            "level of a module"
        )
    return f"{module}:{name}"


def is_in_main(encoder: str) -> bool:
    """Whether an encoder is a class of ``__main__``, a path that names something else in every program."""
    return encoder.startswith("__main__:")
