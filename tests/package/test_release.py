"""What a release is made of: the version, the sdist and the wheel, built as pip builds them, and the pages about it."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.version import Version

from tests.package.test_packaging import PROJECT
from tests.tools import ROOT

pytest.importorskip("hatch_vcs", reason="needs hatch-vcs: make test installs it")
pytest.importorskip("hatch_fancy_pypi_readme", reason="needs hatch-fancy-pypi-readme: make test installs it")

PICTURE = "docs/benchmarks/forward-short.png"
# What the version is read from.
VERSIONED = ("pyproject.toml", "README.md", "LICENSE", ".gitattributes", ".git_archival.txt")
has_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def hatchling(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "hatchling", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def version_of(folder: Path) -> str:
    return hatchling(folder, "metadata", "version").split()[-1]


# --- The version ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree without .git."""
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in VERSIONED:
        shutil.copy(ROOT / name, folder)
    return folder


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def archive(folder: Path, revision: str) -> Path:
    """What git writes for a revision, as GitHub does for its downloads, unpacked."""
    unpacked = folder.parent / revision
    unpacked.mkdir()
    git(folder, "archive", "-o", str(unpacked / "tree.tar"), revision)
    with tarfile.open(unpacked / "tree.tar") as file:
        file.extractall(unpacked)
    return unpacked


def test_a_copy_without_git_has_a_version(tree: Path) -> None:
    assert version_of(tree) == "0.1.0.dev0"


@has_git
def test_tags_give_the_version(tree: Path) -> None:
    git(tree, "init")
    git(tree, "add", "-A")
    git(tree, "commit", "-m", "first")
    assert re.fullmatch(r"0\.1\.0\.dev1\+g[0-9a-f]+", version_of(tree))
    git(tree, "tag", "v0.3.0")
    assert version_of(tree) == "0.3.0"
    git(tree, "commit", "--allow-empty", "-m", "second")
    assert re.fullmatch(r"0\.3\.1\.dev1\+g[0-9a-f]+", version_of(tree))


@has_git
def test_archives_of_git_have_the_version_of_their_commit(tree: Path) -> None:
    git(tree, "init")
    git(tree, "add", "-A")
    git(tree, "commit", "-m", "first")
    assert version_of(archive(tree, "HEAD")) == "0.1.0.dev0"
    git(tree, "tag", "v0.4.0rc1")
    assert version_of(archive(tree, "v0.4.0rc1")) == "0.4.0rc1"


# --- What is uploaded ---


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    hatchling(ROOT, "build", "-t", "sdist", "-d", str(folder))
    (path,) = folder.glob("tileattn-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the unpacked sdist, as the release workflow does."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as file:
        file.extractall(folder)
    hatchling(folder / sdist.name.removesuffix(".tar.gz"), "build", "-t", "wheel", "-d", str(folder))
    (path,) = folder.glob("tileattn-*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(file.read(name).decode())


@pytest.fixture(scope="module")
def description(metadata: Message) -> str:
    text = metadata.get_payload()
    assert isinstance(text, str)
    return text


def test_the_sdist_has_what_builds_tests_and_explains(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "Makefile"}
    assert needed | {PICTURE, "constraints.txt", "src/tileattn/py.typed", "tests/conftest.py"} <= names
    assert not [name for name in names if name.startswith((".github/", ".venv", "benchmarks/results/", "dist/"))]


def test_the_wheel_of_the_sdist_is_the_package_alone(wheel: Path, sdist: Path) -> None:
    version = Version(wheel.name.split("-")[1])
    assert version == Version(sdist.name.removeprefix("tileattn-").removesuffix(".tar.gz"))
    assert version >= Version("0.1.0.dev0")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.split("/")[0] for name in names} == {"tileattn", f"tileattn-{wheel.name.split('-')[1]}.dist-info"}
    assert not [name for name in names if "/tests/" in name or "test_" in name.rpartition("/")[2]]
    assert "tileattn/py.typed" in names


def test_the_wheel_names_pages_of_the_project(metadata: Message) -> None:
    urls = dict(text.split(", ") for text in metadata.get_all("Project-URL", []))
    assert urls.keys() >= {"Repository", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())


@has_git
def test_sources_that_git_ignores_are_in_sdist_and_wheel(tmp_path: Path) -> None:
    """`tileattn bundle --sources` writes them before a release is built."""
    folder = tmp_path / "tree"
    name = "src/tileattn/kernels/tilelang/build/generated/sm_80.json.xz"
    for file in (*VERSIONED, ".gitignore", PICTURE, "src/tileattn/__init__.py"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    git(folder, "init")
    for file in (name, f"{name}.part"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
        git(folder, "check-ignore", file)
    hatchling(folder, "build", "-d", "dist")
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    with tarfile.open(sdist) as packed:
        assert [each.partition("/")[2] for each in packed.getnames() if "generated" in each] == [name]
    with zipfile.ZipFile(wheel) as file:
        assert [each for each in file.namelist() if "generated" in each] == [name.removeprefix("src/")]


# --- The page on PyPI ---


def test_no_link_on_pypi_is_relative(description: str, metadata: Message) -> None:
    links = re.findall(r"\]\(([^)]*)\)", description) + re.findall(r'(?:src|href|srcset)="([^"]*)"', description)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    tag = f"v{metadata['Version']}"
    assert f"https://raw.githubusercontent.com/tileattn/tileattn/{tag}/{PICTURE}" in links
    ours = "https://github.com/tileattn/tileattn/"
    named = {link.removeprefix(ours).partition("#")[0] for link in links if link.startswith(ours)}
    for name in named:
        kind, tagged, path = name.split("/", 2)
        assert tagged == tag
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file(), path


def test_pypi_shows_it(description: str, metadata: Message) -> None:
    """With PyPI's own renderer, which removes what it does not allow."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "<picture" not in description, "PyPI removes it, and the picture with it"
    markdown = pytest.importorskip("readme_renderer.markdown")
    page = markdown.render(description)
    assert page is not None
    assert re.search(rf'<img [^>]*src="https://raw\.githubusercontent\.com/[^"]*{PICTURE}"', page)
    assert page.count("<table") == (ROOT / "README.md").read_text().count("\n|---")
    assert 'href="https://github.com/tileattn/tileattn/blob/' in page


# --- What GitHub shows ---


def test_the_citation_has_what_the_format_requires() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    # Tags are the versions: one that is written here would soon be wrong.
    assert not {"version", "date-released", "doi"} & citation.keys()


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_of_githubs_form(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert {"blank_issues_enabled", "contact_links"} == form.keys()
        assert all({"name", "url", "about"} == link.keys() for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels", "title"}
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]
        assert field.keys() <= {"type", "id", "attributes", "validations"}
    assert any("required" in field.get("validations", {}) for field in form["body"])


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    if not (ROOT / ".github").exists():
        pytest.skip("this tree, such as an sdist, has no .github")
    assert {path.stem for path in FORMS} == {"bug", "config", "feature", "performance", "wrong-result"}
    for name in ("bug", "wrong-result", "performance"):
        assert "tileattn info" in (ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text()
    assert (ROOT / ".github/pull_request_template.md").is_file()


def test_the_changelog_is_in_order() -> None:
    """In the form of Keep a Changelog: the newest version first, and in each version the kinds of change once."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[0] == "[Unreleased]"
    versions = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert None not in versions
    numbers = [Version(match[1]) for match in versions if match]
    assert numbers == sorted(set(numbers), reverse=True)
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.M)
        assert kinds == [kind for kind in order if kind in kinds]
    links = re.findall(r"^\[([^]]*)\]: https://github.com/tileattn/tileattn/\S+$", text, re.M)
    assert links == [re.findall(r"\[(.*?)\]", heading)[0] for heading in headings]
