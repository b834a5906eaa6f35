"""Shows the package's own code in a page, by name, so that a page cannot show code that is no longer there.

A line of its own in a page's Markdown:

    {{ source kernels/tilelang/tile/softmax.py update }}                      a function or a class of src/tileattn
    {{ source kernels/tilelang/forward/generic.py body.kernel from "for step in" to "T.gemm(weights" }}      lines of it
    {{ docstring kernels/tilelang/forward/hopper/kernel.py }}                           a file's docstring

`from` and `to` name the first lines, at or after one another, that contain a text; both lines are shown. What does not
resolve ends the build.

`make pages` (fill.py) writes the code into the page itself, between two comments that keep the macro, so that the page
can be read where the repository is read. The site shows the code as it is when the site is built, with line numbers.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PACKAGE = DOCS.parent / "src/tileattn"
MACRO = re.compile(
    r"^\{\{ (?P<kind>source|docstring) (?P<file>\S+?)(?: (?P<name>[\w.]+))?"
    r'(?: from "(?P<start>[^"\n]+)")?(?: to "(?P<end>[^"\n]+)")? \}\}$',
    re.MULTILINE,
)
# A macro as `make pages` leaves it.
FILLED = re.compile(
    r"^<!-- (?P<macro>(?P<kind>source|docstring|support)\b[^\n]*) -->\n.*?^<!-- end of (?P=kind) -->$",
    re.MULTILINE | re.DOTALL,
)
COLUMN = 88  # letters of a line that fits the site's column at 1280 pixels
TABLE = re.compile(r"\S {2,}\S")
# What looks like a macro and is none is a mistake.
LOOSE = re.compile(r"^.*\{\{ ?(?:source|docstring)\b.*$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """mkdocs' hook: the page with its macros replaced."""
    where = page.file.src_uri
    return markdown if where.startswith("source/") else expand(unfilled(markdown), where)


def unfilled(markdown: str) -> str:
    """A page's Markdown with macros in place of what `make pages` wrote."""
    return FILLED.sub(lambda match: f"{{{{ {match['macro']} }}}}", markdown)


def expand(markdown: str, where: str, *, numbers: bool = True) -> str:
    """A page's Markdown with its macros replaced by code.

    Args:
        markdown: with macros that are not filled.
        where: the page's path below docs/.
        numbers: for the site, with line numbers; otherwise for the page in the repository, between two comments. There
            line numbers would change whenever a line above the code does.

    Raises:
        ValueError: a macro does not resolve; it names the page and the macro.
    """
    up = "../" * (where.count("/") + 1)

    def block(match: re.Match[str]) -> str:
        try:
            text = _block(**match.groupdict(), up=up, numbers=numbers)
        except (LookupError, OSError, SyntaxError) as error:
            raise ValueError(f"{where}: {match[0]}: {error}") from error
        if numbers:
            return text
        return f"<!-- {match[0][3:-3]} -->\n\n{text}\n\n<!-- end of {match['kind']} -->"

    done = MACRO.sub(block, markdown)
    if (rest := LOOSE.search(done)) is not None:
        raise ValueError(f"{where}: {rest[0]!r} is not understood")
    return done


def _block(kind: str, file: str, name: str | None, start: str | None, end: str | None, up: str, numbers: bool) -> str:
    if kind == "docstring":
        text = ast.get_docstring(ast.parse((PACKAGE / file).read_text()))
        if text is None:
            raise LookupError("the file has no docstring")
        text = narrow(text) if numbers else text
        return f"From [`{file}`]({up}src/tileattn/{file}):\n\n```text\n{text}\n```"
    lines, first = source(file, name, start, end)
    anchor, options = (f"#L{first}", f' linenums="{first}"') if numbers else ("", "")
    return f"From [`{file}`]({up}src/tileattn/{file}{anchor}):\n\n```python{options}\n{lines}\n```"


def narrow(docstring: str) -> str:
    """A docstring with its prose in lines that fit the site's column; formulas and tables stay as they are."""
    lines = docstring.splitlines()
    parts: list[list[str]] = []
    for line in lines:
        before = parts[-1][-1] if parts else ""
        indent = re.match(r" *(?:- )?", before)[0]  # type: ignore[index]
        # A line of prose goes on where the one before was full, and stands below its text.
        goes_on = len(before) > COLUMN and re.match(rf" {{{len(indent)}}}[^\s-]", line)
        if goes_on and not TABLE.search(line.strip()):
            parts[-1].append(line)
        else:
            parts.append([line])
    return "\n".join(map(_paragraph, parts))


def _paragraph(lines: list[str]) -> str:
    indent = re.match(r" *(?:- )?", lines[0])[0]  # type: ignore[index]
    text = " ".join(line.strip() for line in lines).removeprefix(indent.strip()).strip()
    if TABLE.search(text) or len(lines[0]) <= COLUMN:
        return "\n".join(lines)
    return textwrap.fill(text, COLUMN, initial_indent=indent, subsequent_indent=" " * len(indent))


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
