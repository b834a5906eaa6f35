"""How tileattn was installed: the version that it reports, and the command for pip that errors name."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tileattn
from tests.tools import ROOT
from tileattn import installation
from tileattn.installation import _command, pip_install, version
from tileattn.kernels.packages import absence

SOURCES = sorted(Path(tileattn.__file__).parent.rglob("*.py"))


def test_in_a_clone_the_clone_is_named() -> None:
    """The tests run on the sources, so this one lies in a clone."""
    assert Path(tileattn.__file__).is_relative_to(ROOT / "src")
    assert pip_install("plot") == f'pip install -e "{ROOT}[plot]"'


def test_a_copy_in_another_project_is_no_clone(tmp_path: Path) -> None:
    package = tmp_path / "src/tileattn"
    package.mkdir(parents=True)
    (package / "installation.py").write_text(Path(installation.__file__).read_text())
    code = "import installation as i; print(i._tree())"
    for name, is_clone in (("theirs", False), ("tileattn", True)):
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "1"\n')
        done = subprocess.run([sys.executable, "-c", code], cwd=package, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(tmp_path.resolve() if is_clone else None)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({}, 'pip install "tileattn[plot]"'),
        ({"url": "file:///gone/tileattn", "dir_info": {}}, 'pip install "tileattn[plot]"'),
        (
            {"url": "https://host/tileattn-0.1.0-py3-none-any.whl", "archive_info": {}},
            'pip install "tileattn[plot]"',
        ),
        (
            {"url": "https://host/tileattn.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            'pip install "tileattn[plot] @ git+https://host/tileattn.git@abc"',
        ),
        (
            {
                "url": "https://host/tileattn.git",
                "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"},
            },
            'pip install "tileattn[plot] @ git+https://host/tileattn.git@main"',
        ),
    ],
)
def test_elsewhere_pips_note_decides(origin: dict[str, Any], command: str) -> None:
    assert _command("plot", None, origin) == command


def test_a_folder_or_a_file_that_was_installed_is_named(tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    assert _command("plot", None, {"url": clone.as_uri(), "dir_info": {}}) == f'pip install "{clone}[plot]"'
    wheel = tmp_path / "tileattn-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert _command("plot", None, {"url": wheel.as_uri(), "archive_info": {}}) == f'pip install "{wheel}[plot]"'


def test_the_note_is_read_where_pip_writes_it(tmp_path: Path) -> None:
    """A package outside of a clone, with the files that `pip install` of a folder leaves."""
    site, clone = tmp_path / "site", tmp_path / "clone"
    clone.mkdir()
    info = site / "tileattn-1.2.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tileattn\nVersion: 1.2.3\n")
    (info / "direct_url.json").write_text(json.dumps({"url": clone.as_uri(), "dir_info": {}}))
    (site / "installation.py").write_text(Path(installation.__file__).read_text())
    code = "import installation as i; print(i.version()); print(i.pip_install('plot'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1.2.3", f'pip install "{clone}[plot]"']


@pytest.mark.parametrize("noted", ["{", "[]", "null"])
def test_a_damaged_note_hides_no_error(noted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is a part of another error's text."""
    monkeypatch.setattr(installation, "_distribution", lambda: SimpleNamespace(read_text=lambda name: noted))
    installation._origin.cache_clear()
    try:
        assert installation._origin() == {}
    finally:
        installation._origin.cache_clear()


def test_the_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        assert tileattn.__version__ == version() == importlib.metadata.version("tileattn")
    except importlib.metadata.PackageNotFoundError:
        assert version() == installation.UNKNOWN
    monkeypatch.setattr(installation, "NAME", "a-package-that-nobody-has")
    assert version() == installation.UNKNOWN
    assert tileattn.__version__ == installation.UNKNOWN


def test_refusals_name_the_command() -> None:
    assert absence("json", "json") is None
    assert absence("no.such", "such") == "no-such is not installed (pip install such)"
    assert absence("no.such", extra="plot") == f"no-such is not installed ({pip_install('plot')})"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_text_names_an_extra_on_the_index(path: Path) -> None:
    """For users of a clone, `tileattn[plot]` is another tileattn, or none. `pip_install` gives the right command."""
    if path.name == "installation.py":
        return
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert [text for text in texts if isinstance(text, str) and re.search(r"pip install.{0,3}tileattn\[", text)] == []
