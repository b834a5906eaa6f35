"""The API page where it lies: `make pages` writes a line for each name below the directives of mkdocstrings.

A directive is `::: tileattn.attention`, with a line of options below it where there are any. mkdocstrings makes
signatures and tables of it on the site; a code host knows no directive. So `make pages` (fill.py) puts the directive
into a comment, and behind it a list: each name, a link to its file, and the first sentence of its docstring.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^::: (?P<what>[\w.]+(?:\n    options: \{[^\n]*\})?)$", re.MULTILINE)
FILLED = re.compile(r"^<!-- api (?P<what>[^>]+?) -->\n.*?^<!-- end of api -->$", re.MULTILINE | re.DOTALL)
MEMBERS = re.compile(r"\bmembers: \[(?P<names>[^\]]+)\]")
ROLE = re.compile(r":(?:func|class|mod|meth|data|attr):`~?(?P<name>[^`]+)`")
SENTENCE = re.compile(r"(?<=[^.]\.)(?<!al\.)\s+(?=[A-Z`])")  # not behind ".." or "et al."


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook: mkdocstrings finds its directives."""
    return unfilled(markdown)


def unfilled(markdown: str) -> str:
    """A page's Markdown with directives in place of what `make pages` wrote."""
    return FILLED.sub(lambda match: f"::: {match['what']}", markdown)


def filled(markdown: str) -> str:
    """A page's Markdown, without filled directives, as it should be in the repository."""
    return DIRECTIVE.sub(
        lambda match: f"<!-- api {match['what']} -->\n\n{_list(match['what'])}\n\n<!-- end of api -->", markdown
    )


def _list(what: str) -> str:
    path, _, options = what.partition("\n")
    found = _object(path)
    if not isinstance(found, ModuleType):
        return _line(path.rpartition(".")[2], found)
    members = MEMBERS.search(options)
    names = members["names"].split(", ") if members is not None else _names(found)
    return "\n".join(_line(name, getattr(found, name)) for name in names)


def _object(path: str) -> Any:
    """What a dotted path means; ImportError or AttributeError where there is nothing."""
    parent, _, name = path.rpartition(".")
    holder = importlib.import_module(parent or path)
    return importlib.import_module(path) if not hasattr(holder, name) else getattr(holder, name)


def _names(module: ModuleType) -> list[str]:
    """What mkdocstrings shows of a module: `__all__`, or else what it defines."""
    own = [name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def _line(name: str, found: Any) -> str:
    """The name, a link to its file, and the first sentence of its own docstring."""
    code = found if inspect.isclass(found) or inspect.isroutine(found) else type(found)
    file = Path(inspect.getsourcefile(inspect.unwrap(code)) or "")
    link = f"[`{name}`](../{file.relative_to(ROOT).as_posix()})" if file.is_relative_to(ROOT) else f"`{name}`"
    paragraph = inspect.cleandoc(vars(code).get("__doc__") or getattr(code, "__doc__", "") or "").split("\n\n")[0]
    sentence = SENTENCE.split(ROLE.sub(r"`\g<name>`", " ".join(paragraph.split())), maxsplit=1)[0]
    return f"- {link}: {sentence}" if sentence else f"- {link}"
