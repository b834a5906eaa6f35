"""benchmarks/results/README.md, the index of claims and result files: it lists all files, and its facts are right."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tools import ROOT

RESULTS = ROOT / "benchmarks" / "results"
INDEX = (RESULTS / "README.md").read_text()
GPUS = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}


class Entry(NamedTuple):
    """A line of the index. file: its path in benchmarks/results. claims: the links to what rests on it."""

    file: str
    claims: list[str]
    date: str
    commit: str


def entries() -> list[Entry]:
    index = INDEX.split("## Index")[1].split("\n## ")[0]
    lines = re.findall(r"^\| \[`[^`]+`\]\(([^)]+)\) \| (.*) \| ([\d-]{10}), (\w{12}) \| `.*\|$", index, re.M)
    assert len(lines) == index.count("| [`"), "a line of the index has another form"
    return [Entry(file, re.findall(r"\]\(([^)]+)\)", claims), date, commit) for file, claims, date, commit in lines]


ENTRIES = entries()
BY_FILE = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.file)


def test_every_file_is_in_the_index_once() -> None:
    files = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file())
    assert sorted(entry.file for entry in ENTRIES) == [file for file in files if file != "README.md"]
    assert all(file.count("/") == 1 for file in files if file != "README.md"), "a folder for each subject"


@BY_FILE
def test_what_rests_on_a_file_is_there_and_names_it(entry: Entry) -> None:
    assert entry.claims
    pages = []
    for claim in entry.claims:
        path, _, anchor = claim.partition("#")
        page = (RESULTS / path).resolve()
        assert page.is_file(), claim
        assert not anchor or anchor in anchors(page), claim
        pages.append(page.read_text())
    folder = entry.file.partition("/")[0]
    named = (f"results/{entry.file}", f"results/{folder}`")  # itself, or the folder with all that is in it
    assert any(name in text for name in named for text in pages), f"{entry.file} is named by none of its pages"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@BY_FILE
def test_the_index_says_when_and_where_a_file_was_measured(entry: Entry) -> None:
    path = RESULTS / entry.file
    device = path.stem.rpartition("-")[2]
    assert device in (*GPUS, "cpu"), "a name ends with the device"
    if path.suffix != ".json":
        text = path.read_text()
        assert entry.date in text
        assert entry.commit[:7] in text
        assert GPUS[device] in text
        return
    measured = json.loads(path.read_text())
    assert (entry.date, entry.commit) == (measured["date"][:10], measured["commit"][:12])
    assert device == "cpu" or measured["gpu"] == GPUS[device]


@pytest.mark.parametrize("page", re.findall(r"\]\((\.\./[^)#]+)", INDEX.split("## Figures without a file")[1]))
def test_figures_without_a_file_are_on_pages_that_are_there(page: str) -> None:
    assert (RESULTS / page).is_file()


def test_every_result_file_that_is_named_anywhere_is_there() -> None:
    files = subprocess.run(
        ["git", "grep", "-lI", "benchmarks/results/", "--", ":!benchmarks/results"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if files.returncode:
        pytest.skip("no git here")
    for file in files.stdout.split():
        for name in re.findall(r"benchmarks/results/([\w/.-]*\.(?:json|txt|md|png))", (ROOT / file).read_text()):
            assert (RESULTS / name).is_file(), f"{file} names {name}"
