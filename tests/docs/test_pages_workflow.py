"""The workflow that publishes the site: it builds what `make docs` builds, and only the main branch deploys it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.tools import ROOT


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}, "a job that needs more says so"
    found: dict[str, Any] = workflow["jobs"]
    return found


def test_it_uploads_the_folder_that_make_docs_builds(jobs: dict[str, Any]) -> None:
    steps = jobs["build"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make docs"]
    assert re.search(r"^docs:.*\n\t.*mkdocs build", (ROOT / "Makefile").read_text(), re.M)
    settings = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^strict: true$", settings, re.M)
    assert "site_dir" not in settings  # so it is mkdocs' own: site
    assert steps[-1]["with"] == {"path": "site"}
    assert steps[-1]["uses"].startswith("actions/upload-pages-artifact@")


def test_only_the_main_branch_is_deployed(jobs: dict[str, Any]) -> None:
    deploy = jobs["deploy"]
    assert deploy["needs"] == "build"
    assert "github.event_name != 'pull_request'" in deploy["if"]
    assert "github.ref == 'refs/heads/main'" in deploy["if"]
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"}
    assert "permissions" not in jobs["build"]
