"""What the workflows of GitHub promise: the versions and systems that CI tests, and how a release is published."""

from __future__ import annotations

import re
from typing import Any

import pytest
from packaging.version import Version

from tests.package.test_packaging import PYTHONS
from tests.tools import ROOT
from tileattn.kernels.tilelang.architecture import ARCHITECTURES

WORKFLOWS = ROOT / ".github/workflows"
if not WORKFLOWS.exists():
    pytest.skip("this tree, such as an sdist, has no .github", allow_module_level=True)
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.yml"))


def workflow(name: str) -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    parsed: dict[Any, Any] = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())
    return parsed


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


# --- All of them ---


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_may_read_only_and_a_job_that_needs_more_says_so(name: str) -> None:
    assert workflow(name)["permissions"] == {"contents": "read"}
    for job in workflow(name)["jobs"].values():
        assert job["timeout-minutes"] <= 360
        assert set(job.get("permissions", {}).values()) <= {"read", "write"}


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned(name: str) -> None:
    used = re.findall(r"uses: (\S+)", (WORKFLOWS / f"{name}.yml").read_text())
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", action)] == []


# --- CI ---


def test_ci_runs_every_python_that_the_classifiers_name() -> None:
    jobs = workflow("ci")["jobs"]
    assert {row["python"] for row in jobs["test"]["strategy"]["matrix"]["include"]} == set(PYTHONS)
    oldest, newest = (f(PYTHONS, key=Version) for f in (min, max))
    rows = {(row["os"], row["python"]) for row in jobs["portable"]["strategy"]["matrix"]["include"]}
    assert rows == {(system, python) for system in ("macos-latest", "windows-latest") for python in (oldest, newest)}


def test_ci_runs_the_pinned_torch_and_those_of_make_test_torches() -> None:
    tested = {row["torch"] for row in workflow("ci")["jobs"]["test"]["strategy"]["matrix"]["include"]}
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    (torches,) = re.findall(r"^TORCHES \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert {pinned, *torches.split()} <= tested


def test_the_tests_of_other_systems_exist() -> None:
    named = re.findall(r"tests/[\w/.]+", commands(workflow("ci")["jobs"]["portable"]))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_tests_of_other_systems_import_what_ci_installs() -> None:
    """And no more of what is outside of Python's library: neither TileLang nor Triton, nor the other extras."""
    job = commands(workflow("ci")["jobs"]["portable"])
    (line,) = re.findall(r"pip install -c constraints.txt (hypothesis .*)", job)
    missing = {"tilelang", "triton", "tvm", "transformers", "matplotlib", "gradio", "yaml"} - set(line.split())
    for path in re.findall(r"tests/[\w/.]+", job):
        for file in (ROOT / path).rglob("test_*.py") if (ROOT / path).is_dir() else [ROOT / path]:
            top = set(re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.M))
            assert top & missing == set(), file


# --- A release ---


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    parsed = workflow("release")
    # YAML reads the key "on" as true.
    assert parsed[True]["push"] == {"tags": ["v*"]}
    jobs: dict[str, Any] = parsed["jobs"]
    return jobs


def test_only_a_pushed_tag_is_published(release: dict[str, Any]) -> None:
    publishing = [name for name, job in release.items() if "gh-action-pypi-publish" in str(job)]
    assert publishing == ["publish"]
    publish = release["publish"]
    assert publish["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert set(publish["needs"]) == release.keys() - {"publish"}
    assert publish["environment"]["name"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert "run" not in str(publish["steps"]), "the job that may publish runs no code of the repository"
    assert "password" not in (WORKFLOWS / "release.yml").read_text().replace("no password", "")


@pytest.mark.parametrize("name", ["package", "kernels"])
def test_what_is_published_is_checked_and_attested(release: dict[str, Any], name: str) -> None:
    job = release[name]
    assert "twine check --strict" in commands(job)
    uses = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
    assert uses[-2:] == ["actions/attest-build-provenance", "actions/upload-artifact"]
    attested, uploaded = (step["with"] for step in job["steps"][-2:])
    assert attested["subject-path"] == uploaded["path"]
    assert job["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    assert job["steps"][0]["with"]["fetch-depth"] == 0, "without its tags a checkout has no version"


def test_kernels_are_compiled_for_architectures_that_there_are(release: dict[str, Any]) -> None:
    matrix = release["kernels"]["strategy"]["matrix"]
    assert matrix["arch"] == ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
    assert set(matrix["arch"]) <= set(ARCHITECTURES)
    assert "tileattn bundle --arch ${{ matrix.arch }} --preset default --out dist-kernels" in commands(
        release["kernels"]
    )


def test_the_example_that_it_runs_is_readmes(release: dict[str, Any]) -> None:
    """The workflow takes the first block of Python out of README with sed; here the same by other means."""
    (guard,) = re.findall(r"grep -q '(.*)' example.py", commands(release["package"]))
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert guard in code[1]
