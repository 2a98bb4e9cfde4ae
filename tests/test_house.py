"""The layout of the source: small folders and functions, tests beside what they test, exports, plain docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/anybatch"
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
INITS = [path for path in TREES if path.name == "__init__.py"]
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_MODULES, MOST_LINES = 15, 60
OTHER_TESTS = {"benchmarks", "docs", "examples", "golden", "gpu", "learning", "packaging"}
"""Folders of tests of other folders of the repository, and of whole runs."""
CROSS_CUTTING = {"house", "compile", "core_properties"}
"""Tests at the top level that cover several modules."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_folders_are_small() -> None:
    modules = {name_of(init.parent): [x for x in init.parent.glob("*.py") if x.stem[:2] != "__"] for init in INITS}
    assert not {folder: len(paths) for folder, paths in modules.items() if len(paths) > MOST_MODULES}


def test_functions_are_short() -> None:
    lines = {
        f"{name_of(path)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTION)
    }
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_only_system_and_distributed_touch_the_process() -> None:
    """Signals, environment variables and process groups are global: two packages keep track of them."""
    others = {x: tree for x, tree in TREES.items() if x.relative_to(PACKAGE).parts[0] not in ("system", "distributed")}
    assert not [f"{name_of(path)}, {use}" for path, tree in others.items() for use in process_wide(tree)]


def process_wide(tree: ast.Module) -> Iterator[str]:
    """Uses of signals, environment variables and process groups."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Attribute):
            names = {ast.unparse(node)}
        else:
            continue
        for name in sorted(names):
            if re.fullmatch(r"signal(\.\w+)?|os\.(environ|getenv|putenv|unsetenv)|torch\.distributed(\.\w+)?", name):
                yield f"line {node.lineno}: {name}"


def test_process_wide_names_are_noticed() -> None:
    source = (
        "import signal, os\nfrom os import environ\nimport torch.distributed as dist\nos.getenv('X')\n"
        "os.environ['X']\nfrom torch import distributed\nos.kill(1, self.signal)\nfrom anybatch.system import signals\n"
    )
    assert sorted(process_wide(ast.parse(source))) == [
        "line 1: signal",
        "line 2: os.environ",
        "line 3: torch.distributed",
        "line 4: os.getenv",
        "line 5: os.environ",
        "line 6: torch.distributed",
    ]


def test_tests_mirror_the_source() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").parts for path in (ROOT / "tests").rglob("test_*.py")}
    packages = {init.parent.relative_to(PACKAGE).parts for init in INITS}
    assert folders - {(name,) for name in OTHER_TESTS} <= packages
    assert {package[:1] for package in packages} <= {folder[:1] for folder in folders}
    top = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    assert top - CROSS_CUTTING <= {path.stem for path in PACKAGE.glob("*.py")}


def test_private_names_stay_in_their_module() -> None:
    imported = {
        f"{node.module}.{alias.name}": name_of(path)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("anybatch")
        for alias in node.names
    }
    names = {name: path for name, path in imported.items() if re.search(r"\._(?!_)", name)}
    assert set(names) == {"anybatch._lazy.lazy_attributes", "anybatch._version.__version__"}, names


def test_no_merge_left_its_markers() -> None:
    texts = [*ROOT.glob("*.*"), *(x for folder in ("docs", "src", "tests") for x in (ROOT / folder).rglob("*.*"))]
    marked = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    kinds = (".py", ".md", ".toml", ".yml", ".txt", ".cff")
    assert not [str(x) for x in texts if x.suffix in kinds and marked.search(x.read_text())]


def test_docstrings_begin_with_a_noun_or_an_imperative() -> None:
    wrong = re.compile(r"(What|Where|Which|How|Nothing)\b")
    assert not [f"{name_of(x)}: {line}" for x, tree in TREES.items() for line in first_lines(tree) if wrong.match(line)]


def first_lines(tree: ast.Module) -> Iterator[str]:
    """First lines of the docstrings of modules, classes, functions and attributes, public and private."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip().partition("\n")[0]


def test_first_lines_are_read() -> None:
    source = '"""M.\n\nMore."""\nX = 1\n"""A."""\ndef _f():\n    """ F."""\n    return "no docstring"\n'
    assert list(first_lines(ast.parse(source))) == ["M.", "A.", "F."]


def exports(init: Path) -> tuple[list[str], dict[str, str]]:
    """The names in a package's ``__all__``, and for the names that it imports the modules that they come from."""
    imported = {
        alias.name: str(node.module)
        for node in ast.walk(TREES[init])
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("anybatch.")
        for alias in node.names
        if alias.name != "lazy_attributes"
    }
    names = assigned(init).get("__all__")
    return (ast.literal_eval(names) if names else []), imported


def assigned(init: Path) -> dict[str, ast.expr]:
    return {ast.unparse(x.targets[0]): x.value for x in TREES[init].body if isinstance(x, ast.Assign)}


def test_packages_export_what_they_import() -> None:
    for init in INITS:
        names, imported = exports(init)
        assert sorted(names) == sorted(imported), name_of(init)


def test_lazy_packages_load_what_type_checkers_see() -> None:
    lazy = [init for init in INITS if "__getattr__" in assigned(init)]
    assert lazy
    for init in lazy:
        package = ".".join(init.parent.relative_to(PACKAGE.parent).parts)
        call = assigned(init)["__getattr__"]
        assert isinstance(call, ast.Call)
        homes = {name: f"{package}.{home}" for name, home in ast.literal_eval(call.args[1]).items()}
        assert homes == {name: x for name, x in exports(init)[1].items() if name != "__version__"}, name_of(init)


def test_no_export_is_named_like_a_module_of_its_package() -> None:
    """``import anybatch.p.x`` and ``from anybatch.p import x`` would give different objects."""
    for init in INITS:
        modules = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
        assert not modules & set(exports(init)[0]), name_of(init)


def test_map_names_every_folder_and_module() -> None:
    map_ = (ROOT / "CONTRIBUTING.md").read_text().partition("src/anybatch/\n")[2].partition("```")[0]
    modules = {f"  {path.name}" for path in PACKAGE.glob("[a-z]*.py")}
    packages = {f"  {init.parent.name}/" for init in PACKAGE.glob("*/__init__.py")}
    folders = {f"{name}/" for name in ("examples", "notebooks", "docs", "benchmarks", "tests", "tools")}
    assert set(re.findall(r"^ *\S+", map_, re.MULTILINE)) == modules | packages | folders


def test_paths_in_the_documentation_exist() -> None:
    """Paths in code are relative to the repository or to the package."""
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "compared-libraries.md"}  # theirs
    named = {path for page in pages for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", page.read_text())}
    assert named
    assert not [path for path in named if not (ROOT / path).exists() and not (PACKAGE / path).exists()]


def test_readers_are_shown_imports_from_packages() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    shown = {
        name: page.name
        for page in (*pages, *(ROOT / "examples").glob("*.py"))
        for name in re.findall(r"(?:from|import) (anybatch[.\w]*)", page.read_text())
    }
    public = {"anybatch", *(f"anybatch.{path.stem}" for path in PACKAGE.glob("[a-z]*.py"))}
    public |= {".".join(init.parent.relative_to(PACKAGE.parent).parts) for init in INITS if exports(init)[0]}
    public |= {f"anybatch.integrations.{path.stem}" for path in (PACKAGE / "integrations").glob("[a-z]*.py")}
    assert "anybatch.scaling" in shown
    assert set(shown) <= public, shown
