"""Shows the package's own code in a page, by name, so that a page cannot show code that is no longer there.

A line of its own in a page's Markdown:

    {{ source kernels/tilelang/tile/softmax.py update }}                      a function or a class of src/tileattn
    {{ source kernels/tilelang/forward/generic.py body.kernel from "for step in" to "T.gemm(weights" }}      lines of it
    {{ docstring kernels/tilelang/forward/hopper/kernel.py }}                           a file's docstring

`from` and `to` name the first lines, at or after one another, that contain a text; both lines are shown. What does not
resolve ends the build.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src/tileattn"
MACRO = re.compile(
    r"^\{\{ (?P<kind>source|docstring) (?P<file>\S+?)(?: (?P<name>[\w.]+))?"
    r'(?: from "(?P<start>[^"\n]+)")?(?: to "(?P<end>[^"\n]+)")? \}\}$',
    re.MULTILINE,
)
# What looks like a macro and is none is a mistake.
LOOSE = re.compile(r"^.*\{\{ ?(?:source|docstring)\b.*$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """mkdocs' hook: the page with its macros replaced."""
    return expand(markdown, page.file.src_uri)


def expand(markdown: str, where: str) -> str:
    """A page's Markdown with its macros replaced; ValueError names the page and the macro that does not resolve."""

    def block(match: re.Match[str]) -> str:
        try:
            return _block(**match.groupdict())
        except (LookupError, OSError, SyntaxError) as error:
            raise ValueError(f"{where}: {match[0]}: {error}") from error

    done = MACRO.sub(block, markdown)
    if (rest := LOOSE.search(done)) is not None:
        raise ValueError(f"{where}: {rest[0]!r} is not understood")
    return done


def _block(kind: str, file: str, name: str | None, start: str | None, end: str | None) -> str:
    if kind == "docstring":
        text = ast.get_docstring(ast.parse((PACKAGE / file).read_text()))
        if text is None:
            raise LookupError("the file has no docstring")
        return f'```text title="{file}"\n{text}\n```'
    lines, first = source(file, name, start, end)
    return f'```python title="{file}" linenums="{first}"\n{lines}\n```'


def source(file: str, name: str | None = None, start: str | None = None, end: str | None = None) -> tuple[str, int]:
    """Lines of a file of the package, without their common indentation, and the number of the first.

    Args:
        file: below src/tileattn.
        name: of a function, class or assigned name, with dots for what is inside: "body.kernel"; None: the whole file.
        start, end: texts of the first and the last line, within what is named.

    Raises:
        LookupError: no such name or line.
    """
    text = (PACKAGE / file).read_text()
    lines = text.splitlines()
    first, last = (1, len(lines)) if name is None else _lines_of(ast.parse(text), name.split("."))
    if start is not None:
        first = _find(lines, start, first, last)
    if end is not None:
        last = _find(lines, end, first, last)
    return textwrap.dedent("\n".join(lines[first - 1 : last])), first


def _lines_of(tree: ast.AST, names: list[str]) -> tuple[int, int]:
    """First and last line of a definition, with its decorators."""
    for node in ast.iter_child_nodes(tree):
        if names[0] not in _defines(node):
            continue
        if len(names) > 1:
            return _lines_of(node, names[1:])
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
        return first, node.end_lineno  # type: ignore[attr-defined]
    raise LookupError(f"there is no {names[0]!r}")


def _defines(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [each for target in targets for each in ast.walk(target)]
    return [each.id for each in names if isinstance(each, ast.Name)]


def _find(lines: list[str], text: str, first: int, last: int) -> int:
    for number in range(first, last + 1):
        if text in lines[number - 1]:
            return number
    raise LookupError(f"no line from {first} to {last} contains {text!r}")
