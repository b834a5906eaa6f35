"""Which files of tileattn generate a kernel, and a digest of them for the kernel's key in the cache.

They are the *import closure* of the module that generates it: the module, what it imports from tileattn, what that
imports, and so on. Imports inside functions count, those for type checkers alone do not. The closure is read from the
sources; nothing is imported, so that a kernel that is in the cache is found without its compiler.

A package's ``__init__.py`` counts where a name is taken from it. That Python runs it on the way to a module in the
package gives this module nothing.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[2]

# Python's parser takes ten times as long for all of a file (90 ms for a backward kernel's closure) as for its imports
# alone; tests/kernels/cache/test_sources.py compares the two. They begin a line, and may go on between parentheses or
# behind a "\\".
_STATEMENTS = re.compile(
    rb"^[ \t]*((?:from[ \t]+(?:\.|%b\b)|import[ \t]+[^\n]*\b%b\b)(?:[^\n(\\]|\\\n)*(?:\((?:[^)#]|#[^\n]*)*\))?)"
    % ((PACKAGE.encode(),) * 2),
    re.MULTILINE,
)
_FOR_TYPE_CHECKERS = re.compile(rb"^if TYPE_CHECKING:[ \t]*\n(?:[ \t]+[^\n]*\n|[ \t]*\n)+", re.MULTILINE)

Read = Callable[[Path], bytes]


@functools.cache
def digest(*modules: str) -> str:
    """Of the sources of these modules and of all that they import from tileattn; read once a process.

    Args:
        modules: their full names, such as "tileattn.kernels.tilelang.forward.kernel".
    """
    return digest_of(closure(modules))


def digest_of(sources: dict[str, bytes]) -> str:
    """Of modules by their names, in any order: 16 hexadecimal digits."""
    together = hashlib.sha256()
    for name in sorted(sources):
        together.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return together.hexdigest()[:16]


def closure(modules: Iterable[str], read: Read = Path.read_bytes) -> dict[str, bytes]:
    """The sources of modules and of all that they import from tileattn, by their full names.

    Args:
        modules: full names.
        read: takes the path of a file and returns its content.

    Raises:
        ModuleNotFoundError: one of them is not a file of tileattn.
    """
    found: dict[str, bytes] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        file = _file(name)
        if file is None:
            raise ModuleNotFoundError(f"{name} is not a module of {ROOT}")
        found[name] = read(file)
        waiting += imports(found[name], name if file.name == "__init__.py" else name.rpartition(".")[0])
    return found


def imports(source: bytes, package: str) -> set[str]:
    """The modules of tileattn that a file imports by itself.

    Args:
        source: the file's content.
        package: the full name of the package that the file is in, or is.
    """
    found: set[str] = set()
    for statement in _STATEMENTS.findall(_FOR_TYPE_CHECKERS.sub(b"", source)):
        for node in ast.parse(statement).body:
            found.update(_modules(node, package))
    return found


def _modules(node: ast.stmt, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        if source.partition(".")[0] == PACKAGE:
            members = [f"{source}.{alias.name}" for alias in node.names]
            yield from (member if _file(member) else source for member in members)


@functools.cache
def _file(name: str) -> Path | None:
    """The file of a module or, of a package, its ``__init__.py``."""
    path = ROOT.joinpath(*name.split(".")[1:])
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in files if file.is_file()), None)
