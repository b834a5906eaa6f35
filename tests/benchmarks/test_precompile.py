"""benchmarks/precompile.py: it finds all kernels of a run, and goes on when one does not compile."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tileattn
from tests.tools import ROOT
from tests.tools.decode_call import run_decode
from tileattn.bench import cases, warmup
from tileattn.bench.cases import Case
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.cache.store import KernelCache, default_folder
from tileattn.kernels.tilelang import backend
from tileattn.kernels.tilelang.backward import launch as backward_backend
from tileattn.kernels.tilelang.backward import library as backward_launch
from tileattn.kernels.tilelang.backward.defaults import default as default_of_backward
from tileattn.kernels.tilelang.backward.jobs import jobs_of
from tileattn.kernels.tilelang.backward.library import BackwardJob
from tileattn.kernels.tilelang.backward.shares.choice import of_lengths
from tileattn.kernels.tilelang.build.batch import compile_job
from tileattn.kernels.tilelang.decode.library import DecodeJob, PlanJob
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.choice import chosen
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.defaults import (
    LONG,
    Config,
    default,
    defaults,
    for_skewed_lengths,
    with_lists,
)
from tileattn.runtime import operators as ops
from tileattn.testing import build_decode, conformance_cases, decode_cases, distinct_calls
from tileattn.variant.program import program

# Its child processes find it by its name.
sys.path.insert(0, str(ROOT / "benchmarks"))

import precompile
from precompile import Done, Job

ARCH = "sm_90a"
pytestmark = pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang")


def invoke(arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(precompile.app, arguments.split())
    return result.exit_code, result.output


def chosen_for(call: AttentionCall, case: Case) -> Config:
    q_shape = torch.Size((case.batch, case.seqlen_q, case.heads, case.head_dim))
    return chosen(call, q_shape, torch.Size((case.batch, case.seqlen_k, case.kv_heads, case.head_dim)))


def expected_key(case: Case, dtype: str) -> str:
    """The key by way of `tileattn warmup`, which is independent of this script."""
    call, _ = warmup.calls([(case.head_dim, case.head_dim_v)], [case.variant], [dtype], ARCH)
    return launch.cache_key(call, chosen_for(call, case))


@pytest.mark.parametrize(("suite", "dtype"), [("fa", "bf16"), ("variants", "bf16"), ("quick", "bf16"), ("fp8", "fp8")])
def test_a_suite_is_found_whole(suite: str, dtype: str) -> None:
    keys = {job.key for job in precompile.jobs_of(precompile.suite_attempts([suite]), ARCH) if job.config}
    wanted = cases.suite(suite, dtype, "cuda")
    plain = [("causal" if case.terms.causal else "full", case) for case in wanted if not case.terms.plain]
    twins = [Case(**{**vars_of(case), "variant": variant}) for variant, case in plain]
    expected = {expected_key(case, dtype) for case in [*wanted, *twins]}
    if suite == "fp8":
        expected |= {expected_key(case, "bf16") for case in wanted}
    assert keys == expected


def vars_of(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


@pytest.mark.slow_cases("fa-bwd", "variants-fwdbwd", reason="0.5 s each")
@pytest.mark.parametrize("direction", ["bwd", "fwdbwd"])
@pytest.mark.parametrize("suite", ["fa", "variants"])
def test_a_suite_of_the_backward_pass_is_found_whole(suite: str, direction: str) -> None:
    """Forward kernels, which then return lse, and all kernels of the backward passes."""
    jobs = precompile.jobs_of(precompile.suite_attempts([suite], direction), ARCH)
    wanted = cases.suite(suite, "bf16", "cuda", direction)
    expected = set()
    for case in wanted:  # the plain twins of variants are in their suite
        _, call = warmup.calls([(case.head_dim, case.head_dim_v)], [case.variant], ["bf16"], ARCH)
        tensors = [False] * len(program(call.variant).tensors)
        needs = (True, True, True, False, *([True] if case.terms.dbias else tensors))
        backward = BackwardCall(replace(call, needs_grad=True), needs)
        expected.add(launch.cache_key(call, chosen_for(call, case)))
        main = of_lengths(backward, case.seqlen_q, case.seqlen_k)
        expected |= {backward_launch.cache_key(backward, name, main) for name in backward_launch.kernel_names(backward)}
    assert {job.key for job in jobs} == expected
    assert {type(job) for job in jobs} == {Job, BackwardJob}
    # What takes longest first: the small kernels come last.
    assert all(isinstance(job, BackwardJob) and job.kernel in ("prepare", "finish") for job in jobs[-3:])


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("full", (1, 3072, 3072, 28, 4)),  # all groups are shared
        ("full", (1, 1225, 19349, 16, 1)),  # those of the last wave
        ("causal", (1, 1225, 19349, 16, 1)),
    ],
)
def test_the_kernels_of_shared_groups_are_found(variant: str, sizes: tuple[int, ...]) -> None:
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes
    case = Case(batch, seqlen_q, seqlen_k, heads, kv_heads, 128, 128, variant, "bf16")
    jobs = precompile.jobs_of(precompile._case_attempts(case, "bwd"), ARCH)
    (call,) = warmup.backward_calls([(128, 128)], [variant], ["bf16"], ARCH)
    q_shape, k_shape = (torch.Size((batch, n, h, 128)) for n, h in ((seqlen_q, heads), (seqlen_k, kv_heads)))
    config, of_groups = backward_backend.configured(call, q_shape, k_shape)
    assert of_groups.shares > 1
    wanted = jobs_of(call, config or default_of_backward(call), of_groups)
    assert {job.key for job in jobs if not isinstance(job, Job)} == {job.key for job in wanted}


def test_pretending_leaves_nothing_behind() -> None:
    before = ops.run_forward, ops.run_backward, backward_backend.backward_kernels
    precompile.jobs_of(precompile.suite_attempts(["quick"], "bwd"), ARCH)
    assert before == (ops.run_forward, ops.run_backward, backward_backend.backward_kernels)
    q = torch.ones(1, 4, 1, 16, requires_grad=True)
    (dq,) = torch.autograd.grad(tileattn.attention(q, q, q).sum(), q)
    assert dq.isfinite().all()


def test_fp8_suites_have_their_transpositions_first() -> None:
    jobs = precompile.jobs_of(precompile.suite_attempts(["fp8"]), ARCH)
    assert [str(job) for job in jobs if job.config is None] == [
        f"transpose_fp8 d{dim} {ARCH}" for dim in (64, 128, 256)
    ]
    assert all(job.config is None for job in jobs[:3])


def test_each_kernel_once() -> None:
    jobs = precompile.jobs_of(precompile.suite_attempts(["fa", "fa", "variants"]), ARCH)
    assert len({job.key for job in jobs}) == len(jobs)


@pytest.mark.slow(reason="13 s")
def test_every_conformance_call_has_its_kernel() -> None:
    """Except calls with nothing to compute. Calls with a scale of 0 or less are among them."""
    todo = [case for case in conformance_cases("full") if 0 not in vars(case.shape).values() or case.shape.scale == 0]
    wanted = {call for call in distinct_calls(todo, ARCH) if backend.refusal(call) is None}
    jobs = forward_jobs(None)
    calls = {job.call for job in jobs}
    assert len(wanted) > 100
    assert wanted <= calls
    assert any(call.variant.endswith("{score}") for call in calls - wanted)
    assert {call.aligned for call in calls} == {True, False}
    for call in wanted:
        assert {job.config for job in jobs if job.call == call} <= set(defaults(call))


def test_every_case_of_decode_has_its_kernels() -> None:
    """An attention kernel and a plan, but for cases with nothing to compute."""
    for case in decode_cases("full")[::9]:
        sizes = case.shape.batch, case.shape.seqlen_q, case.shape.seqlen_k
        if case.structure.dtype not in ("bf16", "fp16") or 0 in sizes:
            continue
        arguments = build_decode(case, "meta")
        jobs = precompile.jobs_of([lambda arguments=arguments: run_decode(arguments, "tilelang")], ARCH)  # type: ignore[misc]
        assert {type(job) for job in jobs} == {DecodeJob, PlanJob}, case.id
        assert len(jobs) == 2, case.id
        attention = next(job for job in jobs if isinstance(job, DecodeJob))
        call, structure = attention.call, case.structure
        assert (call.head_dim, call.head_dim_v) == (structure.head_dim, structure.head_dim_v)
        assert (call.packed, call.fixed, call.page_rows) == (structure.packed, structure.fixed, structure.pages)
        assert (call.sink, call.aligned, call.arch) == (structure.sink, structure.aligned, ARCH)


def forward_jobs(kernels: str | None) -> list[Job]:
    return [job for job in precompile.conformance_jobs(kernels, ARCH) if isinstance(job, Job) and job.config]


@pytest.mark.slow
def test_a_bucket_has_one_kernel_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "conformance_cases", lambda selection: conformance_cases("smoke"))
    long = forward_jobs("long")
    assert len(long) > 50
    assert {job.call for job in long} == {job.call for job in forward_jobs(None)}
    # Packed calls have another where lengths are skewed.
    assert all(job.config in with_skewed(job, LONG) for job in long)
    assert all(job.config in with_skewed(job, 1) for job in forward_jobs("short"))
    assert forward_launch.default is default


def with_skewed(job: Job, seqlen: int) -> list[Config]:
    """The default of a length, that of packed calls of skewed lengths, and those which take their tiles from lists."""
    config = default(job.call, seqlen)
    of_lengths = [config, for_skewed_lengths(config)] if job.call.packed else [config]
    return [*of_lengths, *(with_lists(each, job.call) for each in of_lengths if isinstance(each, HopperConfig))]


def test_list_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "compile_all", None)
    code, output = invoke("suites fp8 --arch sm_90a --list")
    *kernels, total = output.splitlines()
    assert code == 0
    assert total == f"{len(kernels)} kernels"
    assert len([line for line in kernels if "transpose" in line]) == 3


def test_unknown_suites_and_buckets_are_refused() -> None:
    assert invoke("suites fast --arch sm_90a --list")[0] == 2
    assert invoke("conformance --kernels narrow --arch sm_90a --list")[0] == 2


# --- Compiling, with a stand-in for the compiler ---

JOBS = [Job(call, default(call)) for call in warmup.calls([(64, 64), (128, 128)], ["full"], ["bf16"], ARCH)]


def pretend_to_compile(job: Job) -> Done:
    if job == JOBS[1]:
        os._exit(1)  # as a compiler that crashes
    if job == JOBS[2]:
        return Done(job, error="RuntimeError: no")
    return Done(job, seconds=1.0, was_there=job == JOBS[3])


def test_a_backward_job_compiles_its_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path))
    compiled: list[BackwardJob] = []
    monkeypatch.setattr("tileattn.kernels.tilelang.build.job.find_or_compile", compiled.append)
    call = BackwardCall(replace(JOBS[1].call, needs_grad=True), (True, True, True, False))
    for name in backward_launch.kernel_names(call):
        done = compile_job(BackwardJob(call, name))
        assert done.error is None
        assert not done.was_there
    assert compiled == [BackwardJob(call, name) for name in ("prepare", "main", "finish")]
    assert str(BackwardJob(call, "main")) == f"main of {call}"


@pytest.mark.slow(reason="processes that import PyTorch, 5 s")
def test_a_job_that_crashes_does_not_end_the_others() -> None:
    done = {each.job: each for each in precompile.compile_all(JOBS, 1, pretend_to_compile)}
    assert list(done) == JOBS
    assert "its process ended" in (done[JOBS[1]].error or "")
    assert [each.error is None for each in done.values()] == [True, False, False, True]


def test_failures_are_named_and_set_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [Done(JOBS[0], 2.0), Done(JOBS[1], error="RuntimeError: ptxas died"), Done(JOBS[2], was_there=True)]
    monkeypatch.setattr(precompile, "compile_all", lambda jobs, processes: iter(results))
    assert precompile.run(JOBS[:3], 1, only_list=False) == 1
    said = capsys.readouterr()
    assert f"FAILED {JOBS[1]}: RuntimeError: ptxas died" in said.err
    assert "1 compiled, 1 in the cache, 1 failed" in said.out
    monkeypatch.setattr(precompile, "compile_all", lambda jobs, processes: iter(results[::2]))
    assert precompile.run(JOBS[:2], 1, only_list=False) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_kernel_is_compiled_where_the_run_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path))
    (done,) = precompile.compile_all(JOBS[:1], 1)
    assert done.error is None
    assert KernelCache(default_folder()).find(JOBS[0].key) is not None
    (again,) = precompile.compile_all(JOBS[:1], 1)
    assert again.was_there
