"""The code that TileLang generates for the backward pass in the generic schedule, on a machine without a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import (
    BIAS,
    IDS,
    MAX_SPILLED,
    SLOPES,
    TILES,
    assemble,
    find_nvcc,
    make_call,
    numbers,
    user_score,
)
from tileattn import ALiBi, Bias, Causal, FunctionMask, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.architecture import ARCHITECTURES
from tileattn.kernels.tilelang.backward import config
from tileattn.kernels.tilelang.backward import library as launch
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.kernels import kernel, main_kernel, queries_kernel
from tileattn.kernels.tilelang.backward.shares.choice import split
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.forward import library as forward_launch
from tileattn.kernels.tilelang.forward.defaults import default as forward_default
from tileattn.variant.program import program

ASSEMBLED = ("sm_80", "sm_90a")
SERIALIZED = re.compile(r"C75(?:08|10|12|14)|serializ|setmaxnreg ignored", re.IGNORECASE)


def assert_registers_suffice(call: BackwardCall, shares: int, folder: Path) -> None:
    """Lowers the main kernel that a call gets with a number of shares; ptxas spills nothing and serialises nothing."""
    source = device_source(main_kernel(call, split(call, default(call), shares)), "sm_90a")
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
    report = assemble(nvcc, source, "sm_90a", folder)
    assert not SERIALIZED.search(report), report
    assert max(numbers(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)) == 0, report


def backward_of(forward: AttentionCall, **facts: bool) -> BackwardCall:
    """The backward pass of a call that wants all gradients there are."""
    tensors = program(forward.variant).tensors
    needs = (True, True, True, forward.sink, *(tensor.dtype.is_floating_point for tensor in tensors))
    facts.setdefault("aligned", forward.aligned)
    return BackwardCall(replace(forward, needs_grad=True), needs, **facts)


def generic_tile(call: BackwardCall) -> BackwardConfig:
    """The main kernel's tile in the generic schedule, whether or not another schedule is preferred."""
    forward = config.read_together(call)
    candidates = config.preferences(forward, config.kept_derivatives(call))
    return next(tile for tile in candidates if config.is_valid(forward, tile))


def generic_source(call: BackwardCall, which: str = "main") -> str:
    """The CUDA or HIP source of one of a call's kernels."""
    if which == "main":
        function = main_kernel(call, generic_tile(call))
    elif which == "queries":
        function = queries_kernel(call, config.default_queries(call))
    else:
        function = kernel(call, which)
    return device_source(function, call.forward.arch)


CALLS = {
    "plain": backward_of(make_call()),
    "causal-64": backward_of(make_call(Causal(), dim=64)),
    "plain-64": backward_of(make_call(dim=64, dtype=torch.float16)),
    "plain-16": backward_of(make_call(dim=16)),
    "window-40": backward_of(make_call(SlidingWindow(5, 0), dim=40)),
    "prefix-96": backward_of(make_call(PrefixLM(3) | SlidingWindow(5, 3), dim=96, sink=True), dlse=True),
    "causal-256": backward_of(make_call(Causal(), dim=256)),
    "plain-256": backward_of(make_call(dim=256)),
    "plain-192/128": backward_of(make_call(dim=192, dim_v=128)),
    "plain-64/256": backward_of(make_call(dim=64, dim_v=256)),
    "documents": backward_of(make_call(IDS & Causal())),
    "function": backward_of(make_call(FunctionMask(lambda b, h, q, k: (q + k + h) % 3 != 0))),
    "softcap": backward_of(make_call(Causal(), SoftCap(30.0))),
    "softcap-256": backward_of(make_call(Causal(), SoftCap(30.0), dim=256, dtype=torch.float16)),
    "alibi": backward_of(make_call(Causal(), ALiBi(SLOPES))),
    "alibi-256": backward_of(make_call(None, ALiBi(SLOPES), dim=256)),
    "bias": backward_of(make_call(None, Bias(BIAS))),
    "bias-tiles-64": backward_of(make_call(Causal(), Bias(TILES), dim=64)),
    "shared-bias": backward_of(make_call(None, Bias(BIAS[:1]))),
    "shared-bias-256": backward_of(make_call(None, Bias(BIAS[:1]), dim=256)),
    "composed": backward_of(make_call(IDS & Causal(), ALiBi(SLOPES), Bias(BIAS), SoftCap(3.0), user_score)),
    "composed-40": backward_of(make_call(PrefixLM(torch.ones(2).int()), ALiBi(SLOPES), SoftCap(9.0), dim=40)),
    "unaligned": backward_of(make_call(Causal(), aligned=False)),
    "unaligned-256": backward_of(make_call(aligned=False, dim=256)),
}  # fmt: skip
# (call, architecture, kernel), one of each kind; the others take long. sm_80's are those that the emulator runs, and
# gfx942's schedule for the main kernel is in test_amd.py.
QUICK = {
    ("plain-16", "sm_90a", "prepare"),
    ("plain-16", "sm_90a", "finish"),
}
# Beside sm_90a and sm_80, which have all.
ELSEWHERE = ("plain", "plain-16", "causal-256", "composed", "unaligned")


def _kernels() -> list[object]:
    parameters = []
    for arch, (name, call) in itertools.product(("sm_80", "sm_90a", "sm_120a", "gfx942"), CALLS.items()):
        call = on(arch, call)
        for deterministic, which in ((False, "prepare"), (False, "main"), (False, "finish"), (True, "queries")):
            if (which in ("prepare", "finish") or arch not in ASSEMBLED) and name not in ELSEWHERE:
                continue
            marks = [] if (name, arch, which) in QUICK else [pytest.mark.slow]
            facts = replace(call, deterministic=deterministic)
            parameters.append(pytest.param(facts, which, id=f"{arch}-{name}-{which}", marks=marks))
    for name in ("plain", "shared-bias", "alibi"):  # without dq, and with a place for each score
        facts = replace(CALLS[name], deterministic=True)
        parameters.append(pytest.param(facts, "main", id=f"sm_90a-{name}-deterministic", marks=[pytest.mark.slow]))
    return parameters


def on(arch: str, call: BackwardCall) -> BackwardCall:
    """The same call on another architecture."""
    return replace(call, forward=replace(call.forward, arch=arch))


@pytest.mark.parametrize(("call", "which"), _kernels())
def test_kernel(call: BackwardCall, which: str, tmp_path: Path) -> None:
    """One test for all that is asked of a kernel, since lowering it takes seconds."""
    arch = call.forward.arch
    source = generic_source(call, which)
    _check_instructions(call, which, source)
    _check_barriers(source)
    _check_atomics(call, which, source)
    _check_nothing_is_static(which, source)
    if arch in ASSEMBLED:
        nvcc = find_nvcc()
        if nvcc is None:
            pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
        _check_assembly(assemble(nvcc, source, arch, tmp_path))


def _check_instructions(call: BackwardCall, which: str, source: str) -> None:
    """Each product is on the matrix units, and memory is read in the widest way that the alignment allows."""
    arch, products = call.forward.arch, {"main": 5 - call.deterministic, "queries": 3}.get(which, 0)
    if arch == "sm_90a":
        # The last iterations of a pipeline without a producer have code of their own.
        copies = len(re.findall(r"tl::wgmma_[rs]s<", source)) // max(products, 1)
        assert copies in ((0,) if not products else (1,) if call.aligned else (1, 2))
        tile = generic_tile(call) if which == "main" else config.default_queries(call)
        in_registers = {"main": 0 if tile.weights_shared(call.forward) else 2, "queries": 1}.get(which, 0)
        assert source.count("tl::wgmma_rs<") == in_registers * copies
        assert source.count("tl::wgmma_ss<") == (products - in_registers) * copies
        assert ("tma_load(" in source) == (products > 0 and call.aligned)
    elif products:
        assert ("mfma" if arch == "gfx942" else "mma_sync<") in source


def _check_barriers(source: str) -> None:
    """A partial barrier that waits for part of a warpgroup never opens."""
    partial = numbers(r"__sync_thread_partial\(.*, (\d+)\);", source)
    assert len(partial) == source.count("__sync_thread_partial")
    assert not [count for count in partial if count % 128]
    threads = numbers(r"__launch_bounds__\((\d+)", source)[-1]
    for producer in source.split("warpgroup_reg_dealloc<")[1:]:
        # Only the warp that copies waits for free stages: any other could miss a turn and wait for ever.
        assert re.match(r"\d+>\(\);\s*if \(\(\(int\)threadIdx\.x\) < 32\) \{", producer)
        assert partial == [] or set(partial) == {threads - 128}
    reduced = re.findall(r"AllReduce<[\w:]+, (\d+), \d+, \d+, tl::NamedBarrier<(\d+)>", source)
    # Beyond a warp it takes a barrier of all threads that compute.
    computing = set(partial) or {threads}
    assert all(int(width) <= 32 or int(barrier) in computing for width, barrier in reduced)


def _check_atomics(call: BackwardCall, which: str, source: str) -> None:
    """dq is added up in memory; nothing is where the gradients must be deterministic."""
    body = source.partition("__global__")[2]
    summed = {name for _, name in re.findall(r"[Aa]tomicAdd(x2|x4)?\(\(?&?\(?(\w+)\[", body)}
    ways = {f"path{index}" for index, path in enumerate(launch.paths(call)) if path.way == "added"}
    assert summed == ({"dq_sum"} | ways if which == "main" and not call.deterministic else set())


def _check_nothing_is_static(which: str, source: str) -> None:
    """Sizes and strides are parameters of the kernel."""
    signature = re.search(r"__global__ void __launch_bounds__\(\d+(?:, \d+)?\) \w+\(([^)]*)\)", source)
    assert signature is not None
    parameters = {part.split()[-1] for part in signature[1].split(",")}
    assert "batch" in parameters
    if which in ("main", "queries"):
        assert {"seqlen_q", "heads_per_kv_head", "scale"} <= parameters
        described = {f"{name}_desc" for name in ("q", "k", "v", "do")} <= parameters
        strides = {f"{name}_stride{axis}" for name in ("q", "k", "v", "do") for axis in range(3)}
        assert described or strides <= parameters


def _check_assembly(report: str) -> None:
    assert not SERIALIZED.search(report), report
    spills = numbers(r"(\d+) bytes stack frame", report) + numbers(r"(\d+) bytes spill stores", report)
    assert len(spills) >= 2, report
    assert max(spills) <= MAX_SPILLED, report


# --- Head dims far apart ---

# Warpgroups or warps could not share the columns of dV, or of dQ, if their tiles were as for other head dims.
APART = {
    "32/16": backward_of(make_call(None, SoftCap(30.0), dim=32, dim_v=16, aligned=False)),
    "192/16": backward_of(make_call(Causal(), SoftCap(30.0), dim=192, dim_v=16, aligned=False)),
    "128/48": backward_of(make_call(dim=128, dim_v=48, aligned=False)),
    "shared-bias-192/40": backward_of(make_call(None, Bias(BIAS[:1]), dim=192, dim_v=40)),
    "packed-16/256": backward_of(replace(make_call(dim=16, dim_v=256, arch="sm_89"), packed=True)),
}


@pytest.mark.slow  # 7 s and more each; what their tiles must fulfil, test_warps_share_whole_columns asks of all of them
@pytest.mark.parametrize("name", APART)
def test_head_dims_far_apart(name: str) -> None:
    """Their kernel is generated, with all products on the matrix units."""
    call = APART[name]
    source = generic_source(call)
    _check_instructions(call, "main", source)
    _check_barriers(source)
    _check_atomics(call, "main", source)


# --- Tiles ---

HEAD_DIMS = (16, 32, 48, 64, 96, 128, 160, 192, 256)  # all that `architecture.padded_finely` leaves


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_call_has_tiles(arch: str) -> None:
    variants = [CALLS[name].forward.variant for name in ("plain", "causal-64", "softcap", "composed")]
    for dim, dim_v, variant in itertools.product(HEAD_DIMS, HEAD_DIMS, variants):
        call = backward_of(AttentionCall(torch.bfloat16, dim, dim_v, variant, arch=arch))
        tile, queries = generic_tile(call), config.default_queries(call)
        assert config.ROWS % tile.block_M == 0
        assert config.ROWS % queries.block_M == 0
        assert config.shared_bytes(call.forward, tile) <= ARCHITECTURES[arch].shared_bytes
        assert config.shared_bytes_queries(call.forward, queries) <= ARCHITECTURES[arch].shared_bytes


def test_what_does_not_fit_is_not_valid() -> None:
    call = make_call(dim=256)
    assert config.is_valid(call, BackwardConfig(64, 64, 2, 256))
    assert not config.is_valid(call, BackwardConfig(64, 128, 2, 256))  # shared memory
    assert not config.is_valid(call, BackwardConfig(48, 64, 2, 256))  # workspaces are padded to 128 rows
    assert not config.is_valid(call, BackwardConfig(64, 56, 2, 256))  # keys in groups of 16
    assert not config.is_valid(replace(call, arch="sm_89"), BackwardConfig(64, 64, 2, 256))
    assert config.is_valid_queries(call, BackwardConfig(128, 64, 1, 256))
    assert not config.is_valid_queries(call, BackwardConfig(64, 64, 1, 256))  # a warp without rows


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if not arch.startswith("gfx")])
@pytest.mark.parametrize("packed", [False, True])
def test_warps_share_whole_columns(arch: str, packed: bool) -> None:
    """A product's columns, where there are more warps than its rows take, are divided among the others."""
    variants = [CALLS[name].forward.variant for name in ("plain", "softcap", "shared-bias")]
    for dim, dim_v, variant, aligned in itertools.product(HEAD_DIMS, HEAD_DIMS, variants, (False, True)):
        forward = AttentionCall(torch.bfloat16, dim, dim_v, variant, arch=arch, aligned=aligned, packed=packed)
        tile = generic_tile(backward_of(forward))
        columns = config.value_columns(forward, tile)
        assert 0 <= columns - dim_v < 32
        products = [(tile.block_M, dim)]  # dQ
        if tile.weights_shared(forward):
            products += [(tile.block_N, dim), (tile.block_N, columns)]  # dK, dV
        for rows, shared in products:
            sharers = max(tile.threads // 32 * 16 // rows, 1)
            assert shared % (sharers * (16 if arch == "sm_90a" else 8)) == 0, (forward, tile)


def test_columns_that_warps_cannot_share_are_not_valid() -> None:
    narrow = make_call(dim=192, dim_v=16)
    assert config.value_columns(narrow, BackwardConfig(64, 64, 2, 256)) == 32
    assert config.value_columns(narrow, BackwardConfig(64, 64, 2, 128)) == 16
    assert config.value_columns(replace(narrow, arch="sm_80"), BackwardConfig(64, 64, 2, 256)) == 16
    assert not config.is_valid(make_call(dim=48), BackwardConfig(64, 64, 2, 256))  # dQ on two warpgroups
    assert config.is_valid(make_call(dim=48), BackwardConfig(64, 64, 2, 128))
    assert not config.is_valid(make_call(dim=48, arch="sm_89"), BackwardConfig(32, 64, 1, 256))  # on eight warps
    assert config.is_valid(make_call(dim=64, arch="sm_89"), BackwardConfig(32, 64, 1, 256))


# --- Which calls share a kernel ---


def test_other_facts_are_other_kernels() -> None:
    def key(call: BackwardCall) -> str:
        return launch.cache_key(call, "main")

    plain, bias = CALLS["plain"], CALLS["shared-bias"]
    calls = [
        plain,
        replace(plain, deterministic=True),
        replace(plain, aligned=False),
        on("sm_80", plain),
        backward_of(make_call(dtype=torch.float16)),
        backward_of(make_call(dim=64)),
        backward_of(make_call(dim_v=64)),
        backward_of(make_call(Causal())),
        CALLS["documents"],
        bias,
        replace(bias, deterministic=True),
        replace(bias, needs=(*bias.needs[:4], False)),
        CALLS["bias"],
        CALLS["softcap"],
    ]
    assert len(set(map(key, calls))) == len(calls)
    assert not {forward_launch.cache_key(call.forward, forward_default(call.forward)) for call in calls} & set(
        map(key, calls)
    )


def test_what_does_not_matter_shares_a_kernel() -> None:
    plain = CALLS["plain"]
    for same in (
        replace(plain, dlse=True),
        replace(plain, needs=(True, False, True, False)),
        backward_of(make_call(sink=True)),
        backward_of(make_call(return_lse=False)),
    ):
        assert launch.cache_key(plain, "main") == launch.cache_key(same, "main")
    window, other = (backward_of(make_call(SlidingWindow(size, 0))) for size in (5, 500))
    assert launch.cache_key(window, "main") == launch.cache_key(other, "main")
    # The small kernels serve any variant.
    for name in ("prepare", "finish"):
        assert launch.cache_key(CALLS["causal-256"], name) == launch.cache_key(CALLS["plain-256"], name)
    assert launch.cache_key(plain, "prepare") != launch.cache_key(replace(plain, dlse=True), "prepare")
    assert launch.cache_key(plain, "prepare") != launch.cache_key(replace(plain, deterministic=True), "prepare")


# --- What is skipped ---


@pytest.mark.slow(reason="lowers two kernels, 10 s")
def test_fully_masked_tiles_are_skipped() -> None:
    """The producer's loop runs over the rows that the mask says; without a mask over all."""

    def loop(mask: Mask | None) -> str:
        source = generic_source(backward_of(make_call(mask, dim=16)))
        producer = source.partition("warpgroup_reg_dealloc<")[2].partition("warpgroup_reg_alloc<")[0]
        return re.findall(r"for \(int step = 0; step < .*", producer)[0] + producer.partition("for (")[0]

    window, full = loop(SlidingWindow(5, 0)), loop(None)
    assert re.search(r"\bi0\b", window)
    assert re.search(r"\bk_lo\b", window)
    assert not re.search(r"\bk_lo\b|\bseqlen_k\b", full)
