"""Docstrings as Markdown for the API reference: links, code blocks, and asterisks that are multiplication signs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):`~?([\w.]+)`")
_DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?:>>>|\.\.\.) .*)*", re.MULTILINE)
_LITERAL = re.compile(r"(?<=:):\n\n((?: {4}.*\n?|\n)+)")
_CODE = re.compile(r"(```.*?```|``.+?``|`.+?`)", re.DOTALL)


class MarkdownDocstrings(griffe.Extension):
    """Translates the docstrings of a package once all its modules are loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstring of every module, class, function and attribute."""
        public = _public(pkg)
        for obj in _objects(pkg):
            if obj.docstring is None:
                obj.public = False if obj.is_special else obj.public  # a __post_init__ says nothing to a reader
            else:
                text = _with_code_blocks(obj.docstring.value)
                text = _ROLE.sub(lambda match, scope=obj: _link(match[1], scope, public), text)
                obj.docstring.value = _escaped(text)


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """An object and everything that is defined in it."""
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _public(pkg: griffe.Module) -> dict[str, str]:
    """Addresses in the reference, by the path of the definition.

    Packages appear with the names that they export; modules at the top of the package and modules of ``integrations``
    appear with the names that they define.
    """
    addresses: dict[str, str] = {}
    for module in (x for x in _objects(pkg) if x.is_module and not x.is_private):
        if module.exports:
            members = [module.members[str(name)] for name in module.exports]
        elif module.parent in (pkg, pkg.members["integrations"]):
            members = [x for x in module.members.values() if not x.is_alias and x.is_public]
        else:
            continue
        addresses[module.path] = module.path
        if module is not pkg:  # whose names are shortcuts to those of packages
            addresses |= {_defined(member).path: member.path for member in members}
    return addresses


def _defined(obj: griffe.Object | griffe.Alias) -> griffe.Object:
    return obj.final_target if isinstance(obj, griffe.Alias) else obj


def _with_code_blocks(text: str) -> str:
    """Doctests and the indented blocks after ``::`` as fenced blocks, without prompts."""

    def doctest(match: re.Match[str]) -> str:
        return _fence(re.sub(r"^ *(?:>>>|\.\.\.) ", "", match[0], flags=re.MULTILINE), match[1])

    def literal(match: re.Match[str]) -> str:
        return "\n\n" + _fence(re.sub(r"^ {4}", "", match[1].rstrip(), flags=re.MULTILINE), "") + "\n\n"

    return _LITERAL.sub(literal, _DOCTEST.sub(doctest, text))


def _fence(code: str, indent: str) -> str:
    return "\n".join(indent + line for line in ("```python", *code.splitlines(), "```"))


def _escaped(text: str) -> str:
    """Asterisks outside code escaped: products such as N*T and shapes such as (*leading, K) are no emphasis."""
    parts = _CODE.split(text)
    parts[::2] = (re.sub(r"(?<=\w)\*(?=\w)|\*(?=\w+[,)])", r"\*", part) for part in parts[::2])
    return "".join(parts)


def _link(name: str, scope: griffe.Object, public: dict[str, str]) -> str:
    """A link to the object that ``name`` means in ``scope``, or plain code if the reference does not show it."""
    obj = _resolved(name, scope)
    path = ""
    while obj is not None and obj.path not in public and obj.parent is not None and obj.parent.is_class:
        obj, path = obj.parent, f".{obj.name}{path}"
    if obj is None or obj.path not in public:
        return f"`{name}`"
    return f"[`{name}`][{public[obj.path]}{path}]"


def _resolved(name: str, scope: griffe.Object) -> griffe.Object | None:
    """The object of this package that ``name`` means in ``scope``, if there is one."""
    first, *rest = name.split(".")
    around: griffe.Object | None = scope
    while around is not None and first not in around.members and first != around.path:
        around = around.parent
    if around is None:
        return None
    obj: griffe.Object | griffe.Alias | None = around if first == around.path else around.members[first]
    try:
        for part in rest:
            obj = _defined(obj).members.get(part) if obj is not None else None
        return None if obj is None else _defined(obj)
    except griffe.AliasResolutionError:  # a name of another library
        return None
