"""Nothing public without a docstring, no option without help, no environment variable that the manual leaves out."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from anybatch.cli.main import _COMMANDS, argument_classes, main
from anybatch.cli.options import field_help, groups, options

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src/anybatch").rglob("*.py"))
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CLASSES = {
    node.name for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
}


def undocumented(tree: ast.Module, name: str) -> Iterator[str]:
    """Public names without a docstring, and ``Args:`` that are not the arguments.

    An attribute whose type is a class of the package is documented by that class.
    """
    if not ast.get_docstring(tree):
        yield f"{name}: the module has no docstring"
    yield from _undocumented(tree, name)
    yield from _undocumented_attributes(tree, name)


def _undocumented_attributes(parent: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    for node, after in itertools.zip_longest(parent.body, parent.body[1:]):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _undocumented_attributes(node, f"{name}.{node.name}")
        if isinstance(node, ast.AnnAssign):
            target, hint = node.target, ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(parent, ast.Module):
            target, hint = node.targets[0], ast.unparse(node.value).partition("(")[0]
        else:
            continue
        explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        known = set(re.findall(r"\w+", hint)) & {*CLASSES, "TypeVar"}
        if isinstance(target, ast.Name) and not target.id.startswith("_") and not explained and not known:
            yield f"{name}.{target.id}: no docstring below it"


def _undocumented(parent: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    for node in parent.body:
        if not isinstance(node, DEFINITION) or node.name.startswith("_"):
            continue
        here, text = f"{name}.{node.name}", ast.get_docstring(node) or ""
        overload = any(isinstance(x, ast.Name) and x.id == "overload" for x in node.decorator_list)
        method = isinstance(parent, ast.ClassDef) and not isinstance(node, ast.ClassDef)  # trivial ones need none
        if not text and not overload and not method:
            yield f"{here}: no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node, here)
        elif section := re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE):
            described = set(re.findall(r"^ {4}\*{0,2}(\w+):", section[1], re.MULTILINE))
            if described != arguments(node):
                yield f"{here}: Args describes {sorted(described)}, the arguments are {sorted(arguments(node))}"


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    spec = node.args
    found = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return {x.arg for x in found if x is not None} - {"self", "cls"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_public_names_are_documented(path: Path) -> None:
    found = undocumented(ast.parse(path.read_text()), path.stem)
    if "reproduce" in path.parts:  # classes there tell their attributes in their own docstrings
        found = (line for line in found if "below it" not in line)
    assert not list(found)


def test_undocumented_names_are_noticed() -> None:
    source = (
        '"""M."""\nX = 1\nY = 2\n"""Y."""\ndef f(a, b):\n    """F.\n\n    Args:\n        a: x.\n    """\n'
        "class C:\n    p: int\n    q: Batch\n    def g(self): ...\n"
    )
    assert list(undocumented(ast.parse(source), "m")) == [
        "m.f: Args describes ['a'], the arguments are ['a', 'b']",
        "m.C: no docstring",
        "m.X: no docstring below it",
        "m.C.p: no docstring below it",
    ]


def test_every_command_tells_its_options() -> None:
    assert set(argument_classes()) == set(_COMMANDS)


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_every_option_has_help(command: str) -> None:
    kind = argument_classes()[command]
    assert not [option.flag for option in options(kind) if not option.help]
    assert all(groups(kind).values())
    positional = {name for name, hint in kind.__annotations__.items() if "Positional" in str(hint)}
    assert positional <= set(field_help(kind))
    assert re.search(rf"^  {command} ", printed(["--help"]), re.MULTILINE)  # the page of commands has it


@pytest.mark.parametrize("command", ["train", "scale", "eval", "watch", "resume", "doctor", "envs"])
def test_options_are_those_that_tyro_takes(command: str) -> None:
    """Short help pages and completion read the dataclasses themselves; they must not lead a life of their own."""
    everything = ["ppo", "--help", "all"] if command in ("train", "scale") else ["--help"]
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", printed([command, *everything]).replace("--help", "")))
    assert flags == {flag for option in options(argument_classes()[command]) for flag in option.flags}


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_help_fits_a_screen(command: str) -> None:
    lines = printed([command, "--help"]).splitlines()
    assert len(lines) <= 40


def test_environment_variables_are_in_the_manual() -> None:
    """Nothing hidden: what the source reads stands on the page of the command line."""
    read = set()
    for path in SOURCES:
        text = path.read_text()
        read |= set(re.findall(r"(?:environ(?:\.get\(|\[)|getenv\()\s*[\"'](\w+)", text))
        read |= set(re.findall(r"[\"'](ANYBATCH_\w+)", text))
    manual = (ROOT / "docs/command-line.md").read_text()
    assert not {name for name in read if f"`{name}`" not in manual}


def printed(command: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main(command)
    return re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())
