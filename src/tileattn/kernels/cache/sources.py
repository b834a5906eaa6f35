"""The source files that generate a kernel, and a digest of them for the kernel's key in the cache.

These files are the *import closure* of the module that generates the kernel: the module itself, the modules of tileattn
that it imports, their imports, and so on. Imports inside functions count; imports for type checkers only do not. The
closure is read from the source text without importing anything, so that looking up a cached kernel does not import its
compiler.

A package's ``__init__.py`` is in the closure only if a name is imported from it. That Python also runs it before a
module of the package does not count.
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

# Matches import statements of tileattn. They begin a line and may continue in parentheses or after a "\\". Parsing only
# the imports takes a tenth of the time of parsing whole files (90 ms for a backward kernel's closure);
# tests/kernels/cache/test_sources.py checks that both find the same imports.
_STATEMENTS = re.compile(
    rb"^[ \t]*((?:from[ \t]+(?:\.|%b\b)|import[ \t]+[^\n]*\b%b\b)(?:[^\n(\\]|\\\n)*(?:\((?:[^)#]|#[^\n]*)*\))?)"
    % ((PACKAGE.encode(),) * 2),
    re.MULTILINE,
)
_FOR_TYPE_CHECKERS = re.compile(rb"^if TYPE_CHECKING:[ \t]*\n(?:[ \t]+[^\n]*\n|[ \t]*\n)+", re.MULTILINE)

Read = Callable[[Path], bytes]


@functools.cache
def digest(*modules: str) -> str:
    """The digest of the import closure of these modules. The files are read once per process.

    Args:
        modules: full names, such as "tileattn.kernels.tilelang.forward.kernel".
    """
    return digest_of(closure(modules))


def digest_of(sources: dict[str, bytes]) -> str:
    """The digest of names and contents, in any order: 16 hexadecimal digits."""
    sha256 = hashlib.sha256()
    for name in sorted(sources):
        sha256.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return sha256.hexdigest()[:16]


def closure(modules: Iterable[str], read: Read = Path.read_bytes) -> dict[str, bytes]:
    """The import closure of modules: the contents of their files by full name.

    Args:
        modules: full names.
        read: returns the content of the file at a path.

    Raises:
        ModuleNotFoundError: a name is not a module of tileattn.
    """
    sources: dict[str, bytes] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        file = _file(name)
        if file is None:
            raise ModuleNotFoundError(f"{name} is not a module of {ROOT}")
        sources[name] = read(file)
        waiting += imports(sources[name], name if file.name == "__init__.py" else name.rpartition(".")[0])
    return sources


def imports(source: bytes, package: str) -> set[str]:
    """The modules of tileattn that a file imports directly.

    Args:
        source: the file's content.
        package: the full name of the file's package; for an ``__init__.py``, of the package itself.
    """
    modules: set[str] = set()
    for statement in _STATEMENTS.findall(_FOR_TYPE_CHECKERS.sub(b"", source)):
        for node in ast.parse(statement).body:
            modules.update(_modules(node, package))
    return modules


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
    """The file of a module, which is ``__init__.py`` for a package; None if there is no such module."""
    path = ROOT.joinpath(*name.split(".")[1:])
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in files if file.is_file()), None)
