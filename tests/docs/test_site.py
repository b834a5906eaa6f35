"""The site: all code that a page includes exists, its links lead somewhere, and its examples run."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tileattn.reference
import tileattn.testing
from tests.runtime.test_append_dispatch import MUST_RUN
from tests.runtime.test_append_dispatch import must_run as must_append
from tests.tools import ROOT
from tests.tools.support_table import DECODE_TABLE, TABLE, must_decode, must_run
from tileattn.call.appending import AppendCall
from tileattn.call.decoding import DecodeCall
from tileattn.cli.info import Example, caching_examples
from tileattn.kernels.mma import backend as mma_backend
from tileattn.kernels.packages import any_machine
from tileattn.measure import profiling
from tileattn.runtime.dispatch import BACKENDS

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# It runs where an environment variable is set, which is a fact of a machine.
INTERPRETED = ("triton", "cpu")


def hook(name: str) -> ModuleType:
    """A file of docs/hooks, which is no package: mkdocs loads them one by one."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"hooks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api, include, links, nav, support, fill = map(hook, ("api", "include", "links", "nav", "support", "fill"))


# --- Code that is included ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_inclusion_resolves(page: Path) -> None:
    text = include.unfilled(page.read_text())
    expanded = include.expand(text, page.relative_to(DOCS).as_posix())
    assert expanded.count("```") - text.count("```") == 2 * len(include.MACRO.findall(text))
    assert "{{ source" not in expanded
    assert "{{ docstring" not in expanded


def test_docstrings_fit_the_column_of_the_site() -> None:
    """Only line breaks change, and lines with columns, or of formulas, stay."""
    macros = [m for page in PAGES for m in include.MACRO.finditer(include.unfilled(page.read_text()))]
    for file in {m["file"] for m in macros if m["kind"] == "docstring"}:
        text = ast.get_docstring(ast.parse((include.PACKAGE / file).read_text()))
        narrow = include.narrow(text)
        assert narrow.split() == text.split()
        kept = {line for line in narrow.splitlines() if len(line) > include.COLUMN}
        assert kept <= set(text.splitlines())
        assert all(include.TABLE.search(line.strip()) or line.startswith("  ") for line in kept), kept


def test_the_tutorial_includes_the_kernels() -> None:
    included = {m["file"] for page in PAGES for m in include.MACRO.finditer(include.unfilled(page.read_text()))}
    hopper = ("hopper/kernel", "hopper/producer", "hopper/consumer")
    for name in ("tile/softmax", "tile/mask", "forward/generic", *(f"forward/{each}" for each in hopper)):
        assert f"kernels/tilelang/{name}.py" in included
    for name in ("prepare", "tile", "generic", "finish", "hopper/keys"):
        assert f"kernels/tilelang/backward/{name}.py" in included


@functools.cache
def lines_shown(page: str, file: str) -> set[int]:
    """The lines of a file of the package that a page of the tutorial shows."""
    shown = set()
    for macro in include.MACRO.finditer(include.unfilled((DOCS / "tutorial" / page).read_text())):
        if macro["file"] == file:
            text, first = include.source(file, macro["name"], macro["start"], macro["end"])
            shown |= set(range(first, first + len(text.splitlines())))
    return shown


def assert_shown(page: str, file: str, *part: str) -> None:
    text, first = include.source(file, *part)
    shown = lines_shown(page, file)
    assert not [
        line for number, line in enumerate(text.splitlines(), start=first) if line.strip() and number not in shown
    ]


def test_the_forward_page_shows_every_line_of_the_kernel() -> None:
    file = "kernels/tilelang/forward/generic.py"
    assert_shown("forward.md", file, "body", "plan = plan_of", "T.copy(w.l, arg.lse")
    for part in ("plan_of", "alloc_tiles", "enter_head", "add_keys"):
        assert_shown("forward.md", file, part)


def test_the_backward_page_shows_every_line_of_the_kernels() -> None:
    for name in ("prepare", "finish"):
        assert_shown("backward.md", f"kernels/tilelang/backward/{name}.py", "body.work")
    file = "kernels/tilelang/backward/generic.py"
    tree = ast.parse((ROOT / "src/tileattn" / file).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 8
    for name in (*functions, "GenericKeysPlan.__init__"):
        assert_shown("backward.md", file, name)


def test_what_is_included_are_the_lines_of_the_file() -> None:
    text, first = include.source("kernels/tilelang/tile/softmax.py", "rescale")
    lines = (ROOT / "src/tileattn/kernels/tilelang/tile/softmax.py").read_text().splitlines()
    assert text.splitlines() == lines[first - 1 : first - 1 + len(text.splitlines())]
    assert text.startswith("@T.macro\ndef rescale(")
    text, first = include.source("variant/masks.py", "Causal.allows")
    assert text == "def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:\n    return k <= q"
    text, _ = include.source("kernels/tilelang/forward/generic.py", "alloc_tiles", "m = T.alloc", "l = T.alloc")
    assert text == 'm = T.alloc_fragment([block_M], "float32")\nl = T.alloc_fragment([block_M], "float32")'
    assert include.source("kernels/tilelang/tile/softmax.py", "LOG2E")[0] == "LOG2E = math.log2(math.e)"


@pytest.mark.parametrize(
    ("macro", "says"),
    [
        ("{{ source variant/masks.py Causual }}", "there is no 'Causual'"),
        ("{{ source variant/masks.py Causal.allow }}", "there is no 'allow'"),
        ('{{ source variant/masks.py Causal from "nothing like this" }}', "contains 'nothing like this'"),
        ('{{ source variant/masks.py Causal to "class SlidingWindow" }}', "contains 'class SlidingWindow'"),
        ("{{ source nowhere.py x }}", "No such file"),
        ("{{ docstring py.typed }}", "the file has no docstring"),
        ("{{ source }}", "is not understood"),
        ("see {{ source variant/masks.py Causal }}", "is not understood"),
    ],
)
def test_what_does_not_resolve_ends_the_build(macro: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        include.expand(f"# A page\n\n{macro}\n", "page.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_pages_in_the_repository_are_filled_and_fresh(page: Path) -> None:
    text = page.read_text()
    assert text == fill.filled(text, page.relative_to(DOCS).as_posix()), "run `make pages`"
    assert not re.search(r"^\{\{", text, re.MULTILINE)


def test_filling_twice_changes_nothing_and_follows_the_code() -> None:
    macro = "{{ source variant/masks.py Causal.allows }}"
    once = fill.filled(f"a\n\n{macro}\n\nb\n", "tutorial/page.md")
    link = "[`variant/masks.py`](../../src/tileattn/variant/masks.py)"
    assert once.startswith(f"a\n\n<!-- source variant/masks.py Causal.allows -->\n\nFrom {link}:\n\n```python\ndef ")
    assert once.endswith("    return k <= q\n```\n\n<!-- end of source -->\n\nb\n")
    assert fill.filled(once.replace("k <= q", "k < q"), "tutorial/page.md") == once
    assert include.unfilled(once) == f"a\n\n{macro}\n\nb\n"


# --- The API page ---


def api_names() -> set[str]:
    """What the page names: identifiers of their own, and members of modules."""
    text = api.unfilled((DOCS / "api.md").read_text())
    members = ", ".join(re.findall(r"members: \[([^\]]+)\]", text))
    return {*re.findall(r"^::: tileattn\.(\w+)$", text, re.MULTILINE), *members.split(", ")}


def test_every_public_name_is_on_the_api_page() -> None:
    assert not set(tileattn.__all__) - api_names()


def test_the_api_page_lists_every_public_name_for_a_code_host() -> None:
    """The lists are fresh: a test of all filled pages. On the site mkdocstrings finds its directives."""
    text = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"^- \[`(\w+)`\]\(\.\./src/tileattn/", text, re.MULTILINE))
    assert not set(tileattn.__all__) - listed - {"nn", "masks", "scores", "math"}
    assert "::: " not in text
    directives = "## A\n\n::: tileattn.Causal\n    options: { members: [] }\n\n::: tileattn.decode\n"
    page = api.filled(directives)
    assert "- [`Causal`](../src/tileattn/variant/masks.py): A query sees the keys up to its own position.\n" in page
    assert api.unfilled(page) == directives
    with pytest.raises(ImportError, match="no_such_name"):
        api.filled("::: tileattn.no_such_name")


def test_no_function_of_the_api_page_has_the_name_of_a_submodule() -> None:
    """The page would not show it: its collector finds the module under the same name."""
    for package in (tileattn.testing, tileattn.viz, tileattn.reference, tileattn.nn):
        modules = {path.stem for path in Path(package.__path__[0]).glob("*.py")}
        assert not modules & set(package.__all__) & api_names(), package.__name__


# --- Links and navigation ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_link_leads_out_of_the_site(page: Path) -> None:
    left = [m["target"] for m in links.LINK.finditer(links.linked(page.read_text(), page))]
    assert all((page.parent / target.split("#")[0]).resolve().is_relative_to(DOCS) for target in left)


def test_links_out_of_the_site_lead_to_pages_that_show_files() -> None:
    page = DOCS / "tutorial/page.md"
    at = "../source/src/tileattn"
    folder, line = "[rule](../../src/tileattn/testing)", "[`masks.py`](../../src/tileattn/variant/masks.py#L12)"
    assert links.linked(f"the {folder}", page) == f"the [rule]({at}/testing/index.md)"
    assert links.linked(line, page) == f"[`masks.py`]({at}/variant/masks.py.md#__codelineno-0-12)"
    assert links.linked("in `variant/masks.py`", page) == f"in [`variant/masks.py`]({at}/variant/masks.py.md)"
    assert links.linked('<img src="../x.png" alt="a b" width="360">', page) == "![a b](../x.png){ width=360 }"
    for kept in ("`variant/no.py`", "## `variant/masks.py`", "```sh\n`variant/masks.py`\n```", "![a](../x.png)"):
        assert links.linked(kept, page) == kept
    assert list(links.leads_to(f"{folder} {line}", page)) == [
        ROOT / "src/tileattn/testing",
        ROOT / "src/tileattn/variant/masks.py",
    ]
    with pytest.raises(ValueError, match=r"page.md: .* does not exist"):
        links.linked("[gone](../../src/gone.py)", page)


def entries(navigation: list[Any]) -> list[str]:
    """The files of a navigation."""
    values = [value for entry in navigation for value in entry.values()]
    return [name for value in values for name in (entries(value) if isinstance(value, list) else [value])]


def test_the_navigation_has_all_pages_and_no_other() -> None:
    yaml = pytest.importorskip("yaml")
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert set(nav.OPTIONAL) <= set(entries(navigation))
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert sorted(entries(nav.present(navigation, DOCS))) == sorted(pages)


def test_optional_pages_come_once_they_are_there(tmp_path: Path) -> None:
    given = [{"A": "a.md"}, {"B": [{"Ladder": "ladder.md"}]}]
    assert nav.present(given, tmp_path) == [{"A": "a.md"}, {"B": []}]
    (tmp_path / "ladder.md").touch()
    assert nav.present(given, tmp_path) == given


# --- What is generated ---


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel language is installed, and Triton's interpreter is asked for."""
    real = importlib.util.find_spec
    absent = ("tilelang", "triton", "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.split(".")[0] in absent else real(name))
    monkeypatch.setattr(mma_backend, "has_compiler", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_the_support_matrix_says_what_the_backends_say(bare_machine: None) -> None:
    """Whatever is installed on the machine that builds it."""
    text = support.matrix()
    assert "installed" not in text
    tables = [[line.strip("| ").split(" | ") for line in part.splitlines()] for part in text.split("\n\n")[:4]]
    caching = [example.name for example in caching_examples()]
    for (head, _, *rows), names in zip(tables, (None, support.HEAD_DIMS, None, caching), strict=True):
        if names is not None:
            assert [row[0] for row in rows] == [str(name) for name in names]
        columns = [title.split(", ") for title in head[1:]]
        assert sorted(arch for column in columns for arch in column) == sorted(support.ARCHS)
    head, _, *rows = tables[1]
    for row in rows:
        for title, cell in zip(head[1:], row[1:]):
            call = Example("", head_dim=int(row[0]), head_dim_v=int(row[0])).call(title.split(", ")[0])
            with any_machine():
                accepting = [backend.name for backend in BACKENDS if backend.refusal(call) is None]
            assert accepting == [name for name in TABLE if must_run(name, call) and (name, call.arch) != INTERPRETED]
            assert re.findall(r"\*\*(\w+)\*\*", cell) == accepting
    head, _, *rows = tables[3]
    for row, example in zip(rows, caching_examples(), strict=True):
        for title, cell in zip(head[1:], row[1:]):
            for arch in title.split(", "):
                assert re.findall(r"\*\*(\w+)\*\*", cell) == must_take(example.call(arch))
    # Each number stands for a reason below.
    numbers = {int(number) for number in re.findall(r"~~&nbsp;(\d+)", text)}
    assert numbers == set(range(1, len(numbers) + 1))
    assert all(f"\n{number}. " in text for number in numbers)


def must_take(call: DecodeCall | AppendCall) -> list[str]:
    """The backends that must run a call on a cache, by the tables of the tests of dispatch."""
    if isinstance(call, DecodeCall):
        names = [name for name in DECODE_TABLE if must_decode(name, call)]
    else:
        names = [name for name in MUST_RUN if must_append(name, call)]
    return [name for name in names if (name, call.arch) != INTERPRETED]


def test_every_figure_that_a_page_shows_is_there() -> None:
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).resolve().relative_to(DOCS)
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


@pytest.mark.slow_cases("tools", reason="3 s")
@pytest.mark.parametrize("name", ["index", "numerics", "tools"])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # What the machine reaches is not asked here.
    monkeypatch.setattr(profiling, "CPU_MATMUL_SIZE", 64)
    monkeypatch.setattr(profiling, "CPU_COPIED_BYTES", 2**16)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'tileattn[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in PAGES:
        folder = tmp_path / "site" / page.relative_to(DOCS).with_suffix("")
        assert (folder.parent / "index.html" if page.stem == "index" else folder / "index.html").is_file()
    tutorial = (tmp_path / "site/tutorial/forward/index.html").read_text()
    assert "kernels/tilelang/forward/generic.py" in tutorial
    assert not (tmp_path / "site/hooks").exists()
