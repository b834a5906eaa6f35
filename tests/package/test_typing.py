"""The types that a type checker sees: mypy on a user's small project, tests/package/typing_project.

mypy's cache is the project's own, .mypy_cache, which `make lint` has filled: without it mypy first reads all of torch.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import typing
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions

import tileattn
from tests.tools import ROOT
from tileattn.api import signatures

USERS = Path(__file__).parent / "typing_project"
ERROR = re.compile(r"(?P<file>[\w./-]+\.py):(?P<line>\d+): error: .* \[(?P<code>[\w-]+)\]")


def mypy(*arguments: str, cwd: Path) -> str:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 2: mypy itself failed
    assert not done.stderr, done.stderr
    return done.stdout


def errors(output: str) -> set[tuple[str, int, str]]:
    """(file, line, code) of each error."""
    matches = [ERROR.fullmatch(line) for line in output.splitlines() if ": error:" in line]
    assert all(matches), output
    return {(Path(match["file"]).name, int(match["line"]), match["code"]) for match in matches if match}


def marked() -> set[tuple[str, int, str]]:
    """The errors that comments in the project's files announce."""
    marks = set()
    for path in USERS.glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := re.search(r"# error: ([\w-]+)$", line):
                marks.add((path.name, number, match[1]))
    return marks


def test_mypy_accepts_what_is_right_and_finds_what_is_wrong() -> None:
    files = [str(path) for path in sorted(USERS.glob("*.py"))]
    output = mypy("--config-file", str(ROOT / "pyproject.toml"), *files, cwd=ROOT)
    assert errors(output) == marked(), output
    assert len(marked()) >= 15


@pytest.mark.slow
def test_the_installed_wheel_is_typed(tmp_path: Path) -> None:
    """mypy's strict mode, on a site-packages folder: there mypy reads a package only if it has py.typed."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    zipfile.ZipFile(built).extractall(site)
    (site / "others.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")  # where torch is
    own = tmp_path / "project"
    own.mkdir()
    for path in USERS.glob("*.py"):
        (own / path.name).write_text(path.read_text())
    output = mypy("--strict", "--config-file=", f"--python-executable={python}", ".", cwd=own)
    assert errors(output) == marked(), output


def test_the_project_runs() -> None:
    """What mypy is told to expect there is what the calls return."""
    names: dict[str, Any] = {"__name__": "right"}
    exec(compile((USERS / "right.py").read_text(), "right.py", "exec"), names)
    x, mask = torch.randn(2, 8, 4, 8), torch.ones(2, 8, dtype=torch.bool)
    assert names["attention"](x, x, x, True).shape == x.shape
    assert names["varlen"](x[0], torch.tensor([0, 4, 8], dtype=torch.int32), False).shape == ()
    assert names["decoding"](x, torch.tensor([8, 3], dtype=torch.int32), False).shape == x.shape
    assert names["cached"](x).shape == x.shape
    assert names["sdpa"](x, mask[0, :4]).shape == x.shape
    assert names["modules"](x.flatten(2)).shape == (2, 8, 32)
    assert names["profiles"](x) > 0
    assert torch.equal(names["padding"](x, mask), x)
    assert names["others"](x, mask).shape == x.shape


# --- The overloads say what the function says ---


def overloads(function: Callable[..., Any]) -> list[ast.FunctionDef]:
    """The definitions of a function's overloads, from the source: Python 3.10 does not keep them at run time."""
    tree = ast.parse(Path(inspect.getfile(function)).read_text())
    *definitions, _ = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__
    )
    return definitions


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (tileattn.attention, signatures.AttentionOptions),
        (tileattn.varlen_attention, signatures.VarlenOptions),
        (tileattn.decode, signatures.DecodeKeywords),
    ],
)
def test_overloads_have_the_functions_parameters(function: Callable[..., Any], options: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    hints = typing.get_type_hints(function)
    tensors = {p.name: p.annotation for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    keywords = {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert len(tensors) + len(keywords) == len(parameters), "no *args, no **kwargs"
    assert typing.get_type_hints(options) == {name: hint for name, hint in keywords.items() if name != "return_lse"}

    definitions = overloads(function)
    of_lse = {}
    for each in definitions:
        assert [ast.unparse(decorator) for decorator in each.decorator_list] == ["overload"]
        assert {a.arg: ast.unparse(a.annotation) for a in each.args.args if a.annotation} == tensors
        assert not each.args.defaults
        (return_lse,), options_of = each.args.kwonlyargs, each.args.kwarg
        assert return_lse.arg == "return_lse"
        assert options_of is not None
        assert options_of.annotation is not None
        assert ast.unparse(options_of.annotation) == f"Unpack[{options.__name__}]"
        assert return_lse.annotation is not None
        assert each.returns is not None
        of_lse[ast.unparse(return_lse.annotation)] = ast.unparse(each.returns)
    pair = "tuple[torch.Tensor, torch.Tensor]"
    assert of_lse == {"Literal[False]": "torch.Tensor", "Literal[True]": pair, "bool": f"torch.Tensor | {pair}"}
    assert inspect.signature(function).return_annotation == of_lse["bool"]


def test_the_function_that_runs_is_the_one_that_is_documented() -> None:
    """`overload` puts nothing around it."""
    for function in (tileattn.attention, tileattn.varlen_attention, tileattn.decode):
        assert not hasattr(function, "__wrapped__")
        assert "**" not in str(inspect.signature(function))
        assert (function.__doc__ or "").count("Args:") == 1
        assert typing_extensions.get_type_hints(function)["return_lse"] is bool
