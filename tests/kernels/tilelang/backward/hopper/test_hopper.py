"""The Hopper schedule of the backward pass, head dims up to 128: the calls that use it, and its generated code.

The tests lower and assemble; they need no GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward.hopper.test_hopper_wide import without_tensors
from tests.kernels.tilelang.backward.test_lowering import SERIALIZED, backward_of
from tests.tools.lowering import (
    BIAS,
    IDS,
    MAX_SPILLED,
    SLOPES,
    TILES,
    WIDE_TILES,
    assemble,
    find_nvcc,
    make_call,
    numbers,
)
from tileattn import ALiBi, Bias, Causal, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.facts import BackwardCall
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig
from tileattn.kernels.tilelang.backward.hopper.dq_order import RegisterOrder
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.backward.operand_gradients import ADDED, paths
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.variant.program import program

CALLS = {
    "plain-128": backward_of(make_call()),
    "causal-128": backward_of(make_call(Causal())),
    "window-128": backward_of(make_call(SlidingWindow(5, 0))),
    "documents-96": backward_of(make_call(IDS, dim=96)),
    "documents-64": backward_of(make_call(IDS & Causal(), dim=64)),
    "documents-128": backward_of(make_call(IDS & Causal())),
    "softcap-128": backward_of(make_call(Causal(), SoftCap(30.0))),
    "alibi-128": backward_of(make_call(Causal(), ALiBi(SLOPES))),
    "bias-128": backward_of(make_call(Causal(), Bias(BIAS))),
    "bias-tiles-128": backward_of(make_call(None, Bias(TILES))),
    "bias-tiles-read-128": without_tensors(backward_of(make_call(Causal(), Bias(TILES)))),
    "bias-tiles-shared-128": backward_of(make_call(Causal(), Bias(TILES[:1]))),
    "bias-wide-tiles-128": backward_of(make_call(Causal(), Bias(WIDE_TILES))),
    "bias-wide-tiles-read-128": without_tensors(backward_of(make_call(IDS & Causal(), Bias(WIDE_TILES)))),
    "tiles-times-128": backward_of(make_call(None, lambda score, b, h, q, k: score * TILES[b, h, q, k])),
    "tiles-composed-128": backward_of(make_call(Causal(), ALiBi(SLOPES), Bias(TILES), SoftCap(9.0))),
    "bias-tiles-dropped-128": backward_of(make_call(Causal(), Bias(TILES), dropout=True)),
    "composed-128": backward_of(make_call(PrefixLM(3), ALiBi(SLOPES), Bias(BIAS), SoftCap(9.0))),
    "plain-96": backward_of(make_call(dim=96)),
    "causal-80": backward_of(make_call(Causal(), dim=80)),
    "plain-64": backward_of(make_call(dim=64, dtype=torch.float16)),
    "causal-64": backward_of(make_call(Causal(), dim=64)),
    "softcap-64": backward_of(make_call(Causal(), SoftCap(30.0), dim=64)),
    "alibi-64": backward_of(make_call(Causal(), ALiBi(SLOPES), dim=64)),
    "bias-64": backward_of(make_call(None, Bias(BIAS), dim=64)),
    "bias-tiles-read-64": without_tensors(backward_of(make_call(Causal(), Bias(TILES), dim=64))),
    "bias-tiles-shared-64": backward_of(make_call(None, Bias(TILES[:1]), dim=64)),
    "wide-tiles-times-64": backward_of(
        make_call(None, lambda score, b, h, q, k: score * WIDE_TILES[0, 0, q, k], dim=64)
    ),
    "window-40": backward_of(make_call(SlidingWindow(5, 0), dim=40)),
    "softcap-32": backward_of(make_call(None, SoftCap(30.0), dim=32)),
    "plain-16": backward_of(make_call(dim=16)),
    "plain-64/128": backward_of(make_call(dim=64, dim_v=128)),
    "causal-128/64": backward_of(make_call(Causal(), dim=128, dim_v=64)),
}
# "causal-128" is lowered for packed sequences: packed/test_backward_lowering.py.
QUICK = ("causal-64", "bias-tiles-128")


@pytest.mark.slow_cases("bias-tiles-128", reason="lowers a kernel, 7 s")
@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=name, marks=[] if name in QUICK else [pytest.mark.slow]) for name, call in CALLS.items()],
)
def test_main_kernel(call: BackwardCall, tmp_path: Path) -> None:
    """One test for all that is asked of a kernel, since lowering it takes seconds."""
    config = default(call)
    assert isinstance(config, HopperBackwardConfig)
    source = device_source(kernel(call, "main"), "sm_90a")
    body = source.partition("__global__")[2]
    assert "tma_load(" in body
    assert "tma_store_add(" in body  # of dq
    assert len(set(re.findall(r"tl::wgmma_([rs]s)<.*?, (\d+, \d+, \d+), (\w+, \w+)", body))) >= 3
    check_tiles(call, config, body)
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
    report = assemble(nvcc, source, "sm_90a", tmp_path)
    assert not SERIALIZED.search(report), report
    assert max(numbers(r"(\d+) bytes (?:stack frame|spill stores)", report)) <= MAX_SPILLED, report


def check_tiles(call: BackwardCall, config: HopperBackwardConfig, body: str) -> None:
    """A bias whose rows are aligned is not read element by element, and neither is its gradient written so."""
    copied_tile = program(call.forward.variant).copied_tile
    assert (copied_tile is not None) == (config.tile_stages > 0)
    if copied_tile is None:
        assert "ldmatrix" not in body
        return
    load, dtype = copied_tile
    assert re.search(rf"tma_load.*\({load.name}_desc", body)
    assert "tl_shuffle_elect<128>" not in body.partition("warpgroup_reg_alloc<")[0]  # who copies is of one warp
    assert not re.search(rf"\b{load.name}\[", body)
    assert ("ptx_ldmatrix_x4_trans" in body) == (dtype.itemsize == 2)
    for index, path in enumerate(paths(call)):
        if str(path.load) == load.text:
            assert re.search(rf"tma_store{'_add' * (path.way == ADDED)}\(path{index}_desc", body)
            assert not re.search(rf"\bpath{index}\[", body)


def test_tiles() -> None:
    """Other masks than causal leave no registers for 80 queries, nor do two tiles of 32 bits leave shared memory."""
    chosen = {
        "plain-128": 80,
        "causal-128": 80,
        "window-128": 64,
        "softcap-128": 64,
        "plain-64": 128,
        "plain-64/128": 64,
        "bias-tiles-128": 64,
        "bias-wide-tiles-128": 48,
        "bias-64": 64,
        "bias-tiles-read-64": 128,
    }
    for name, block_M in chosen.items():
        assert default(CALLS[name]).block_M == block_M, name


@pytest.mark.parametrize("head_dim", [16, 48])
def test_half_of_dq_is_whole_panels_of_k(head_dim: int) -> None:
    """Two warpgroups that share dq's columns would begin within a panel of 16 dims."""
    assert not RegisterOrder(64, head_dim).is_valid()
    assert RegisterOrder(128, head_dim).is_valid()
    assert isinstance(default(backward_of(make_call(None, SoftCap(9.0), dim=head_dim))), BackwardConfig)
