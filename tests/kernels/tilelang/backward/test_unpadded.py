"""Products that leave out padding of the head dim: which columns, what is lowered, and what ptxas makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward.test_lowering import SERIALIZED, backward_of
from tests.tools.lowering import assemble, find_nvcc, make_call, numbers
from tileattn import Causal
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig
from tileattn.kernels.tilelang.backward.kernels import main_kernel
from tileattn.kernels.tilelang.build.compile import device_source

TILE = HopperBackwardConfig(64, unpadded=True)
STEPS = re.compile(
    r"ki\w* < (\d+);[^\n]*\n\s*"
    r"tl::wgmma_(ss|rs)<[^>]*?kFloat32, 64, (\d+), 16, (true|false), (true|false)"
)


def products(dim: int, config: HopperBackwardConfig) -> list[tuple[int, str, int, bool, bool]]:
    """Of each product its steps, where the first operand lies, columns, and which operands have theirs in rows."""
    source = device_source(main_kernel(backward_of(make_call(dim=dim)), config), "sm_90a")
    found = STEPS.findall(source)
    return [(int(steps), kind, int(n), a == "true", b == "true") for steps, kind, n, a, b in found]


@pytest.mark.parametrize(
    ("dims", "used"),
    [
        ((80, 80), {96: 80}),
        ((112, 112), {128: 112}),
        ((72, 72), {96: 80}),
        ((112, 80), {128: 112, 96: 80}),
        ((128, 112), {}),  # one width for both: the larger head dim needs all of it
        ((96, 96), {}),
        ((64, 64), {}),
    ],
)
def test_used_columns(dims: tuple[int, int], used: dict[int, int]) -> None:
    call = make_call(dim=dims[0], dim_v=dims[1])
    assert TILE.used_columns(call) == used
    assert HopperBackwardConfig(64).used_columns(call) == {}


@pytest.mark.parametrize(("dim", "width"), [(80, 96), (112, 128)])
def test_products_have_the_columns_of_the_head_dim(dim: int, width: int) -> None:
    padded, unpadded = products(dim, HopperBackwardConfig(64)), products(dim, TILE)
    assert len(padded) == len(unpadded) == 5
    s, dp, dv, dq, dk = unpadded
    for product in (s, dp):  # over the head dim
        assert product == (dim // 16, "ss", 64, False, False)
    for product in (dv, dk):  # whose columns are the head dim
        assert product == (4, "rs", dim, False, True)
    assert dq == padded[3]  # its warpgroups share whole panels of K
    assert padded[0][0] == width // 16
    assert padded[2][2] == width


def test_other_head_dims_keep_their_kernel() -> None:
    assert products(96, TILE) == products(96, HopperBackwardConfig(64))


@pytest.mark.slow  # each is lowered and assembled in seconds
@pytest.mark.parametrize(("dim", "causal", "block_M"), [(80, False, 64), (112, True, 64), (112, True, 80)])
def test_nothing_is_spilled_or_serialised(dim: int, causal: bool, block_M: int, tmp_path: Path) -> None:
    call = backward_of(make_call(Causal() if causal else None, dim=dim))
    source = device_source(main_kernel(call, HopperBackwardConfig(block_M, unpadded=True)), "sm_90a")
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
    report = assemble(nvcc, source, "sm_90a", tmp_path)
    assert not SERIALIZED.search(report), report
    assert max(numbers(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)) == 0, report
