"""What the documents name exists: files, names of the package, commands, options, make targets.

The tests read words in backticks and blocks of shell commands. Each kind of name has a function that returns the names
of a text that do not exist, so that a test can try it with wrong names.
"""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import tileattn
from tests.tools import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
DESIGN = [ROOT / "docs/design.md", ROOT / "docs/numerics.md", *sorted((ROOT / "docs/design").glob("*.md"))]
MOST_LINES = 250

# Files that commands or readers write, on the reader's machine, and another project's.
WRITTEN = {
    "mine.py",
    "config.json",
    "manifest.json",
    "bench-results",
    "site",
    ".venv",
    "venv/bin/activate",
    "tuning.json",
    "examples/amd",
}
SUFFIXES = ("py", "md", "json", "toml", "txt", "cu", "cuh", "h", "yml", "yaml", "png", "sh")

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PATH = re.compile(rf"(?:[\w.\-]+/)*[\w.\-]+\.(?:{'|'.join(SUFFIXES)})|(?:[\w.\-]+/)+[\w.\-]*")
DOTTED = re.compile(r"(?<![\w./\-])tileattn(?:\.[A-Za-z_]\w*)+")
OPERATOR = re.compile(r"\btileattn::(\w+)")
OPTION = re.compile(r"--[A-Za-z][\w-]*")


# --- What a text says ---


def spans(text: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without variables in front: those in shell blocks, and those in backticks."""
    lines = [line for block in blocks(text, "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += [span for span in spans(text) if re.match(r"(make|tileattn|python3?|pytest) \S", span)]
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words[:3:2] == ["python", "tileattn"] and words[1] == "-m":
            words = words[2:]
        if words:
            yield words


# --- What there is ---


@functools.cache
def files() -> frozenset[str]:
    """All files of the repository, and their folders, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:  # a copy without its repository
        paths = {path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()}
    else:
        paths = {Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()}
    return frozenset(each.as_posix() for path in paths for each in (path, *path.parents))


@functools.cache
def endings() -> frozenset[str]:
    """Every path from any of its folders on."""
    parts = (path.split("/") for path in files())
    return frozenset("/".join(part[start:]) for part in parts for start in range(len(part)))


@functools.cache
def command_line() -> Any:
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["tileattn"]
    return typer.main.get_command(importlib.import_module(entry.partition(":")[0]).app)


@functools.cache
def options_of_scripts() -> frozenset[str]:
    """Options that a script or the command line declares, by their text."""
    folders = ("src", "examples", "benchmarks", "tests")
    scripts = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    sources = (path.read_text() for path in scripts if not path.name.startswith("test_"))
    return frozenset(option for source in sources for option in re.findall(r"[\"'](--[A-Za-z][\w-]*)[\"']", source))


@functools.cache
def options_of_commands() -> frozenset[str]:
    def walk(command: Any) -> Iterator[str]:
        yield from options_of(command)
        for each in getattr(command, "commands", {}).values():
            yield from walk(each)

    return frozenset(walk(command_line()))


def options_of(command: Any) -> set[str]:
    return {"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}


@functools.cache
def makefile() -> tuple[frozenset[str], frozenset[str]]:
    """The targets and the variables of the Makefile."""
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    variables = re.findall(r"^(\w+) *[?:]?=|\$\((\w+)\)", text, re.MULTILINE)
    return frozenset(" ".join(targets).split()), frozenset(name for pair in variables for name in pair if name)


# --- What a text names in vain ---


def missing_paths(text: str) -> list[str]:
    """A path may begin at any folder: `hopper/keys.py` names whichever file's path ends so."""
    shell = [word for words in commands(text) for word in words]
    named = [name for name in (*spans(text), *shell) if PATH.fullmatch(name) and not name.startswith("../")]
    known = [name.rstrip("/") for name in named if not re.match(r"[A-Z]+\.|\.\./", name)]  # RESULT.json is a place
    outputs = {words[at + 1] for words in commands(text) for at in range(len(words) - 1) if words[at] in OUTPUTS}
    top = {name for name in known if name.split("/")[0] in WRITTEN or name in WRITTEN | outputs}
    return [name for name in known if name not in top and name not in endings()]


OUTPUTS = {"-o", "--output", "--out", "--json", "--plot", "--state"}


def missing_tree_entries(text: str) -> list[str]:
    """A tree is a block, indented by four, that begins with a folder; what it lists is indented by two more."""
    missing = []
    for tree in re.findall(r"^ {4}[\w/.\-]+/\n(?:^ {4} .*\n)+", text, re.MULTILINE):
        parents: list[str] = []
        for line in tree.splitlines():
            indent, name = len(line) - len(line.lstrip()), line.split()[0].rstrip("/")
            if indent >= 16:  # a description that goes on
                continue
            depth = (indent - 4) // 2
            parents = [*parents[:depth], name]
            if "/".join(parents) not in files():
                missing.append("/".join(parents))
    return missing


def missing_dotted_names(text: str) -> list[str]:
    everywhere = "\n".join([*spans(text), *blocks(text, "python", "py")])
    operators = [name for name in OPERATOR.findall(everywhere) if not hasattr(torch.ops.tileattn, name)]
    return [name for name in DOTTED.findall(everywhere) if not resolves(name)] + operators


@functools.cache
def resolves(name: str) -> bool:
    value: Any = tileattn
    path = "tileattn"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                return False
        value = getattr(value, part)
    return True


DEFINITIONS = re.compile(r"(?<!`)`((?:[\w.\-]+/)+\w+\.py)`, ((?:`[\w.]+`(?: and |, )?)+)")
DEFINED_IN = re.compile(r"((?:`[\w.]+(?:\([^`]*\))?`(?:\sand\s)?)+),?\s(?:in|of)\s`([\w./\-]+\.py)`")


def missing_definitions(text: str) -> list[str]:
    """Names that a file does not define, in "`file.py`, `name` and `name`" and "`name` in `file.py`"."""
    named = [*DEFINITIONS.findall(text), *((path, names) for names, path in DEFINED_IN.findall(text))]
    missing = []
    for path, names in named:
        sources = [(ROOT / file).read_text() for file in files() if f"/{file}".endswith(f"/{path}")]
        for name in (span.partition("(")[0] for span in SPAN.findall(names)):
            part = re.escape(name.rpartition(".")[2])
            if not any(re.search(rf"^\s*(?:def|class) {part}\b|^{part}\b *[:=]", one, re.MULTILINE) for one in sources):
                missing.append(f"{path}, {name}")
    return missing


def missing_commands(text: str) -> list[str]:
    missing = []
    for program, *words in commands(text):
        if program.rpartition("/")[2] != "tileattn":
            continue
        command, given = command_line(), list(words)
        while given and hasattr(command, "commands") and not given[0].startswith("-"):
            name = given.pop(0)
            if name not in command.commands:
                missing.append(f"tileattn {name}")
                break
            command = command.commands[name]
        else:
            known = options_of(command)
            wrong = [word for word in given if OPTION.match(word) and word.partition("=")[0] not in known]
            missing += [f"{command.name} {word}" for word in wrong]
    return missing


def missing_options(text: str) -> list[str]:
    """Options in backticks by themselves: of any command or script."""
    named = [option for span in spans(text) if span.startswith("--") for option in OPTION.findall(span)]
    return [option for option in named if option not in options_of_commands() | options_of_scripts()]


def missing_targets(text: str) -> list[str]:
    targets, variables = makefile()
    missing = []
    for program, *words in commands(text):
        for word in words if program == "make" else ():
            name, is_setting, _ = word.partition("=")
            if name not in (variables if is_setting else targets):
                missing.append(name)
    return missing


def missing_variables(text: str) -> list[str]:
    """Environment variables that no source file of the package names."""
    named = {name for each in (*spans(text), *blocks(text, "sh")) for name in re.findall(r"\bTILEATTN_\w+", each)}
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    return sorted(name for name in named if name not in sources)


KINDS: dict[str, Callable[[str], list[str]]] = {
    "paths": missing_paths,
    "tree": missing_tree_entries,
    "dotted names": missing_dotted_names,
    "definitions": missing_definitions,
    "commands": missing_commands,
    "options": missing_options,
    "make targets": missing_targets,
    "environment variables": missing_variables,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_documents_name_exists(kind: str) -> None:
    missing = {page.relative_to(ROOT).as_posix(): KINDS[kind](page.read_text()) for page in PAGES}
    assert not {page: names for page, names in missing.items() if names}


@pytest.mark.parametrize(
    ("kind", "text", "wrong"),
    [
        ("paths", "see `variant/musks.py`", ["variant/musks.py"]),
        ("paths", "see `src/tileattn/kernels/cuda/`", ["src/tileattn/kernels/cuda"]),
        ("paths", "```sh\npython examples/gone.py --json a.json\n```", ["examples/gone.py"]),
        ("paths", "see `numerics.py` and `testing/numerics.py`", []),
        ("tree", "    src/tileattn/\n      testing/   the rule\n        rule.py\n", ["src/tileattn/testing/rule.py"]),
        ("dotted names", "call `tileattn.atention(q)`", ["tileattn.atention"]),
        ("dotted names", "```python\ntileattn.nn.Gone()\n```", ["tileattn.nn.Gone"]),
        ("dotted names", "the operator `tileattn::sideways`", ["sideways"]),
        ("definitions", "`testing/numerics.py`, `rule`", ["testing/numerics.py, rule"]),
        ("definitions", "`testing/numerics.py`, `assert_accurate` and `Error`", []),
        ("definitions", "`rule(x)` in `testing/numerics.py`", ["testing/numerics.py, rule"]),
        ("definitions", "`assert_accurate(...)` and `Error`, in\n`testing/numerics.py`", []),
        ("commands", "run `tileattn bunch --quick`", ["tileattn bunch"]),
        ("commands", "```sh\nTILEATTN_CACHE_DIR=/x tileattn bench --sweet fa\n```", ["bench --sweet"]),
        ("commands", "```sh\npython -m tileattn viz tails\n```", ["tileattn tails"]),
        ("options", "with `--no-such-option`", ["--no-such-option"]),
        ("make targets", '`make tset ARGS="x"`', ["tset"]),
        ("make targets", "```sh\nmake test PYTHIN=python3.12\n```", ["PYTHIN"]),
        ("environment variables", "set `TILEATTN_CASH_DIR`", ["TILEATTN_CASH_DIR"]),
    ],
)
def test_what_does_not_exist_is_found(kind: str, text: str, wrong: list[str]) -> None:
    assert KINDS[kind](text) == wrong


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.name)
def test_design_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) < MOST_LINES


def test_the_entry_page_links_every_design_page() -> None:
    entry = (ROOT / "docs/design.md").read_text()
    assert not [page.name for page in DESIGN[1:] if page.relative_to(ROOT / "docs").as_posix() not in entry]


def test_pages_that_the_code_names_exist() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/\-]+\.md\b", path.read_text())
    }
    assert not sorted((path, page) for path, page in named if not (ROOT / page).is_file())


@pytest.mark.parametrize("page", TOP, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """Links of the site's pages are followed when the site is built."""
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text()))
    assert not [target for target in targets if "://" not in target and not (ROOT / target).exists()]
