"""Sources in the package: which are taken, and that kernels are compiled of them without TileLang."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.tilelang.build.test_nvcc import needs_nvcc
from tileattn.kernels.bundles.manifest import identity
from tileattn.kernels.cache import sources
from tileattn.kernels.tilelang.build import ahead, library, link
from tileattn.kernels.tilelang.build.sources import Sources
from tileattn.kernels.tilelang.packed.library import PlanJob

PLAN = PlanJob("sm_90a")
KEY = identity(PLAN.name.facts)
SOURCES = Sources("device code, é", "host code", b"\0image\xff")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ahead, "FOLDER", tmp_path / "generated")
    return tmp_path / "generated"


MODULES = library.generators(PLAN.name.module)
HERE = ahead.digest_of_generators(*MODULES)


def found(facts: str = PLAN.name.facts, arch: str = PLAN.arch, tilelang: str = "1") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ahead.find(facts, MODULES, arch, tilelang)


def test_what_is_written_is_read(folder: Path) -> None:
    kernels = {KEY: ahead.Generated(SOURCES, HERE), "another": ahead.Generated(Sources("", ""), "")}
    ahead.write(ahead.path_of("sm_90a"), "1", kernels)
    assert ahead.read(ahead.path_of("sm_90a")) == ("1", kernels)
    assert os.listdir(folder) == ["sm_90a.json.xz"]


def test_a_source_is_taken_where_all_is_equal(folder: Path) -> None:
    assert found() is None
    ahead.write(ahead.path_of("sm_90a"), "1", {KEY: ahead.Generated(SOURCES, HERE)})
    assert found() == SOURCES
    assert found(facts="another kernel") is None
    assert found(arch="sm_80") is None
    assert found(tilelang="2") is None


def test_a_source_of_other_files_is_not_taken(folder: Path) -> None:
    ahead.write(ahead.path_of("sm_90a"), "1", {KEY: ahead.Generated(SOURCES, "with another instruction")})
    assert found() is None


def test_the_files_are_those_that_decide_a_source() -> None:
    """All that the cache's key has, but for those that compile it: they change no source."""
    files = sources.closure(MODULES)
    assert files.keys() > ahead.COMPILING
    assert {"packed.plan_kernel", "build.compile"} <= {
        name.partition("tilelang.")[2] for name in files.keys() - ahead.COMPILING
    }
    for name in files:
        edited = sources.digest_of({**{key: files[key] for key in files.keys() - ahead.COMPILING}, name: b"edited"})
        assert edited != HERE


def test_a_variable_lets_tilelang_generate_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.write(ahead.path_of("sm_90a"), "1", {KEY: ahead.Generated(SOURCES, HERE)})
    monkeypatch.setenv("TILEATTN_SOURCES", "0")
    assert found() is None
    monkeypatch.setenv("TILEATTN_SOURCES", "1")
    assert found() == SOURCES
    monkeypatch.setenv("TILEATTN_SOURCES", "no")
    with pytest.raises(ValueError, match=r"^TILEATTN_SOURCES must be 0 \(TileLang generates .*\) or 1, got 'no'$"):
        found()


def test_a_python_without_lzma_can_do_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.write(ahead.path_of("sm_90a"), "1", {KEY: ahead.Generated(SOURCES, HERE)})
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.warns(UserWarning, match="is not read, and kernels are generated anew: import of lzma"):
        assert ahead.find(PLAN.name.facts, MODULES, "sm_90a", "1") is None
    code = "import sys; sys.modules['_lzma'] = None; import tileattn.kernels.tilelang.build.library"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_that_cannot_be_written_leaves_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*of: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        ahead.write(ahead.path_of("sm_90a"), "1", {})
    assert os.listdir(folder) == []


INDEX = lzma.compress(json.dumps({"format": 1, "tilelang": "1", "kernels": {KEY: HERE}}).encode())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no xz", "damaged .LZMAError"),
        (lzma.compress(b"{"), "Expecting property name"),
        (lzma.compress(b"[]"), "damaged .TypeError"),
        (lzma.compress(b"{}"), "damaged .KeyError: 'format'"),
        (lzma.compress(b'{"format": 2}'), "its format is 2, and this version of tileattn reads 1"),
        (lzma.compress(b'{"format": 1, "tilelang": "1", "kernels": 1}'), "damaged .TypeError"),
        (INDEX, "Expecting value"),
        (INDEX + lzma.compress(b"[]"), "damaged .AttributeError"),
        (INDEX + lzma.compress(json.dumps({KEY: [1]}).encode()), "not enough values"),
        (INDEX + lzma.compress(b"{}"), "damaged .a kernel of its list has no source"),
    ],
)
def test_a_damaged_file_is_a_warning(content: bytes, said: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "sm_90a.json.xz").write_bytes(content)
    with pytest.warns(UserWarning, match=rf"sm_90a.json.xz is not read, and kernels are generated anew: .*{said}"):
        assert ahead.find(PLAN.name.facts, MODULES, "sm_90a", "1") is None


def test_the_library_is_made_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.write(ahead.path_of("sm_90a"), library.version("tilelang"), {KEY: ahead.Generated(SOURCES, HERE)})
    built = []
    monkeypatch.setattr(link, "build_library", lambda *arguments: built.append(arguments))
    monkeypatch.setattr(PlanJob, "function", lambda job: pytest.fail("it is generated anew"))
    assert library._build(PLAN, Path("library.so")) == SOURCES.digest
    assert built == [(SOURCES, "sm_90a", Path("library.so"))]


def test_tilelang_generates_what_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other files: the digest in the package is not that of today's."""
    stale = {KEY: ahead.Generated(SOURCES, "of other files")}
    ahead.write(ahead.path_of("sm_90a"), library.version("tilelang"), stale)
    built = SimpleNamespace(build_library=lambda *of: f"generated: {of}")
    monkeypatch.setitem(sys.modules, "tileattn.kernels.tilelang.build.compile", built)  # type: ignore[arg-type]
    monkeypatch.setattr(PlanJob, "function", lambda job: "function")
    assert library._build(PLAN, Path("library.so")) == f"generated: {('function', 'sm_90a', Path('library.so'))}"


WITHOUT_TILELANG = """
import sys
from pathlib import Path
from tileattn.kernels.tilelang.build import ahead, library
from tileattn.kernels.tilelang.packed.library import PlanJob
ahead.FOLDER = Path(sys.argv[1])
path = library.compile_into_cache(PlanJob("sm_90a"))
assert library.load(path)["plan"] is not None
assert "tilelang" not in sys.modules
print(library.kernel_cache().record(path)["source"])
"""


@needs_nvcc
def test_a_kernel_is_compiled_without_importing_tilelang(folder: Path, tmp_path: Path) -> None:
    from tileattn.kernels.tilelang.build import compile as compile_module

    of_plan = compile_module.sources(PLAN.function(), PLAN.arch)
    ahead.write(ahead.path_of("sm_90a"), library.version("tilelang"), {KEY: ahead.Generated(of_plan, HERE)})
    environment = dict(os.environ, TILEATTN_CACHE_DIR=str(tmp_path / "cache"))
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TILELANG, str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == of_plan.digest
