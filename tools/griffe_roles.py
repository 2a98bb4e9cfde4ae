"""Links in the API reference: docstrings name other objects as :func:`x`, :class:`x`, ..., the site links them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):`~?([\w.]+)`")


class Roles(griffe.Extension):
    """Replaces every role by a Markdown cross-reference to the object that it names, as seen from the docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda match: _link(match[1], obj), obj.docstring.value)


def _link(name: str, obj: griffe.Object) -> str:
    first, dot, rest = name.partition(".")
    if first == "anybatch":
        return f"[`{name}`][{name}]"
    scope: griffe.Object | None = obj
    while scope is not None and first not in scope.members:
        scope = scope.parent
    if scope is None:
        return f"`{name}`"  # a name of another library, or of Python
    member = scope.members[first]
    path = member.target_path if isinstance(member, griffe.Alias) else member.path
    return f"[`{name}`][{path}{dot}{rest}]" if path.startswith("anybatch.") else f"`{name}`"
