"""The code that TileLang generates, on a machine without a GPU: it lowers, has the right instructions, assembles."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from lowering import (
    ARCHITECTURES,
    BIAS,
    CALLS,
    IDS,
    SLOPES,
    SLOW_CALLS,
    assemble,
    find_nvcc,
    lower,
    make_call,
    numbers,
    on,
)
from tileattn import ALiBi, Bias, Causal, FunctionMask, SlidingWindow, SoftCap
from tileattn.call import AttentionCall
from tileattn.kernels.tilelang import config, launch
from tileattn.kernels.tilelang.config import ForwardConfig

ASSEMBLED = ("sm_80", "sm_90a")

# ptxas: wgmma instructions run one after the other, or setmaxnreg is ignored. Each costs half the speed.
SERIALIZED = re.compile(r"C75(?:08|10|12|14)|serializ|setmaxnreg ignored", re.IGNORECASE)


def _kernels() -> list[object]:
    found = []
    for arch in ARCHITECTURES:
        for name, call in (CALLS | SLOW_CALLS).items():
            marks = [] if name in CALLS else [pytest.mark.slow]
            found.append(pytest.param(on(arch, call), id=f"{arch}-{name}", marks=marks))
    return found


@pytest.mark.parametrize("call", _kernels())
def test_kernel(call: AttentionCall, tmp_path: Path) -> None:
    """One test for all that is asked of a kernel, since lowering it takes seconds."""
    source = lower(call)
    _check_instructions(call, source)
    _check_barriers(source)
    _check_producer(call, source)
    _check_nothing_is_static(call, source)
    if call.arch in ASSEMBLED:
        nvcc = find_nvcc()
        if nvcc is None:
            pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
        _check_assembly(assemble(nvcc, source, call.arch, tmp_path))


def _check_instructions(call: AttentionCall, source: str) -> None:
    """The matrix units are used, and memory is read in the widest way that the alignment allows."""
    wide_copies = set(numbers(r"cp_async_gs\w*<(\d+)>", source))
    if call.arch == "gfx942":
        assert "mfma" in source
    elif call.arch == "sm_90a":
        assert "wgmma_ss" in source
        assert "wgmma_rs" in source  # the weights stay in registers
        assert ("tma_load(" in source) == call.aligned
        assert not wide_copies or call.aligned
    else:
        assert "mma_sync<" in source
        if "tma_load(" not in source:
            # Rows that may begin anywhere cannot be copied by cp.async, which needs 4 bytes at least.
            assert wide_copies == ({16} if call.aligned else set())
        assert call.aligned or "tma_load(" not in source


def _check_barriers(source: str) -> None:
    """A partial barrier that waits for part of a warpgroup never opens."""
    assert not [count for count in numbers(r"__sync_thread_partial\(\w+, (\d+)\)", source) if count % 128]
    assert not re.search(r"__sync_thread_partial(?!\(\w+, \d+\))", source)


def _check_producer(call: AttentionCall, source: str) -> None:
    """Only the warp that copies waits for free stages: any other could miss a turn and wait for ever."""
    producers = source.split("warpgroup_reg_dealloc<")[1:]
    assert len(producers) == (call.arch == "sm_90a" and call.aligned) or call.arch in ("sm_100a", "sm_120a")
    for producer in producers:
        assert re.match(r"\d+>\(\);\s*if \(\(\(int\)threadIdx\.x\) < 32\) \{", producer)


def _check_nothing_is_static(call: AttentionCall, source: str) -> None:
    """Sizes and strides are parameters of the kernel."""
    signature = re.search(r"__global__ void __launch_bounds__\(\d+(?:, \d+)?\) \w+\(([^)]*)\)", source)
    assert signature is not None
    parameters = {part.split()[-1] for part in signature[1].split(",")}
    assert {"batch", "seqlen_q", "heads"} <= parameters
    # TMA reads through descriptors, which the launch makes from the strides.
    described = {f"{name}_desc" for name in "qkv"} <= parameters
    assert described or {f"{name}_stride{axis}" for name in "qkv" for axis in range(3)} <= parameters


def _check_assembly(report: str) -> None:
    assert not SERIALIZED.search(report), report
    spills = numbers(r"(\d+) bytes stack frame", report) + numbers(r"(\d+) bytes spill", report)
    assert len(spills) >= 3, report
    assert not any(spills), report
    assert max(numbers(r"Used (\d+) registers", report)) <= 255


# --- What is skipped ---


def _tile_loops(source: str) -> list[tuple[str, str]]:
    """(first tile, number of tiles) of each loop over tiles of keys in a Hopper kernel.

    The pipelined loop is called ``step``; the producer has one and the consumers have one.
    """
    return re.findall(r"for \(int step\w* = (.+?); step\w* < (.+); \+\+step\w*\) \{", source)


def test_tiles_that_nobody_sees_are_skipped() -> None:
    full, causal, window = (lower(make_call(mask)) for mask in (None, Causal(), SlidingWindow(5, 0)))
    for source in (full, causal, window):
        assert len(_tile_loops(source)) == 2
    # `row` is the tile's first query: without a mask the loop does not know it.
    for _, count in _tile_loops(full):
        assert not re.search(r"\brow\b|q_lo|blockIdx", count)
    for _, count in _tile_loops(causal) + _tile_loops(window):
        assert re.search(r"\brow\b|q_lo", count)
    # The window's left edge moves the first key that is loaded.
    first_key = re.compile(r"tma_load\(k_desc, .*, \(i_\d+ \* 64\), (.*), kv_h, ")
    (causal_key,), (window_key,) = first_key.findall(causal), first_key.findall(window)
    assert "i0" not in causal_key
    assert re.search(r"q_lo - i0\b", window_key)


def test_a_plain_kernel_masks_the_last_tile_only() -> None:
    source = lower(make_call())
    (condition,) = re.findall(r"if \((.*)\) \{\n\s*#pragma unroll\n[^\n]*\n\s*float condval", source)
    assert "seqlen" in condition or "full_hi" in condition
    assert not re.search(r"\brow\b|q_lo|threadIdx", condition)


# --- Which calls share a kernel ---


def _key(call: AttentionCall) -> str:
    return launch.cache_key(call, defaults.default(call))


def test_numbers_and_sizes_of_operands_share_a_kernel() -> None:
    other_bias = torch.ones(5, 8, 100, 30).transpose(2, 3)
    pairs = [
        (make_call(SlidingWindow(5, 0)), make_call(SlidingWindow(1000, 7))),
        (make_call(None, SoftCap(30.0)), make_call(None, SoftCap(5.0))),
        (make_call(None, Bias(BIAS)), make_call(None, Bias(other_bias))),
        (make_call(None, ALiBi(SLOPES)), make_call(None, ALiBi(torch.ones(32)))),
        (make_call(), make_call(needs_grad=True)),
    ]
    for x, y in pairs:
        assert _key(x) == _key(y)


def test_functions_that_compute_the_same_share_a_kernel() -> None:
    def near(b, h, q, k):  # type: ignore[no-untyped-def]
        return q - k < 7

    limit = 7
    same, other = (FunctionMask(lambda b, h, query, key, n=n: query - key < n) for n in (limit, 8))
    assert _key(make_call(FunctionMask(near))) == _key(make_call(same))
    assert _key(make_call(FunctionMask(near))) != _key(make_call(other))


def test_other_facts_are_other_kernels() -> None:
    calls = [
        make_call(),
        make_call(Causal()),
        make_call(SlidingWindow(5, None)),
        make_call(SlidingWindow(5, 0)),
        make_call(SlidingWindow(5, 0) & IDS),
        make_call(SlidingWindow(5, 0) | IDS),
        make_call(None, ALiBi(SLOPES), SoftCap(3.0)),
        make_call(None, SoftCap(3.0), ALiBi(SLOPES)),
        make_call(None, Bias(BIAS)),
        make_call(None, Bias(BIAS[:1])),
        make_call(None, Bias(BIAS.half())),
        make_call(dtype=torch.float16),
        make_call(dim=64),
        make_call(dim=120),
        make_call(dim=64, dim_v=128),
        make_call(dim=128, dim_v=64),
        make_call(sink=True),
        make_call(aligned=False),
        make_call(return_lse=False),
        make_call(arch="sm_80"),
        make_call(arch="sm_89"),
    ]
    assert len(set(map(_key, calls))) == len(calls)


def test_another_tile_is_another_kernel() -> None:
    call = make_call()
    keys = {launch.cache_key(call, ForwardConfig(128, 64, stages, 256)) for stages in (1, 2)}
    assert len(keys) == 2


# --- Tiles ---

HEAD_DIMS = range(16, 257, 8)
VARIANTS = {"plain": make_call(), "causal": make_call(Causal()), "softcap": make_call(None, SoftCap(3.0))}


@pytest.mark.parametrize("arch", config.ARCHITECTURES)
def test_every_default_fits(arch: str) -> None:
    for dim, dim_v, call in itertools.product(HEAD_DIMS, HEAD_DIMS, VARIANTS.values()):
        call = AttentionCall(torch.bfloat16, dim, dim_v, call.variant, arch=arch)
        tile = defaults.default(call)
        assert config.is_valid(call, tile), (call, tile)
        assert config.shared_bytes(call, tile) * tile.blocks_per_sm <= config.ARCHITECTURES[arch].shared_bytes


def test_what_does_not_fit_is_not_valid() -> None:
    call = make_call(dim=256)
    assert config.is_valid(call, ForwardConfig(128, 80, 2, 256))
    assert not config.is_valid(call, ForwardConfig(128, 128, 2, 256))  # shared memory
    assert not config.is_valid(call, ForwardConfig(128, 72, 2, 256))  # keys in groups of 16
    assert not config.is_valid(call, ForwardConfig(64, 80, 2, 256))  # a warp without rows
    assert not config.is_valid(on("sm_89", call), ForwardConfig(128, 80, 2, 256))


def test_padding_is_small() -> None:
    """And leaves the head dims of real models as they are."""
    for dim in HEAD_DIMS:
        assert dim <= config.padded(dim) < dim + 64
    assert [dim for dim in (16, 32, 64, 96, 128, 192, 256) if config.padded(dim) != dim] == []


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("threads", [128, 256, 384])
def test_consumer_registers(threads: int, blocks: int) -> None:
    """What setmaxnreg asks for is there: multiples of 8, within the registers that the launch was given."""
    registers = ForwardConfig(128, 64, 2, threads, blocks_per_sm=blocks).consumer_registers()
    all_threads = threads + config.PRODUCER_THREADS
    given = min(65536 // blocks // all_threads // 8 * 8, 255) * all_threads
    assert registers % 8 == 0
    assert 24 <= registers <= 240
    assert registers * threads + config.PRODUCER_REGISTERS * config.PRODUCER_THREADS <= given
