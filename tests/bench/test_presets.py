"""The presets of `tileattn bundle`: what they cover, asked for call by call, without the code that lists them."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tools import ROOT
from tileattn import ALiBi, Causal, Documents, SlidingWindow, SoftCap
from tileattn.bench import presets
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.append.job import AppendJob
from tileattn.kernels.tilelang.backward.jobs import all_jobs
from tileattn.kernels.tilelang.build import text
from tileattn.kernels.tilelang.decode.library import DecodeJob
from tileattn.kernels.tilelang.decode.library import PlanJob as DecodePlanJob
from tileattn.kernels.tilelang.forward.defaults import defaults
from tileattn.kernels.tilelang.forward.library import Job
from tileattn.kernels.tilelang.packed.library import PlanJob
from tileattn.variant.key import encode, normalize

ARCH = "sm_90a"
NVIDIA = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
DTYPES = (torch.float16, torch.bfloat16)
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
IDS, SLOPES = torch.zeros(9, dtype=torch.int32), torch.ones(4)
MASKS: dict[str, Any] = {
    "full": None,
    "causal": Causal(),
    "window": SlidingWindow(1024, 0),
    "causal and documents": Causal() & Documents(IDS),
    "window and documents": SlidingWindow(1024, 0) & Documents(IDS),
}
MODIFIED: dict[str, Any] = {
    "soft cap": (None, [SoftCap(50.0)]),
    "alibi": (None, [ALiBi(SLOPES)]),
    "soft cap and window": (SlidingWindow(1024, 0), [SoftCap(50.0)]),
}


@functools.cache
def default() -> tuple[Any, ...]:
    return tuple(presets.named("default", ARCH))


@functools.cache
def names() -> frozenset[str]:
    return frozenset(job.name.facts for job in default())


def key(mask: Any, mods: Any = None, causal: bool = False) -> str:
    """Of the arguments of `attention`."""
    return encode(*normalize(mask, mods, causal=causal))[0]


def lacking(jobs: Any) -> list[str]:
    return [str(job) for job in jobs if job.name.facts not in names()]


def both_passes(call: AttentionCall, **backward: Any) -> list[Any]:
    """The kernels of a call, forward without and with lse, and of its gradients."""
    jobs: list[Any] = []
    for lse in (False, True):
        forward = replace(call, return_lse=lse)
        jobs += [Job(forward, config) for config in defaults(forward)]
    going_back = replace(call, return_lse=True, needs_grad=True)
    return [*jobs, *all_jobs(BackwardCall(going_back, (True, True, True, call.sink), **backward))]


def of_every(variant: str, **facts: Any) -> list[AttentionCall]:
    return [
        AttentionCall(dtype, dim, dim_v, variant, arch=ARCH, packed=packed, **facts)
        for dtype, (dim, dim_v), packed in itertools.product(DTYPES, DIMS, (False, True))
    ]


def test_names() -> None:
    assert presets.NAMES == ("default", "all", "first", "sample")


@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_default_has_every_mask_with_and_without_a_sink(mask: Any, sink: bool) -> None:
    assert lacking(job for call in of_every(key(mask), sink=sink) for job in both_passes(call)) == []


@pytest.mark.parametrize("variant", MODIFIED.values(), ids=MODIFIED)
def test_default_has_the_modifications(variant: Any) -> None:
    for call in of_every(key(*variant, causal=True)):
        forward = [Job(each, config) for each in (call, replace(call, return_lse=False)) for config in defaults(each)]
        assert lacking(forward) == []
        needs = (True, True, True, False, *((False,) * ("ALiBi" in call.variant)))
        assert lacking(all_jobs(BackwardCall(replace(call, return_lse=True, needs_grad=True), needs))) == []


@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_default_has_unaligned_and_deterministic_calls(mask: Any) -> None:
    for call in of_every(key(mask)):
        assert lacking(both_passes(call, deterministic=True)) == []
        assert lacking(both_passes(replace(call, aligned=False), aligned=False)) == []


def test_default_has_the_plan_of_packed_calls() -> None:
    assert lacking([PlanJob(ARCH)]) == []


@pytest.mark.parametrize("page_rows", [0, 16, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_default_has_decoding(page_rows: int, packed: bool) -> None:
    calls = [job.call for job in default() if isinstance(job, DecodeJob)]
    found = {
        (call.dtype, call.head_dim, call.head_dim_v, call.return_lse)
        for call in calls
        if (call.page_rows, call.packed) == (page_rows, packed)
    }
    assert found == {(dtype, *dims, lse) for dtype in DTYPES for dims in DIMS for lse in (False, True)}


def test_default_plans_and_writes_for_decoding() -> None:
    assert {type(job) for job in default()} >= {DecodePlanJob, AppendJob}


@pytest.mark.slow_cases("all", reason="8 s")
@pytest.mark.parametrize("name", presets.NAMES)
def test_no_kernel_is_there_twice(name: str) -> None:
    jobs = presets.named(name, ARCH)
    assert len({job.key for job in jobs}) == len(jobs)
    assert {job.arch for job in jobs} == {ARCH}


@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_first_has_full_and_causal_attention_of_head_dims_64_and_128(mask: Any) -> None:
    found = frozenset(job.name.facts for job in presets.named("first", ARCH))
    assert found < names()
    for sink, call in itertools.product((False, True), of_every(key(mask))):
        needed = {job.name.facts for job in both_passes(replace(call, sink=sink))}
        assert (needed <= found) == (call.head_dim == call.head_dim_v and call.head_dim in (64, 128))
    assert PlanJob(ARCH).name.facts in found


def test_every_kernel_has_a_form_in_json() -> None:
    for job in default():
        again = text.decode(json.loads(json.dumps(text.encode(job))))
        assert type(again) is type(job)
        assert again == job


@pytest.mark.parametrize("arch", [*NVIDIA, "gfx942"])
def test_a_sample_has_24_kernels_of_every_kind(arch: str) -> None:
    jobs = presets.named("sample", arch)
    assert len(jobs) == presets.SAMPLED == 24
    assert len({job.key for job in jobs}) == 24
    assert {job.arch for job in jobs} == {arch}
    kinds = {type(job) for job in presets.jobs(presets.SAMPLE, arch)}
    assert {type(job) for job in jobs} == kinds
    assert (len(kinds) > 3) == (arch in NVIDIA)


@pytest.mark.slow(reason="lists each preset for three architectures, 40 s")
def test_the_page_has_the_counts() -> None:
    header, *rows = [line for line in (ROOT / "docs/bundles.md").read_text().splitlines() if line.startswith("| ")]
    archs = header.strip("| ").split(" | ")[2:]
    assert archs == [ARCH, "sm_80", "gfx942"]
    for name in presets.NAMES:
        (row,) = [row for row in rows if row.startswith(f"| `{name}` |")]
        counts = [int(cell) for cell in row.strip("| ").split(" | ")[2:]]
        assert counts == [len(presets.named(name, arch)) for arch in archs], name
