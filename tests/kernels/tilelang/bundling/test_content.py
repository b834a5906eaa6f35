"""The folder of a bundle: kernels of the cache, under their identities, with what is needed to judge them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tileattn.kernels.bundles.manifest import KERNELS, checksum, identity, read
from tileattn.kernels.cache import sources
from tileattn.kernels.cache.store import VARIABLE, kernel_cache
from tileattn.kernels.tilelang.backward.library import SharesJob
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
        library = folder / KERNELS / f"{identity(job.name.facts)}.so"
        assert library.read_text() == text
        assert entry.sha256 == checksum(library)
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
