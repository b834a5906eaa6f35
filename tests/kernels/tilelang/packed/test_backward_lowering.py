"""The backward kernels' code for packed sequences, on a machine without a GPU: lowering, ptxas, shared memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward import test_lowering as generic
from tests.kernels.tilelang.backward.hopper import test_hopper as narrow
from tests.kernels.tilelang.backward.hopper import test_hopper_wide as wide
from tests.kernels.tilelang.backward.test_lowering import SERIALIZED, backward_of, generic_tile
from tests.kernels.tilelang.tile import test_dropout_lowering as dropped
from tests.tools.lowering import IDS, MAX_SPILLED, assemble, find_nvcc, make_call, numbers, on, source_and_shared
from tileattn import Bias, Causal
from tileattn.call.facts import BackwardCall
from tileattn.kernels.tilelang.architecture import ARCHITECTURES
from tileattn.kernels.tilelang.backward import library as launch
from tileattn.kernels.tilelang.backward.config import (
    BackwardConfig,
    default_queries,
    read_together,
    shared_bytes,
    shared_bytes_queries,
)
from tileattn.kernels.tilelang.backward.defaults import default, prepared, queries_default
from tileattn.kernels.tilelang.backward.kernels import kernel, main_kernel, queries_kernel
from tileattn.kernels.tilelang.backward.operand_gradients import paths
from tileattn.variant.scores import for_packed

REDUCED = 4 * 256  # bytes for a sum along rows that several warps hold, as the gradient of slopes takes two
BOUNDS = torch.tensor([0, 4, 9], dtype=torch.int32)


def packed(call: BackwardCall) -> BackwardCall:
    return replace(call, forward=replace(call.forward, packed=True))


def with_bias(sequences: int, **facts: Any) -> BackwardCall:
    """A call with a bias as packed sequences have it, whose gradient is wanted."""
    (bias,) = for_packed([Bias(torch.ones(sequences, 4, 9, 9))], BOUNDS, BOUNDS)
    return backward_of(make_call(IDS & Causal(), bias, **facts))


HOPPER = {
    **{f"{name}-main": call for name, call in narrow.CALLS.items()},
    **{f"{name}-{which}": call for name, call in wide.CALLS.items() for which in ("main", "queries")},
    **{
        f"dropped-{name}-main": backward_of(dropped.CALLS[name]) for name in ("plain", "causal", "softcap", "window-96")
    },
    "dropped-causal-256-queries": backward_of(dropped.CALLS["causal-256"]),
    "own-bias-main": with_bias(2),
    "own-bias-64-main": with_bias(2, dim=64),
    "shared-bias-main": with_bias(1),
    "shared-bias-deterministic-main": replace(with_bias(1), deterministic=True),
    "alibi-deterministic-main": replace(narrow.CALLS["alibi-128"], deterministic=True),
}
QUICK_HOPPER = ("causal-128-main",)


def _named(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", _named(HOPPER, QUICK_HOPPER))
def test_hopper(name: str, tmp_path: Path) -> None:
    """Rows come and go by tensor maps that end with the sequence, and registers are enough as in the dense kernel."""
    call, which = packed(HOPPER[name]), name.rpartition("-")[2]
    assert not isinstance(default(call) if which == "main" else queries_default(call), BackwardConfig)
    source, shared = source_and_shared(kernel(call, which), "sm_90a")
    body = source.partition("__global__")[2]
    for tensor in ("q", "k", "v", "do"):
        # (column, row of 2^30, head, the sequence's end, 2^30)
        assert re.search(rf"tma_load\({tensor}_desc, .*1073741824.*, 1073741824\);", body), tensor
    for tensor in ("dk", "dv") if which == "main" else ("dq",):
        assert re.search(rf"tma_store\({tensor}_desc, .*1073741824.*, 1073741824\);", body), tensor
    assert "seqlen_q" not in body.partition(")")[0]  # no parameter: each sequence has its own
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
    report = assemble(nvcc, source, "sm_90a", tmp_path)
    assert not SERIALIZED.search(report), report
    assert max(numbers(r"(\d+) bytes (?:stack frame|spill stores)", report)) <= MAX_SPILLED, report
    assert shared + numbers(r"(\d+) bytes smem", report)[0] <= ARCHITECTURES["sm_90a"].shared_bytes


GENERIC = {
    ("sm_80", "plain-16", "main"),
    ("sm_80", "causal-64", "main"),
    ("sm_80", "prefix-96", "main"),
    ("sm_80", "alibi", "main"),
    ("sm_80", "causal-256", "queries"),
    ("sm_80", "unaligned", "main"),
    ("sm_80", "unaligned", "queries"),
    ("sm_90a", "plain-16", "queries"),
    ("sm_90a", "plain-192/128", "main"),
    ("sm_90a", "plain-64/256", "main"),
    ("sm_90a", "alibi-256", "main"),
    ("sm_90a", "shared-bias-256", "main"),
    ("sm_90a", "documents", "main"),
    ("sm_90a", "composed", "main"),
    ("sm_90a", "unaligned", "main"),
    ("sm_90a", "unaligned-256", "queries"),
    ("sm_90a", "causal-256", "prepare"),
    ("sm_90a", "prefix-96", "prepare"),
    ("sm_90a", "prefix-96", "finish"),
    ("sm_120a", "plain-16", "main"),
    ("sm_120a", "composed", "main"),
}
QUICK_GENERIC = ()


def _generic_kernel(call: BackwardCall, which: str) -> Any:
    """The TileLang function of the generic schedule, whether or not another schedule is preferred."""
    if which == "main":
        return main_kernel(call, generic_tile(call))
    return queries_kernel(call, default_queries(call)) if which == "queries" else kernel(call, which)


@pytest.mark.parametrize("name", _named(map("-".join, sorted(GENERIC)), QUICK_GENERIC))
def test_generic(name: str, tmp_path: Path) -> None:
    """No tensor maps, which would not end with a sequence; shared memory is enough; nothing is spilled."""
    arch, *_, which = name.split("-")
    call = packed(generic.on(arch, generic.CALLS[name.removeprefix(f"{arch}-").removesuffix(f"-{which}")]))
    call = replace(call, deterministic=which == "queries")
    source, shared = source_and_shared(_generic_kernel(call, which), arch)
    assert shared <= ARCHITECTURES[arch].shared_bytes
    body = source.partition("__global__")[2]
    assert "tma_" not in body
    assert "warpgroup_reg_dealloc" not in body
    generic._check_atomics(call, which, source)
    nvcc = find_nvcc()
    if nvcc is None or arch not in generic.ASSEMBLED:
        pytest.skip("lowered, but not assembled")
    generic._check_assembly(assemble(nvcc, source, arch, tmp_path))


# Most of them with the largest tiles: gradients, which have shared memory of their own, could be too much.
STAGED = {
    ("sm_80", "causal-256", "main"),
    ("sm_80", "causal-256", "queries"),
    ("sm_90a", "alibi-256", "main"),
    ("sm_90a", "alibi-256", "queries"),
    ("sm_90a", "softcap-256", "main"),
    ("sm_90a", "unaligned-256", "main"),
    ("sm_90a", "unaligned-256", "queries"),
    ("sm_120a", "plain", "main"),
    ("sm_120a", "plain", "queries"),
    ("sm_90a", "plain-16", "main"),
    ("sm_90a", "plain-16", "queries"),
}
QUICK_STAGED = ("sm_90a-plain-16-main",)


@pytest.mark.slow(reason="lowers a kernel, 10 s")
@pytest.mark.parametrize("name", _named(map("-".join, sorted(STAGED)), QUICK_STAGED))
def test_shared_memory_is_counted_and_enough(name: str) -> None:
    arch, *_, which = name.split("-")
    call = packed(generic.on(arch, generic.CALLS[name.removeprefix(f"{arch}-").removesuffix(f"-{which}")]))
    call = replace(call, deterministic=which == "queries")
    _, shared = source_and_shared(_generic_kernel(call, which), arch)
    count, tile = (shared_bytes, generic_tile) if which == "main" else (shared_bytes_queries, default_queries)
    counted = count(read_together(call), tile(call))
    assert counted <= shared <= counted + 2 * REDUCED
    assert shared <= ARCHITECTURES[arch].shared_bytes


def test_packed_calls_have_kernels_of_their_own() -> None:
    plain = backward_of(make_call())
    for name in ("prepare", "main", "finish"):
        assert launch.cache_key(plain, name) != launch.cache_key(packed(plain), name)


def test_what_is_prepared_has_whole_tiles_of_both_kernels() -> None:
    """The main kernel reads lse and delta by whole tiles, whatever a list's tiles are."""
    for call in map(packed, [*narrow.CALLS.values(), *wide.CALLS.values(), *generic.CALLS.values()]):
        for deterministic in (False, True):
            each = replace(call, deterministic=deterministic)
            assert prepared(each).tile % default(each).block_M == 0
            assert prepared(each).tile <= 128


def test_a_bias_of_each_sequence_is_stored() -> None:
    """A sequence's rows begin at another position, but none of its scores reads what another does."""
    ways = {sequences: [path.way for path in paths(packed(with_bias(sequences)))] for sequences in (1, 2)}
    assert ways == {1: ["added"], 2: ["stored"]}


def test_on_other_architectures_too() -> None:
    """The lists' tiles are those of the kernels that they are for."""
    for arch in ("sm_80", "sm_90a"):
        call = packed(backward_of(on(arch, make_call(dim=64))))
        assert isinstance(default(call), BackwardConfig) == (arch == "sm_80")
        assert prepared(call).tile == default(call).block_M
