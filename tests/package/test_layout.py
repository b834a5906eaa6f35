"""The layout of src/tileattn: no import circles, arrows that point down, and files and functions of a size to read.

Imports under TYPE_CHECKING do not count, those inside functions do. A package's `__init__.py` is no part of a circle:
it re-exports names of the files beside it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import tileattn

PACKAGE = Path(tileattn.__file__).parent
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name for name in FILES if not name.endswith("__init__")}

MAX_LINES, MAX_BODY, MAX_POSITIONAL = 400, 80, 10

# A folder imports from folders of later lines only, and from the files of the last line. One-line modules lie on top,
# for users.
LAYERS = [
    {"__main__", "math", "masks", "scores", "profiling"},
    {"cli"},
    {"viz"},
    {"bench"},
    {"nn", "compat", "parallel"},
    {"api"},
    {"runtime"},
    {"testing"},  # above the kernels: emulate() takes their generated code
    {"kernels"},
    {"tuner"},
    {"measure"},
    {"reference"},
    {"variant"},
    {"call"},
    {"folders", "installation"},
]

# --- Reading the sources ---


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_bytes())


def runs(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is inside, but for what only type checkers see."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for other in node.orelse:
            yield from runs(other)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from runs(child)


def imports(name: str) -> Iterator[tuple[str, str]]:
    """What a file imports of tileattn: (module below the package, name that is taken), the name "" for the module."""
    package = ["tileattn", *name.split(".")[:-1]]
    for node in runs(tree_of(name)):
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            imported = [(source, alias.name) for alias in node.names]
        else:
            continue
        for source, member in imported:
            if source.partition(".")[0] == "tileattn":
                below = source.removeprefix("tileattn").lstrip(".")
                whole = f"{below}.{member}".strip(".")
                yield (whole, "") if whole in FILES else (below, member)


@functools.cache
def edges() -> dict[str, set[str]]:
    """Which modules a module imports."""
    return {name: {module for module, _ in imports(name) if module in MODULES} - {name} for name in MODULES}


def folded(package: str) -> dict[str, set[str]]:
    """The same arrows between the files and folders of one package."""
    below = f"{package}." if package else ""

    def place(name: str) -> str | None:
        return name.removeprefix(below).partition(".")[0] if name.startswith(below) else None

    arrows: dict[str, set[str]] = {}
    for name, targets in edges().items():
        if here := place(name):
            there = {place(target) for target in targets}
            arrows.setdefault(here, set()).update(each for each in there if each and each != here)
    return arrows


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Groups of which each member reaches every other."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        reachable, waiting = set(), [start]
        while waiting:
            for target in arrows.get(waiting.pop(), ()):
                if target not in reachable:
                    reachable.add(target)
                    waiting.append(target)
        reached[start] = reachable
    groups = {
        frozenset(each for each in reachable if start in reached.get(each, ())) for start, reachable in reached.items()
    }
    return [set(group) for group in groups if group]


def packages() -> list[str]:
    return sorted({"", *(name.rpartition(".")[0] for name in FILES if name.endswith(".__init__"))})


def header(name: str) -> str:
    return ast.get_docstring(tree_of(name)) or ""


# --- Circles and arrows ---


def test_circles_are_found() -> None:
    """Otherwise the tests below would check nothing."""
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert sorted(circles(arrows), key=len) == [{"e"}, {"b", "c"}]
    assert {"variant.masks", "call.facts", "kernels.cache.store"} <= MODULES
    assert "runtime.run" in edges()["api.attention"]
    assert "kernels.tilelang.backend" in edges()["runtime.dispatch"]
    assert {"variant", "call"} <= folded("")["runtime"]


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert circles(edges()) == []


@pytest.mark.parametrize("package", packages())
def test_no_folder_imports_itself_by_way_of_others(package: str) -> None:
    assert circles(folded(package)) == []


def test_folders_import_from_those_below_them() -> None:
    rank = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    assert set(folded("")) <= set(rank), "a new folder needs a place in LAYERS"
    up = {(here, there) for here, targets in folded("").items() for there in targets if rank[there] <= rank[here]}
    assert up == set()


def test_the_library_does_not_import_the_benchmark() -> None:
    for name, targets in edges().items():
        if name.partition(".")[0] not in ("__main__", "cli", "viz", "bench"):
            assert not {target for target in targets if target.partition(".")[0] in ("bench", "cli")}, name


def test_what_is_private_to_a_file_is_not_imported_by_another() -> None:
    taken = {
        f"{name} takes {module}.{member}"
        for name in FILES
        for module, member in imports(name)
        if member.startswith("_") and not member.startswith("__")
    }
    assert taken == set()


# --- Sizes ---


def test_files_are_short() -> None:
    """A longer one says why in its header."""
    long = {name for name, path in FILES.items() if path.read_text().count("\n") > MAX_LINES}
    assert {name for name in long if f"{MAX_LINES} lines" not in header(name)} == set()


def functions(name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree_of(name)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_functions_are_short() -> None:
    """Without their docstrings. The header of a file with a longer one says why."""
    long = set()
    for name in FILES:
        for function in functions(name):
            docstring = ast.get_docstring(function, clean=False)
            lines = (function.end_lineno or 0) - function.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
            if lines > MAX_BODY and f"{MAX_BODY} lines" not in header(name):
                long.add(f"{name}.{function.name}")
    assert long == set()


@functools.cache
def registered() -> set[str]:
    """Functions that are handed to `torch.library.custom_op` or, as `app.command()(function)`, to the command line."""
    operators = set()
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func).endswith("custom_op"):
                operators.add(ast.unparse(node.args[1]))
            elif isinstance(node.func, ast.Call) and ast.unparse(node.func.func).endswith(".command"):
                operators.update(map(ast.unparse, node.args))
    return operators


def has_a_signature_of_others(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Signatures that other libraries fix, and those of `torch.library` operators and of commands."""
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    others = name.partition(".")[0] == "compat" or "register_fake" in decorators or ".command(" in decorators
    return others or function.name in registered()


def test_functions_take_few_positional_arguments() -> None:
    """The header of a file with one that takes more says why."""
    many = {
        f"{name}.{function.name}"
        for name in FILES
        for function in functions(name)
        if len(function.args.posonlyargs + function.args.args) > MAX_POSITIONAL
        and not has_a_signature_of_others(name, function)
        and not any(words in header(name) for words in ("positional arguments", "more than ten arguments"))
    }
    assert many == set()
