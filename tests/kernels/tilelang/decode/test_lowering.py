"""The code that TileLang generates for decode calls: it lowers for every architecture, has the right instructions, and
assembles without spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import BIAS, IDS, MAX_SPILLED, SLOPES, assemble, find_nvcc, numbers, user_score
from tileattn import ALiBi, Bias, Causal, FunctionMask, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.decoding import DecodeCall
from tileattn.kernels.tilelang.architecture import ARCHITECTURES
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.decode import backend, config
from tileattn.kernels.tilelang.decode.config import GenericConfig
from tileattn.kernels.tilelang.decode.generic import generic_kernel
from tileattn.kernels.tilelang.decode.lines.kernel import lines_kernel
from tileattn.kernels.tilelang.decode.lines.visits import analysis_of
from tileattn.kernels.tilelang.decode.plan_kernel import plan_kernel
from tileattn.kernels.tilelang.lists.library import dtypes_of
from tileattn.variant.key import encode
from tileattn.variant.program import program

LOWERED = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


def make_call(  # type: ignore[no-untyped-def]
    mask=None, *mods, dim: int = 128, dim_v: int | None = None, arch: str = "sm_80", page_rows: int = 16, **flags
) -> DecodeCall:
    variant, _ = encode(mask, mods)
    return DecodeCall(torch.bfloat16, dim, dim_v or dim, variant, arch=arch, page_rows=page_rows, **flags)


CALLS = {
    "pages-16": make_call(Causal(), dim=64),
    "contiguous": make_call(Causal(), dim=64, page_rows=0),
    "packed-sink": make_call(SlidingWindow(5, 0), dim=192, dim_v=128, packed=True, sink=True, page_rows=1),
    "composed": make_call(PrefixLM(torch.ones(2).int()), ALiBi(SLOPES), Bias(BIAS), SoftCap(9.0), user_score, dim=40),
    "documents": make_call(IDS & Causal(), dim=96, return_lse=False),
    "unaligned": make_call(Causal(), dim=72, aligned=False),
    "256": make_call(Causal(), dim=256),
    "lines": make_call(FunctionMask(lambda b, h, q, k: k // 64 % 3 == h), dim=64, listed=True),
}
QUICK = {("sm_80", "contiguous")}  # each takes 15 s; no other test that `make test` has generates a decode kernel


def on(arch: str, call: DecodeCall) -> DecodeCall:
    return DecodeCall(**{**vars(call), "arch": arch})


def tile_of(call: DecodeCall, q_rows: int) -> GenericConfig:
    return config.generic_default(call, q_rows)


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param(arch, name, id=f"{arch}-{name}", marks=[] if (arch, name) in QUICK else [pytest.mark.slow])
        for arch in LOWERED
        for name in CALLS
    ],
)
def test_lowers(arch: str, name: str) -> None:
    call = on(arch, CALLS[name])
    source = device_source(generic_kernel(call, tile_of(call, 40)), arch)
    # Of parts, of a group's parts, and of groups; each releases what was stored and acquires what others stored.
    assert len(re.findall(r"AtomicAddRet\(.*, 1, 4\)", source)) == 3
    # Tiles of keys are on their way under the arithmetic; rows that are not aligned have fewer bytes than a copy.
    assert ("cp_async_gs" in source) == call.aligned
    assert ("cudaGridDependencySynchronize" in source) == (arch in ("sm_90a", "sm_100a", "sm_120a"))


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "q_rows"),
    [
        pytest.param("pages-16", 16, marks=pytest.mark.slow),
        pytest.param("packed-sink", 64, marks=pytest.mark.slow),
        pytest.param("256", 64, marks=pytest.mark.slow),
        pytest.param("256", 16, marks=pytest.mark.slow),
        pytest.param("composed", 64, marks=pytest.mark.slow),
    ],
)
def test_assembles_almost_without_spills(arch: str, name: str, q_rows: int, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    call = on(arch, CALLS[name])
    output = assemble(nvcc, device_source(generic_kernel(call, tile_of(call, q_rows)), arch), arch, tmp_path)
    assert max(numbers(r"(\d+) bytes spill stores", output)) <= MAX_SPILLED, output


@pytest.mark.slow
@pytest.mark.parametrize("by", ["b", "h"])
def test_plan_of_lines_and_their_kernel_assemble(by: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    ids = torch.arange(9).int()
    mask = FunctionMask(lambda b, h, q, k: (ids[q] == ids[k]) & (k % 7 < (b if by == "b" else h)))
    variant, _ = encode(mask, ())
    found = analysis_of(variant, 64)
    assert found is not None
    for kernel in (
        plan_kernel("sm_90a", True, program(variant), True),
        lines_kernel(found, dtypes_of(variant), True),
    ):
        output = assemble(nvcc, device_source(kernel, "sm_90a"), "sm_90a", tmp_path)
        assert sum(numbers(r"(\d+) bytes spill", output)) == 0, output


@pytest.mark.slow
def test_plan_assembles(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    output = assemble(
        nvcc, device_source(plan_kernel("sm_90a", True, program("Causal()")), "sm_90a"), "sm_90a", tmp_path
    )
    assert sum(numbers(r"(\d+) bytes spill", output)) == 0, output


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch.startswith("sm_")])
@pytest.mark.parametrize(("dim", "dim_v"), [(16, 16), (64, 64), (128, 128), (192, 128), (256, 256)])
def test_every_call_has_a_tile(arch: str, dim: int, dim_v: int) -> None:
    call = make_call(dim=dim, dim_v=dim_v, arch=arch)
    for q_rows in (1, 16, 17, 33, 2048):
        tile = tile_of(call, q_rows)
        assert tile.shared_bytes(call) <= ARCHITECTURES[arch].shared_bytes
        assert tile.block_M >= min(q_rows, 64)
        assert config.KEYS_OF_FIXED_SPLIT % tile.block_N == 0
    # The order of sums with FixedSplit must not depend on the number of queries.
    fixed = make_call(dim=dim, dim_v=dim_v, arch=arch, fixed=1024)
    assert len({tile_of(fixed, q_rows) for q_rows in (1, 16, 17, 33, 2048)}) == 1


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call(arch="gfx942"), "decode runs on NVIDIA GPUs only, not gfx942"),
        (make_call(arch="cpu"), "device 'cpu' is not one of"),
        (make_call(dim=12), "head_dim must be a multiple of 8 from 16 to 256, not 12"),
        (make_call(dim_v=264), "head_dim_v must be a multiple of 8 from 16 to 256, not 264"),
        (DecodeCall(torch.float32, 64, 64, arch="sm_80"), "dtype must be float16 or bfloat16"),
        (make_call(None, Bias(BIAS.double())), "must not be float64"),
    ],
)
def test_refusals(call: DecodeCall, reason: str) -> None:
    assert reason in str(backend.refusal(call))


def test_what_is_not_refused() -> None:
    assert all(backend.refusal(on(arch, call)) is None for arch in LOWERED for call in CALLS.values())
