"""The Hopper schedules for dq alone and for wide heads: the calls that use them, and their generated code.

The tests lower, assemble and read the order of the instructions; they need no GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

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
from tileattn import ALiBi, Bias, Causal, SlidingWindow, SoftCap
from tileattn.call.facts import BackwardCall
from tileattn.kernels.tilelang.backward import library as launch
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default, queries_default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig, HopperQueriesConfig, HopperWideConfig
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.build.compile import device_source


def without_tensors(call: BackwardCall) -> BackwardCall:
    """Gradients of the variant's tensors are not wanted."""
    return replace(call, needs=(*call.needs[:4], *(False for _ in call.needs[4:])))


def deterministic(call: BackwardCall) -> BackwardCall:
    return replace(call, deterministic=True)


CALLS = {
    "plain-256": backward_of(make_call(dim=256)),
    "causal-256": backward_of(make_call(Causal(), dim=256)),
    "causal-192": backward_of(make_call(Causal(), dim=192, dtype=torch.float16)),
    "plain-160": backward_of(make_call(dim=160)),
    "causal-192/128": backward_of(make_call(Causal(), dim=192, dim_v=128)),
    "plain-192/128": backward_of(make_call(dim=192, dim_v=128)),
    "plain-192": backward_of(make_call(dim=192)),
    "softcap-256": backward_of(make_call(Causal(), SoftCap(30.0), dim=256)),
    "alibi-256": without_tensors(backward_of(make_call(None, ALiBi(SLOPES), dim=256))),
    "softcap-192/128": backward_of(make_call(None, SoftCap(30.0), dim=192, dim_v=128)),
    "bias-192/128": without_tensors(backward_of(make_call(IDS & Causal(), Bias(BIAS), dim=192, dim_v=128))),
    "bias-tiles-192/128": without_tensors(backward_of(make_call(Causal(), Bias(TILES), dim=192, dim_v=128))),
    "bias-tiles-128": deterministic(backward_of(make_call(Causal(), Bias(TILES)))),
    "bias-wide-tiles-64": deterministic(backward_of(make_call(None, Bias(WIDE_TILES), dim=64))),
    "plain-128": deterministic(backward_of(make_call())),
    "causal-64": deterministic(backward_of(make_call(Causal(), dim=64))),
    "window-96": deterministic(backward_of(make_call(SlidingWindow(5, 0), dim=96))),
    "bias-40": deterministic(backward_of(make_call(None, Bias(BIAS), dim=40))),
}
QUICK = {("causal-256", "main"), ("plain-128", "queries")}
PRODUCTS = {"main": 4, "queries": 3}


def _kernels() -> list[object]:
    return [
        pytest.param(call, which, id=f"{name}-{which}", marks=[] if (name, which) in QUICK else [pytest.mark.slow])
        for name, call in CALLS.items()
        for which in ("main", "queries")
    ]


@pytest.mark.slow_cases("plain-128-queries", reason="lowers a kernel, 7 s")
@pytest.mark.parametrize(("call", "which"), _kernels())
def test_kernel(call: BackwardCall, which: str, tmp_path: Path) -> None:
    """One test for all that is asked of a kernel, since lowering it takes seconds."""
    config = default(call) if which == "main" else queries_default(call)
    assert not isinstance(config, BackwardConfig)
    assert config.is_valid(call.forward)
    source = device_source(kernel(call, which), "sm_90a")
    body = source.partition("__global__")[2]
    assert "atomic" not in body.lower().replace("atomicity", "")
    assert "tma_load(" in body
    assert "tma_store(" in body
    loads = body.partition("warpgroup_reg_alloc<")[0]
    assert set(re.findall(r"tl_shuffle_elect<(\d+)>", loads)) <= {"0", "32"}  # who copies is of the warp that loads
    barriers = re.findall(r"__sync_thread_partial\(.*, (\d+)\);", body)
    # Two, around the copy of the result to where an operand was, of those that read the one and write the other.
    assert barriers == ["128" if which == "queries" else "256"] * 2
    # The branch that holds the exponentials stands before the wait for dP, in the first iteration and in the loop.
    waits = re.findall(r"(?:wait_wgmma<(\d)>|(__nanosleep))", body)
    held = [after[0] for here, after in pairwise(waits) if here[1]]
    assert held == (["0", "0"] if getattr(config, "settles", False) else [])
    products = set(re.findall(r"tl::wgmma_([rs]s)<.*?, (\d+, \d+, \d+), (\w+, \w+)", body))
    assert 2 <= len(products) <= PRODUCTS[which]
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
    report = assemble(nvcc, source, "sm_90a", tmp_path)
    assert not SERIALIZED.search(report), report
    assert max(numbers(r"(\d+) bytes (?:stack frame|spill stores)", report)) <= MAX_SPILLED, report


def test_dq_comes_from_its_own_kernel() -> None:
    """Where the main kernel cannot, or must not, add it up."""
    for call in CALLS.values():
        assert launch.kernel_names(call) == ("prepare", "main", "queries")
    for forward in (make_call(), make_call(dim=64), make_call(dim=96)):
        assert launch.kernel_names(backward_of(forward)) == ("prepare", "main", "finish")
    shared = CALLS["plain-256"], deterministic(CALLS["plain-256"])
    assert launch.cache_key(shared[0], "main") == launch.cache_key(shared[1], "main")


def test_schedules_of_wide_heads() -> None:
    for name in ("plain-256", "causal-256", "causal-192", "softcap-256", "alibi-256"):
        assert isinstance(default(CALLS[name]), HopperWideConfig), name
    for name in ("plain-160", "causal-192/128", "softcap-192/128", "bias-192/128"):
        config = default(CALLS[name])
        assert isinstance(config, HopperBackwardConfig), name
        assert not config.adds_dq
    assert queries_default(CALLS["plain-256"]) == HopperQueriesConfig(64, v_stages=1)
    assert queries_default(CALLS["causal-192/128"]) == HopperQueriesConfig(80, settles=True)
    settled = [name for name, call in CALLS.items() if getattr(queries_default(call), "settles", False)]
    assert settled == ["causal-192", "causal-192/128", "plain-192/128", "plain-192"]
    # Left to the generic schedule: tensors' gradients, elements of memory for each score, other alignments and dims.
    for call in (
        backward_of(make_call(None, ALiBi(SLOPES), dim=256)),
        without_tensors(backward_of(make_call(None, Bias(BIAS), dim=256))),
        backward_of(make_call(dim=256, aligned=False)),
        backward_of(make_call(dim=256, dim_v=192)),
        backward_of(make_call(dim=256, arch="sm_80")),
    ):
        assert isinstance(default(call), BackwardConfig), call
    for call in (backward_of(make_call(aligned=False)), backward_of(make_call(arch="sm_100a"))):
        assert isinstance(queries_default(deterministic(call)), BackwardConfig), call


def test_what_does_not_fit_is_not_valid() -> None:
    call, narrow = make_call(dim=256), make_call()
    assert HopperQueriesConfig(64, v_stages=1).is_valid(call)
    assert not HopperQueriesConfig(64).is_valid(call)  # shared memory
    assert not HopperQueriesConfig(80, v_stages=1).is_valid(call)  # registers
    assert not HopperQueriesConfig(64, k_stages=1).is_valid(narrow)  # K is still needed when the next one comes
    assert not HopperQueriesConfig(72).is_valid(narrow)  # the products' sums run over 16 at a time
    assert not HopperWideConfig().is_valid(make_call(dim=192, dim_v=128))  # one head dim
    assert not HopperWideConfig().is_valid(replace(call, aligned=False))
    assert HopperBackwardConfig(32, ds_buffers=0).is_valid(make_call(dim=192, dim_v=128))
    assert not HopperBackwardConfig(32).is_valid(make_call(dim=192, dim_v=128))  # dq's sums
    assert not HopperBackwardConfig(32, ds_buffers=0).is_valid(call)  # registers
