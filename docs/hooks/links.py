"""Links that lead out of docs/, to files of the repository: on the site each leads to a page that shows the file.

Paths of source files in a page's text, such as `variant/masks.py`, become such links, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
# [text](target), but no picture.
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+(?:\n[^\]\n]+)?)\]\((?P<target>\.\.?/[^)\s]+)\)")
# `path` of a source file, but not the text of a link.
PATH = re.compile(r"(?<!\[)`(?P<path>[\w./-]+/[\w.-]+\.(?:py|cu|cuh|h))`(?!\])")
IMAGE = re.compile(r'<img src="(?P<target>[^"]+)" alt="(?P<alt>[^"]*)" width="(?P<width>\d+)">')
MACRO = re.compile(r"^\{\{ (?:source|docstring) (?P<file>\S+)", re.MULTILINE)
LISTED = re.compile(r"^<!-- api .*?^<!-- end of api -->$", re.MULTILINE | re.DOTALL)  # for a code host: api.py
CODE = re.compile(r"(^```.*?^```$|^#[^\n]*$)", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":(?:func|class|mod|meth|data|attr):(<code>)~?")
LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".h": "cpp", ".md": "markdown", ".toml": "toml"}
PICTURE = re.compile(r'<img alt="[^"]*" src="(?P<source>[^"]+)\.png"[^>]*>')
HEADING = re.compile(r"(?<=>)[^<>]+(?=</th>)")
LINE = re.compile(r'id="(__codelineno-[\d-]+)"')
SHOWN = "source/"  # the folder of the site with the files


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """mkdocs' hook: adds a page for each file of the repository that a page leads to."""
    from mkdocs.structure.files import File, InclusionLevel

    wanted: set[Path] = set()
    for file in files.documentation_pages():
        wanted |= set(leads_to(LISTED.sub("", file.content_string), DOCS / file.src_uri))
    for folder in [path for path in wanted if path.is_dir()]:
        wanted |= {path for path in folder.iterdir() if path.is_file()}
    for path in sorted(wanted):
        where = SHOWN + path.relative_to(ROOT).as_posix()
        if path.suffix == ".json":
            files.append(File.generated(config, where, abs_src_path=str(path)))
        else:
            page = File.generated(config, shown_at(path), content=shown(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """mkdocs' hook, before links are checked."""
    uri = page.file.src_uri
    return markdown if uri.startswith(SHOWN) else linked(markdown, DOCS / uri)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """mkdocs' hook: docstrings name functions as Sphinx would read them; a picture stands there for each theme."""
    page.present_anchor_ids |= set(LINE.findall(html))  # mkdocs itself does not see the anchors of lines of code
    # A name such as FlashAttention may break in the heading of a table, which is then less wide.
    html = HEADING.sub(lambda match: re.sub(r"(?<=[a-z]{4})(?=[A-Z])", "<wbr>", match[0]), html)
    return PICTURE.sub(_in_both_themes, ROLE.sub(r"\1", html))


def leads_to(markdown: str, page: Path) -> Iterator[Path]:
    """The files of the repository that a page leads to; ValueError where there is no such file."""
    for match in LINK.finditer(markdown):
        target = _outside(match, page)
        if target is not None:
            yield target
    for match in MACRO.finditer(markdown):
        yield ROOT / "src/tileattn" / match["file"]
    for match in PATH.finditer(CODE.sub("", markdown)):
        target = _file(match["path"])
        if target is not None:
            yield target


def linked(markdown: str, page: Path) -> str:
    """A page's Markdown with links to the pages that show files; ValueError where there is no such file."""

    def link(match: re.Match[str]) -> str:
        target = _outside(match, page)
        return match[0] if target is None else f"[{match['text']}]({_relative(target, page, match['target'])})"

    def path(match: re.Match[str]) -> str:
        target = _file(match["path"])
        return match[0] if target is None else f"[{match[0]}]({_relative(target, page)})"

    parts = CODE.split(markdown)
    for index in range(0, len(parts), 2):
        text = PATH.sub(path, LINK.sub(link, parts[index]))
        parts[index] = IMAGE.sub(r"![\g<alt>](\g<target>){ width=\g<width> }", text)
    return "".join(parts)


def shown_at(path: Path) -> str:
    """The site's page for a file or a folder of the repository, as a path below docs/."""
    name = path.relative_to(ROOT).as_posix()
    return f"{SHOWN}{name}/index.md" if path.is_dir() else f"{SHOWN}{name}.md"


def shown(path: Path) -> str:
    """The Markdown of a page that shows a file, or lists a folder's files. The search leaves it out."""
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# `{path.relative_to(ROOT)}`\n\n"
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.is_file())
        return head + "\n".join(f"- [`{name}`]({name}.md)" for name in names)
    fence = "`" * 8
    return f'{head}{fence}{LANGUAGES.get(path.suffix, "text")} linenums="1"\n{path.read_text()}\n{fence}\n'


def _in_both_themes(match: re.Match[str]) -> str:
    """A picture, and the one for the dark theme: extra.css shows one of them. Each leads to itself at full size."""
    light, dark = f"{match['source']}.png", f"{match['source']}-dark.png"
    images = {"light": (light, match[0]), "dark": (dark, match[0].replace(light, dark))}
    return "".join(f'<a class="in-{theme}" href="{path}">{image}</a>' for theme, (path, image) in images.items())


def _outside(match: re.Match[str], page: Path) -> Path | None:
    """Where a link leads, if that is outside docs/."""
    target = (page.parent / match["target"].split("#")[0]).resolve()
    if target.is_relative_to(DOCS):
        return None
    if not target.exists():
        raise ValueError(f"{page.name}: {match[0]} leads to {target}, which does not exist")
    return target


def _file(path: str) -> Path | None:
    """The file that a page means by a path: of the repository, or below src/tileattn."""
    return next((file for base in (ROOT, ROOT / "src/tileattn") if (file := base / path).is_file()), None)


def _relative(target: Path, page: Path, written: str = "") -> str:
    at = SHOWN + target.relative_to(ROOT).as_posix() if target.suffix == ".json" else shown_at(target)
    line = re.search(r"#L(\d+)", written)
    return os.path.relpath(DOCS / at, page.parent) + (f"#__codelineno-0-{line[1]}" if line else "")
