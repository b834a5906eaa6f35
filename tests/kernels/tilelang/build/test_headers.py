"""Headers that nvcc gets in place of larger ones: it makes the same machine code, and knows when they do not do."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.build.test_nvcc import KERNEL, needs_nvcc, sections
from tests.tools.lowering import lower
from tileattn.call.facts import AttentionCall
from tileattn.kernels.tilelang.build import headers, nvcc
from tileattn.kernels.tilelang.build.collection import collection_paused
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.forward.config import ForwardConfig
from tileattn.kernels.tilelang.packed.plan_kernel import plan_kernel


def generic_source(arch: str) -> str:
    call = AttentionCall(torch.bfloat16, 64, 64, "Causal()", arch=arch)
    return lower(call, ForwardConfig(64, 64, num_stages=1, threads=128))


@needs_nvcc
@pytest.mark.parametrize(
    ("of", "arch"),
    [
        pytest.param(lambda: generic_source("sm_80"), "sm_80", id="generic-sm80", marks=pytest.mark.slow),
        pytest.param(lambda: generic_source("sm_90a"), "sm_90a", id="generic-sm90a", marks=pytest.mark.slow),
        pytest.param(lambda: device_source(plan_kernel("sm_90a"), "sm_90a"), "sm_90a", id="plan"),
    ],
)
def test_the_machine_code_is_the_same(of: object, arch: str, tmp_path: Path) -> None:
    code = of()  # type: ignore[operator]
    with_all = nvcc._run(code, arch, tmp_path, [])
    assert isinstance(with_all, bytes)
    expected = sections(with_all)
    assert any(name.startswith(".text.") for name in expected)
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    shortened = headers.without_unused(code)
    assert shortened != code
    headers.write_stand_ins(shortened, folder)
    found = nvcc._run(shortened, arch, folder, [f"-I{folder}"])
    assert isinstance(found, bytes), found  # it did not need TileLang's own headers
    assert sections(found) == expected


@needs_nvcc
def test_a_source_that_uses_such_a_header_still_compiles() -> None:
    """Of the C++ library, and of CUTLASS."""
    for use in (
        "#include <functional>\nusing Sum = std::plus<int>;\n",
        "#include <cute/arch/mma_sm90_gmma.hpp>\nusing Product = cute::SM90::GMMA::Major;\n",
    ):
        assert nvcc.cubin(use + KERNEL, "sm_90a")


def test_includes_that_are_used_stay() -> None:
    scan, debug = headers.UNUSED
    assert headers.without_unused(scan + debug + KERNEL) == KERNEL
    assert headers.without_unused(scan + debug + "tl::CumSum1D<4> x;\n") == scan + "tl::CumSum1D<4> x;\n"
    assert headers.without_unused(scan + debug + "device_assert(x);\n") == debug + "device_assert(x);\n"


def test_products_of_whole_tiles_keep_their_header(tmp_path: Path) -> None:
    headers.write_stand_ins(nvcc.HEADER + KERNEL, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(headers.OF_THE_HOST)
    (tmp_path / "other").mkdir()
    headers.write_stand_ins(KERNEL, tmp_path / "other")
    assert (tmp_path / "other" / headers.GMMA).read_text() == headers.WARPGROUP


def fails() -> None:
    with collection_paused():
        assert not gc.isenabled()
        raise RuntimeError("no kernel")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_and_then_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="no kernel"):
            fails()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
