"""The Hopper decode schedule without a GPU: which calls get it, and the code that they become."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import BIAS, SLOPES, TILES, assemble, find_nvcc, numbers, source_and_shared
from tileattn import ALiBi, Bias, Causal, FunctionMask, Mask, SlidingWindow, SoftCap
from tileattn.call.decoding import DecodeCall
from tileattn.kernels.tilelang.decode.config import GenericConfig, default
from tileattn.kernels.tilelang.decode.hopper.config import (
    SHARED_BYTES_OF_SM,
    HopperDecodeConfig,
    is_valid,
    shared_bytes,
)
from tileattn.kernels.tilelang.decode.kernel import decode_kernel
from tileattn.variant.key import encode
from tileattn.variant.program import with_alignment


def make_decode_call(
    mask: Mask | None = None,
    *mods: object,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    page_rows: int = 0,
    **flags: bool,
) -> DecodeCall:
    variant, operands = encode(mask, mods)  # type: ignore[arg-type]
    variant = with_alignment(variant, operands.tensors)
    return DecodeCall(dtype, *dims, variant, arch="sm_90a", page_rows=page_rows, **flags)


CALLS = {
    "contiguous": make_decode_call(Causal()),
    "pages-1": make_decode_call(Causal(), page_rows=1),
    "softcap-window-sink": make_decode_call(SlidingWindow(100, 0), SoftCap(20.0), sink=True, page_rows=16),
}
SLOW_CALLS = {
    "pages-16": make_decode_call(Causal(), page_rows=16, return_lse=False),
    "pages-64-256": make_decode_call(Causal(), dims=(256, 256), page_rows=64),
    "alibi-packed-sink": make_decode_call(Causal(), ALiBi(SLOPES), packed=True, sink=True),
    "packed-keys": make_decode_call(Causal(), packed=True, packed_keys=True),
    "plain-16": make_decode_call(dims=(16, 16), dtype=torch.float16),
    "causal-80/72-pages-1": make_decode_call(Causal(), dims=(80, 72), page_rows=1),
    "causal-192/128": make_decode_call(Causal(), dims=(192, 128), page_rows=32),
    "causal-248-pages-1": make_decode_call(Causal(), dims=(248, 248), page_rows=1),
    "causal-64/256": make_decode_call(Causal(), dims=(64, 256)),
    "function-96": make_decode_call(FunctionMask(lambda b, h, q, k: (q + k + h) % 3 != 0), dims=(96, 96)),
    # Kernels that go by lines.
    "lines": make_decode_call(FunctionMask(lambda b, h, q, k: k // 64 % 3 == h), listed=True),
    "lines-pages-16": make_decode_call(FunctionMask(lambda b, h, q, k: k // 64 % 3 == h), page_rows=16, listed=True),
    "lines-pages-1": make_decode_call(FunctionMask(lambda b, h, q, k: k // 64 % 3 == b), page_rows=1, listed=True),
    "bias": make_decode_call(Causal(), Bias(BIAS), page_rows=16),
    "composed-packed": make_decode_call(Causal(), ALiBi(SLOPES), Bias(TILES), SoftCap(9.0), packed=True, page_rows=1),
}
# What a worker keeps from job to job (its place, a job's ranges) is not read in the loop over tiles.
MAX_SPILLED_BY_WORKER = 64
# Where a row of Q is no power of two of 16 bytes: places of Q's rows, which are read once per job, not once per tile.
MAX_SPILLED_BY_ROWS = 160
SLOW = "more of the same: registers of other head dims and variants"
CASES = [
    pytest.param(name, marks=pytest.mark.slow(reason=SLOW))  # 20 s each
    for name in ("softcap-window-sink", "contiguous", "pages-1", *SLOW_CALLS)
]
nvcc = find_nvcc()


@pytest.mark.parametrize("name", CASES)
def test_kernels_wait_with_all_of_their_threads_and_neither_spill_nor_serialise(name: str, tmp_path: Path) -> None:
    call = (CALLS | SLOW_CALLS)[name]
    config = default(call, 4)
    assert isinstance(config, HopperDecodeConfig)
    source, dynamic = source_and_shared(decode_kernel(call, config), call.arch)
    counts = re.findall(r"__sync_thread_partial(?:<\d+, \d+>)?\((\d+), (\d+)\)", source)
    assert counts
    assert set(counts) == {("1", "128")}
    # One __syncthreads for all threads, behind the setting up of the barriers.
    assert source.count("__syncthreads()") == 1
    arrivals = numbers(r"\]\.init\((\d+)\)", source)
    of_producer = 32 * config.producer_warps
    assert arrivals == [of_producer] * (2 * config.num_stages) + [1] * (2 * config.num_stages)
    assert dynamic + 1024 <= shared_bytes(call, config)
    if nvcc is None:
        pytest.skip("no nvcc")
    report = assemble(nvcc, source, call.arch, tmp_path)
    assert not re.search("C7512|C7514|serializ", report)
    (spilled,) = numbers(r"(\d+) bytes spill stores", report)
    assert spilled <= (MAX_SPILLED_BY_WORKER if name != "causal-192/128" else MAX_SPILLED_BY_ROWS)
    (static,) = numbers(r"(\d+) bytes smem", report)
    assert config.blocks * (dynamic + static + 1024) <= SHARED_BYTES_OF_SM


def test_the_generic_schedule_runs_what_is_not_aligned() -> None:
    assert isinstance(default(replace(CALLS["contiguous"], aligned=False), 4), GenericConfig)
    assert isinstance(default(replace(CALLS["contiguous"], arch="sm_80"), 4), GenericConfig)


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (72, 40), (128, 128), (192, 128), (64, 256), (256, 256)])
def test_tiles_do_not_depend_on_pages(dims: tuple[int, int]) -> None:
    """So that FixedSplit gives the same bits for all of them."""
    configs = [default(make_decode_call(dims=dims, page_rows=rows), 4) for rows in (0, 1, 2, 4, 8, 16, 32, 64)]
    assert {(config.block_M, config.block_N) for config in configs} == {(64, 64)}
    assert [getattr(config, "gather", None) for config in configs] == [
        False,
        True,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("page_rows", "config", "valid"),
    [
        (0, HopperDecodeConfig(64, 3, 2), True),
        (0, HopperDecodeConfig(64, 4, 2), False),  # shared memory
        (0, HopperDecodeConfig(48, 2, 1), False),  # tiles of an unknown size
        (0, HopperDecodeConfig(64, 0, 1), False),
        (4, HopperDecodeConfig(64, 3, 2), False),  # a box of half a swizzle atom
        (8, HopperDecodeConfig(64, 3, 2), True),
        (4, HopperDecodeConfig(64, 3, 2, gather=True), True),
    ],
)
def test_configurations_that_cannot_run_are_not_valid(page_rows: int, config: HopperDecodeConfig, valid: bool) -> None:
    assert is_valid(make_decode_call(page_rows=page_rows), config) == valid
    assert not is_valid(replace(make_decode_call(page_rows=page_rows), aligned=False), config)
