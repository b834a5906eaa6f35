"""Blocks that share the heads of a group, in the Hopper schedule: lowered and assembled, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward.test_lowering import SERIALIZED, backward_of
from tests.tools.lowering import assemble, find_nvcc, make_call, numbers
from tileattn import Causal
from tileattn.call.facts import BackwardCall
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.kernels import main_kernel
from tileattn.kernels.tilelang.backward.library import SharesJob
from tileattn.kernels.tilelang.backward.shares.add import add_kernel
from tileattn.kernels.tilelang.backward.shares.choice import split
from tileattn.kernels.tilelang.build.compile import device_source

CALLS = {
    "plain-64": backward_of(make_call(dim=64)),
    "plain-128": backward_of(make_call()),
    "causal-64": backward_of(make_call(Causal(), dim=64)),
    "causal-128": backward_of(make_call(Causal())),
    "plain-96": backward_of(make_call(dim=96)),
    "plain-64/128": backward_of(make_call(dim=64, dim_v=128)),
    "causal-128-packed": backward_of(make_call(Causal(), packed=True)),
    "plain-128-deterministic": backward_of(make_call(), deterministic=True),
    "causal-192/128": backward_of(make_call(Causal(), dim=192, dim_v=128)),
    "causal-192": backward_of(make_call(Causal(), dim=192)),
    "plain-256": backward_of(make_call(dim=256)),
    "causal-224/200": backward_of(make_call(Causal(), dim=224, dim_v=200)),  # columns that are not stored
    "causal-256-packed": backward_of(make_call(Causal(), dim=256, packed=True)),
}


@pytest.mark.slow  # each is lowered and assembled in seconds
@pytest.mark.parametrize("name", CALLS)
def test_main_kernel(name: str, tmp_path: Path) -> None:
    """It spills nothing: its descriptors are computed in the loops, which have as few fences as without shares."""
    call: BackwardCall = CALLS[name]
    source = device_source(main_kernel(call, split(call, default(call), 2)), "sm_90a")
    body = source.partition("__global__")[2]
    for gradient in ("dk", "dv"):  # parts in float32, straight from registers
        assert len(re.findall(rf"\*\(float2\*\)\({gradient} \+ .*\) = ", body)) == 1
        assert f"{gradient}_desc" not in body
    whole = device_source(main_kernel(call, replace(split(call, default(call), 2), split=False)), "sm_90a")
    assert source.count("fence_proxy_async") <= whole.count("fence_proxy_async")
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
    report = assemble(nvcc, source, "sm_90a", tmp_path)
    assert not SERIALIZED.search(report), report
    assert max(numbers(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)) == 0, report


def test_the_kernel_that_adds_up_the_parts() -> None:
    job = SharesJob(make_call().dtype, "sm_90a")
    body = device_source(add_kernel(job.dtype), job.arch).partition("__global__")[2]
    assert "atomic" not in body.lower()
    assert re.search(r"for \(int share\w* = 0; share\w* < shares; \+\+share\w*\)", body)
