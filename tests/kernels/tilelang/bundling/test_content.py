"""The folder of a bundle: kernels of the cache, under their identities, with what is needed to judge them."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileattn.kernels.bundles.manifest import KERNELS, checksum, identity, read
from tileattn.kernels.cache import sources, store, trust
from tileattn.kernels.cache.store import VARIABLE, kernel_cache
from tileattn.kernels.tilelang.backward.library import SharesJob
from tileattn.kernels.tilelang.build import library
from tileattn.kernels.tilelang.build.library import generators
from tileattn.kernels.tilelang.bundling import content
from tileattn.kernels.tilelang.packed.library import PlanJob

ARCH = "gfx942"  # its bundles bring no libraries of TileLang
PLAN, SHARES = PlanJob(ARCH), SharesJob(torch.bfloat16, ARCH)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))


def building(text: str, source: str | None) -> Callable[[Path], dict[str, str] | None]:
    def build(path: Path) -> dict[str, str] | None:
        path.write_text(text)
        return None if source is None else {"source": source}

    return build


def test_a_bundle_has_the_kernels_of_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    for job, text in ((PLAN, "plan"), (SHARES, "shares")):
        kernel_cache().find_or_build(job.key, building(text, f"source of {text}"))
    manifest = content.fill(folder, [PLAN, SHARES], ARCH, "two")
    assert read(folder) == manifest
    assert (manifest.distribution, manifest.arch, manifest.preset) == ("tileattn-kernels-gfx942", ARCH, "two")
    assert manifest.runtime == {}
    assert "cuda" not in manifest.versions
    assert set(manifest.kernels) == {identity(PLAN.name.facts), identity(SHARES.name.facts)}
    for job, text in ((PLAN, "plan"), (SHARES, "shares")):
        entry = manifest.kernels[identity(job.name.facts)]
        path = folder / KERNELS / f"{identity(job.name.facts)}.so"
        assert path.read_text() == text
        assert entry.sha256 == checksum(path)
        assert entry.source == f"source of {text}"
        assert entry.generators == sources.digest(*generators(job.name.module))


def test_a_kernel_that_the_cache_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="the cache does not hold plan of packed sequences gfx942"):
        content.fill(tmp_path, [PLAN], ARCH, "one")


def test_a_kernel_without_the_digest_of_its_source_is_not_taken() -> None:
    """As older versions of tileattn left it: it has to be compiled again."""
    assert content.cached(PLAN) is None
    kernel_cache().find_or_build(PLAN.key, building("plan", None))
    assert content.cached(PLAN) is None


def test_a_digest_that_is_no_text_is_none() -> None:
    """As a damaged record may have it."""

    def build(path: Path) -> Any:
        path.write_text("plan")
        return {"source": 5}

    kernel_cache().find_or_build(PLAN.key, build)
    assert content.cached(PLAN) is None


@pytest.mark.parametrize("read_only", [False, True])
def test_a_kernel_without_the_digest_of_its_source_is_compiled_again(
    read_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that cannot be written it stays, and the new one goes into the user's own."""
    kernel_cache().find_or_build(PLAN.key, building("old", None))
    monkeypatch.setattr(store, "user_folder", lambda: tmp_path / "own")
    if read_only:
        monkeypatch.setattr(trust, "is_written_by", lambda folder: folder.name != "cache")
    build_library = building("new", None)
    build = SimpleNamespace(build_library=lambda function, arch, path: build_library(path) or "its source")
    monkeypatch.setitem(sys.modules, "tileattn.kernels.tilelang.build.compile", build)  # type: ignore[arg-type]
    monkeypatch.setattr(PlanJob, "function", lambda job: None)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert content.compile_job(PLAN).error is None
    kept = content.cached(PLAN)
    assert kept is not None
    assert (kept.library.read_text(), kept.source) == ("new", "its source")
    assert kept.library.parent == tmp_path / ("own" if read_only else "cache")
    assert ["has no 'source'" in str(each.message) for each in given] == [True] * (not read_only)
    folder = tmp_path / "package"
    folder.mkdir()
    assert len(content.fill(folder, [PLAN], ARCH, "one").kernels) == 1


def test_a_kernel_of_an_installed_bundle_is_compiled_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle is made from the cache, which an installed one does not fill."""
    monkeypatch.setattr(library.installed, "find", lambda *of: Path("bundled.so"))
    assert library.find_or_compile(PLAN) == Path("bundled.so")
    assert content.cached(PLAN) is None
    build_library = building("plan", None)
    build = SimpleNamespace(build_library=lambda function, arch, path: build_library(path) or "its source")
    monkeypatch.setitem(sys.modules, "tileattn.kernels.tilelang.build.compile", build)  # type: ignore[arg-type]
    monkeypatch.setattr(PlanJob, "function", lambda job: None)
    assert content.compile_job(PLAN).error is None
    kept = content.cached(PLAN)
    assert kept is not None
    assert (kept.library.read_text(), kept.source) == ("plan", "its source")


def test_a_kernel_that_does_not_compile_is_an_error_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: PlanJob) -> None:
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(PlanJob, "function", fail)
    monkeypatch.setitem(sys.modules, "tileattn.kernels.tilelang.build.compile", SimpleNamespace(build_library=None))  # type: ignore[arg-type]
    assert content.compile_job(PLAN).error == "RuntimeError: no nvcc"


def test_a_name_has_architecture_and_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "cuda_version", lambda: "13.0.88")
    assert content.distribution_of("sm_90a") == "tileattn-kernels-sm90a-cu13"
    assert content.distribution_of("gfx942") == "tileattn-kernels-gfx942"


@pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi")
def test_a_compiler_that_fails_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.c").write_text("int f( {")
    with pytest.raises(RuntimeError, match=r"g\+\+ (ended with exit status 1|is not installed)"):
        content._compile(tmp_path / "wrong.c", tmp_path / "wrong.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"g\+\+ is not installed, which compiles the library"):
        content._compile(tmp_path / "wrong.c", tmp_path / "wrong.so")
