"""Docstrings of public names, help of options, and environment variables in the manual."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from anybatch.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/anybatch"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CLASSES = {
    node.name: node
    for path in SOURCES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
}
PROTOCOL_ATTRIBUTES = {
    ast.unparse(attribute.target)
    for node in CLASSES.values()
    if "Protocol" in map(ast.unparse, node.bases)
    for attribute in node.body
    if isinstance(attribute, ast.AnnAssign)
}


def exports(package: ast.Module) -> dict[str, str]:
    """Exported name -> the module that it is imported from, by the imports of an ``__init__``."""
    (names,) = [
        ast.literal_eval(node.value)
        for node in package.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ] or [[]]
    imported = {
        alias.name: str(node.module)
        for node in ast.walk(package)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name: imported[name] for name in names}


def public_names() -> dict[str, set[str] | None]:
    """Module (dotted) -> its public names: those that packages export; None for all names of a public module."""
    public: dict[str, set[str] | None] = {}
    for init in PACKAGE.rglob("__init__.py"):
        for name, module in exports(ast.parse(init.read_text())).items():
            names = public.setdefault(module, set())
            assert names is not None
            names.add(name)
    modules = [*PACKAGE.glob("*.py"), *(PACKAGE / "integrations").glob("*.py")]
    everything = {dotted(path): None for path in modules if not path.stem.startswith("_")}
    return {**public, **everything}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def undocumented(tree: ast.Module, module: str, names: set[str] | None = None) -> Iterator[str]:
    """Public functions, classes and attributes without a docstring, and ``Args:`` that are not the arguments.

    An attribute is documented by the class of the package that is its type, or by the protocol that asks for it. A
    method may go without a docstring if its name and signature say everything.

    Args:
        tree: the module.
        module: its name, for the messages.
        names: the public ones; None: all that have no leading underscore.
    """
    if not ast.get_docstring(tree):
        yield f"{module}: the module has no docstring"
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        name = defined_name(node)
        if name is None or name.startswith("_") or (names is not None and name not in names):
            continue
        if isinstance(node, DEFINITION):
            yield from _undocumented(node, f"{module}.{name}")
        elif not _explained(node, after):
            yield f"{module}.{name}: no docstring below it"


def defined_name(node: ast.stmt) -> str | None:
    if isinstance(node, DEFINITION):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None


def _undocumented(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, here: str, *, inside: bool = False
) -> Iterator[str]:
    text = ast.get_docstring(node) or ""
    overload = any(isinstance(x, ast.Name) and x.id == "overload" for x in node.decorator_list)
    method = inside and not isinstance(node, ast.ClassDef)
    if not text and not overload and not method:
        yield f"{here}: no docstring"
    if isinstance(node, ast.ClassDef):
        for inner, after in itertools.zip_longest(node.body, node.body[1:]):
            name = defined_name(inner)
            if name is None or name.startswith("_") or name in PROTOCOL_ATTRIBUTES:
                continue
            if isinstance(inner, DEFINITION):
                yield from _undocumented(inner, f"{here}.{name}", inside=True)
            elif isinstance(inner, ast.AnnAssign) and not _explained(inner, after):
                yield f"{here}.{name}: no docstring below it"
    elif section := re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE):
        described = set(re.findall(r"^ {4}\*{0,2}(\w+):", section[1], re.MULTILINE))
        if described != arguments(node):
            yield f"{here}: Args describes {sorted(described)}, the arguments are {sorted(arguments(node))}"


def _explained(node: ast.stmt, after: ast.stmt | None) -> bool:
    """Whether an attribute has a docstring below it, or a type that is a documented class."""
    hint = node.annotation if isinstance(node, ast.AnnAssign) else getattr(node, "value", node)
    words = set(re.findall(r"\w+", ast.unparse(hint).partition("(")[0]))
    text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return text or bool(words & {*CLASSES, "TypeVar"})


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    spec = node.args
    found = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return {x.arg for x in found if x is not None} - {"self", "cls"}


@pytest.mark.parametrize("module", sorted(public_names()))
def test_public_names_are_documented(module: str) -> None:
    path = ROOT / "src" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    absent = undocumented(ast.parse(path.read_text()), module.rpartition(".")[2], public_names()[module])
    if "reproduce" in path.parts:  # classes there describe their attributes in their own docstrings
        absent = (line for line in absent if "below it" not in line)
    assert not list(absent)


def test_undocumented_names_are_noticed() -> None:
    source = (
        '"""M."""\nX = 1\nY = 2\n"""Y."""\ndef f(a, b):\n    """F.\n\n    Args:\n        a: x.\n    """\n'
        "class C:\n    p: int\n    q: Batch\n    def g(self): ...\n"
        '    def h(self, a):\n        """H.\n\n        Args:\n            b: x.\n        """\n'
    )
    everything = [
        "m.X: no docstring below it",
        "m.f: Args describes ['a'], the arguments are ['a', 'b']",
        "m.C: no docstring",
        "m.C.p: no docstring below it",
        "m.C.h: Args describes ['b'], the arguments are ['a']",
    ]
    assert list(undocumented(ast.parse(source), "m")) == everything
    assert list(undocumented(ast.parse(source), "m", {"X", "Y"})) == everything[:1]


def test_exports_of_a_lazy_package_are_read() -> None:
    source = "if TYPE_CHECKING:\n    from anybatch.a.b import x, y\n__all__ = ['x']\n"
    assert exports(ast.parse(source)) == {"x": "anybatch.a.b"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(command: str) -> None:
    assert re.search(rf"^  {command} ", printed(["--help"]), re.MULTILINE)  # the page of commands has it
    arguments = {"train": ["ppo", "--help", "all"], "scale": ["ppo", "--help", "all"], "reproduce": ["run", "--help"]}
    _, *options = re.split(r"\n(?=[^\w-]*(?:-h, )?--[a-z])", printed([command, *arguments.get(command, ["--help"])]))
    assert options
    for option in options[1:]:  # the first is --help
        assert re.search(r"[A-Za-z0-9)\]]\.(?=\W)", option), f"{option} has no sentence that explains it"


@pytest.mark.parametrize("command", COMMANDS)
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
