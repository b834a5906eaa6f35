"""The generated kernel of lists: registers, no atomic operation, and how long it takes to generate."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from tests.tools.lowering import assemble, find_nvcc, numbers
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.lists.analysis import analysis
from tileattn.kernels.tilelang.lists.kernel import lists_kernel
from tileattn.kernels.tilelang.lists.library import dtypes_of
from tileattn.variant.key import encode


def source_of(name: str) -> str:
    variant = encode(pattern(name, 1024, 2, "cpu").mask, ())[0]
    found = analysis(variant)
    assert found is not None
    return device_source(lists_kernel(found, dtypes_of(variant)), "sm_90a")


@pytest.mark.slow(reason="lowers a kernel, 6 s")
def test_wide_loads_are_in_a_branch_of_their_own() -> None:
    source = source_of("loaded-ids")
    before, behind = source.split("for (int turn", 1)
    assert "= t0[" in before
    assert "t0[" not in behind
    assert "phase == 0" not in source_of("dilated")
    assert "atomic" not in source.lower().replace("atomic.h", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_spilled(name: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    said = assemble(nvcc, source_of(name), "sm_90a", tmp_path)
    assert numbers(r"(\d+) bytes spill stores", said) == [0]
    assert max(numbers(r"Used (\d+) registers", said)) <= 128
