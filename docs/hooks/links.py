"""Links that lead out of docs/, to files of the repository: on the site they are the files' names, without a link."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
# [text](target), but no picture.
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+(?:\n[^\]\n]+)?)\]\((?P<target>\.\.?/[^)\s]+)\)")
ROLE = re.compile(r":(?:func|class|mod|meth|data|attr):(<code>)~?")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """mkdocs' hook, before links are checked."""
    return named(markdown, DOCS / page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs' hook: docstrings name functions as Sphinx would read them."""
    return ROLE.sub(r"\1", html)


def named(markdown: str, page: Path) -> str:
    """Links to files outside docs/ as "text (`path`)"; ValueError where there is no such file."""

    def replaced(match: re.Match[str]) -> str:
        target = (page.parent / match["target"].split("#")[0]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            raise ValueError(f"{page.name}: {match[0]} leads to {target}, which does not exist")
        path = target.relative_to(ROOT).as_posix()
        text = match["text"]
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)
