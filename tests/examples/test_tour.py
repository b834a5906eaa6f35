"""The notebook: its code is public and fits its outputs; run again it prints the same."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import re
import struct
from typing import Any

import pytest

from tests.tools import ROOT

NOTEBOOK = ROOT / "examples/tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def source_of(cell: dict[str, Any]) -> str:
    """A cell's Python, without magics such as `%matplotlib inline`."""
    return re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)


def names_of_tileattn(tree: ast.AST) -> set[str]:
    """What a program takes from the package, with dots: "tileattn.viz.draw_tiles"."""
    modules = {"tileattn": "tileattn"}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tileattn":
            for each in node.names:
                names.add(f"{node.module}.{each.name}")
                modules[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add(f"{modules[node.value.id]}.{node.attr}")
    return names


def test_the_notebook_uses_public_names_only() -> None:
    names = names_of_tileattn(ast.parse("\n".join(map(source_of, CODE))))
    assert {"tileattn.attention", "tileattn.viz.draw_tiles", "tileattn.nn.GroupedQueryAttention"} <= names
    submodules = {"tileattn.viz", "tileattn.nn"}
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert module in {"tileattn", *submodules}, name
        assert attribute in importlib.import_module(module).__all__ or name in submodules, name


def test_the_notebook_is_as_it_ran_from_top_to_bottom() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 4
    for picture in pictures:
        width, height = struct.unpack(">II", base64.b64decode(picture)[16:24])
        assert max(width, height) <= 500
    assert NOTEBOOK.stat().st_size < 200_000


def test_the_links_of_the_notebook_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\((\.\./[^)#]+)", text)
    assert len(links) > 5
    for link in links:
        assert (NOTEBOOK.parent / link).exists(), link


def printed(cells: list[Any]) -> list[str]:
    """What the cells print, with # for numbers that have a point: roundings differ between machines."""
    texts = [
        "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in cell["outputs"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]
    return [re.sub(r"\d+\.\d*(?:e[+-]?\d+)?", "#", text) for text in texts]


@pytest.mark.slow  # starts a Jupyter kernel
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs tileattn[notebook]")
    pytest.importorskip("ipykernel", reason="needs tileattn[notebook]")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert printed(notebook.cells) == printed(CELLS)
