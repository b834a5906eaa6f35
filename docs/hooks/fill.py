"""Writes the code and the tables that pages include into the pages themselves: `make pages`. See include.py.

A code host shows a page as it lies in the repository, and knows no macro.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where a test imports this file, too
import api
import include
import support


def filled(markdown: str, where: str) -> str:
    """A page's Markdown as it should be in the repository.

    Args:
        markdown: of the page, filled or not.
        where: the page's path below docs/.
    """
    text = api.filled(api.unfilled(include.expand(include.unfilled(markdown), where, numbers=False)))
    if support.MACRO in text:
        table = f"<!-- support -->\n\n{support.matrix()}\n\n<!-- end of support -->"
        text = text.replace(support.MACRO, table)
    return text


if __name__ == "__main__":
    for page in sorted(include.DOCS.rglob("*.md")):
        before = page.read_text()
        after = filled(before, page.relative_to(include.DOCS).as_posix())
        if after != before:
            page.write_text(after)
            print(f"filled {page.relative_to(include.DOCS.parent)}")
