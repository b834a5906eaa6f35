"""Sources in the package: which are taken, and that kernels are compiled of them without TileLang."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.tilelang.build.test_nvcc import needs_nvcc
from tileattn.kernels.bundles.manifest import identity
from tileattn.kernels.cache.sources import digest
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


def found(facts: str = PLAN.name.facts, generators: str = "as here", arch: str = PLAN.arch, tilelang: str = "1") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ahead.find(facts, generators, arch, tilelang)


def test_what_is_written_is_read(folder: Path) -> None:
    kernels = {KEY: ahead.Generated(SOURCES, "as here"), "another": ahead.Generated(Sources("", ""), "")}
    ahead.write(ahead.path_of("sm_90a"), "1", kernels)
    assert ahead.read(ahead.path_of("sm_90a")) == ("1", kernels)
    assert os.listdir(folder) == ["sm_90a.json.xz"]


def test_a_source_is_taken_where_all_is_equal(folder: Path) -> None:
    assert found() is None
    ahead.write(ahead.path_of("sm_90a"), "1", {KEY: ahead.Generated(SOURCES, "as here")})
    assert found() == SOURCES
    assert found(facts="another kernel") is None
    assert found(generators="with another instruction") is None
    assert found(arch="sm_80") is None
    assert found(tilelang="2") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no xz", "damaged .LZMAError"),
        (lzma.compress(b"{"), "Expecting property name"),
        (lzma.compress(b"[]"), "damaged .TypeError"),
        (lzma.compress(b"{}"), "damaged .KeyError: 'format'"),
        (lzma.compress(b'{"format": 2}'), "its format is 2, and this version of tileattn reads 1"),
        (lzma.compress(b'{"format": 1, "tilelang": "1", "kernels": []}'), "damaged .AttributeError"),
        (lzma.compress(b'{"format": 1, "tilelang": "1", "kernels": {"k": [1]}}'), "not enough values"),
    ],
)
def test_a_damaged_file_is_a_warning(content: bytes, said: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "sm_90a.json.xz").write_bytes(content)
    with pytest.warns(UserWarning, match=rf"sm_90a.json.xz is not read, and kernels are generated anew: .*{said}"):
        assert ahead.find(PLAN.name.facts, "as here", "sm_90a", "1") is None


def test_the_library_is_made_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generators = digest(*library.generators(PLAN.name.module))
    ahead.write(ahead.path_of("sm_90a"), library.version("tilelang"), {KEY: ahead.Generated(SOURCES, generators)})
    built = []
    monkeypatch.setattr(link, "build_library", lambda *arguments: built.append(arguments))
    monkeypatch.setattr(PlanJob, "function", lambda job: pytest.fail("it is generated anew"))
    assert library._build(PLAN, Path("library.so")) == SOURCES.digest
    assert built == [(SOURCES, "sm_90a", Path("library.so"))]


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
    from tileattn.kernels.tilelang.build.compile import sources

    of_plan = sources(PLAN.function(), PLAN.arch)
    generators = digest(*library.generators(PLAN.name.module))
    ahead.write(ahead.path_of("sm_90a"), library.version("tilelang"), {KEY: ahead.Generated(of_plan, generators)})
    environment = dict(os.environ, TILEATTN_CACHE_DIR=str(tmp_path / "cache"))
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TILELANG, str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == of_plan.digest
