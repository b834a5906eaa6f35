"""The kernels that `tileattn warmup` compiles into the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

import torch

from tileattn.bench import problem
from tileattn.bench.baselines.own import mask_of, needs, score_mods_of, variant_key
from tileattn.bench.cases import DTYPES, Case
from tileattn.bench.problem import Problem
from tileattn.call.appending import AppendCall
from tileattn.call.decoding import DecodeCall, DecodeInputs
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.tilelang.append.job import AppendJob
from tileattn.kernels.tilelang.backward.jobs import all_jobs
from tileattn.kernels.tilelang.build.batch import AnyJob
from tileattn.kernels.tilelang.decode.config import defaults as decode_defaults
from tileattn.kernels.tilelang.decode.job import lines_jobs, plan_job, with_lines
from tileattn.kernels.tilelang.decode.library import DecodeJob
from tileattn.kernels.tilelang.decode.lines.visits import QUERIES
from tileattn.kernels.tilelang.forward.defaults import defaults
from tileattn.kernels.tilelang.forward.library import Job
from tileattn.kernels.tilelang.lists.bits import bits_jobs
from tileattn.kernels.tilelang.lists.launch import lists_jobs
from tileattn.runtime.decoding import page_rows_of, with_variant
from tileattn.variant.program import with_alignment


def calls(
    head_dims: Sequence[tuple[int, int]], variants: Sequence[str], dtypes: Sequence[str], arch: str
) -> list[AttentionCall]:
    """All combinations of (head_dim, head_dim_v), variant names and dtype names (`cases.DTYPES`).

    Each occurs twice: with and without lse, which are different kernels.
    """
    return [
        AttentionCall(
            dtype=DTYPES[dtype],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            variant=variant_key(_small(variant)),
            sink="sink" in variant.split("+"),
            return_lse=return_lse,
            arch=arch,
        )
        for dtype, (head_dim, head_dim_v), variant, return_lse in product(dtypes, head_dims, variants, (False, True))
    ]


def backward_calls(
    head_dims: Sequence[tuple[int, int]], variants: Sequence[str], dtypes: Sequence[str], arch: str
) -> list[BackwardCall]:
    """The backward passes of the same: the gradients of q, k and v, of a sink, and of a bias with "dbias"."""
    wanted = []
    for variant in variants:
        q, k, v, _, *tensors = needs(_small(variant))
        for call in calls(head_dims, [variant], dtypes, arch):
            if call.return_lse:
                wanted.append(BackwardCall(replace(call, needs_grad=True), (q, k, v, call.sink, *tensors)))
    return wanted


def decode_calls(
    head_dims: Sequence[tuple[int, int]],
    variants: Sequence[str],
    dtypes: Sequence[str],
    page_sizes: Sequence[int],
    arch: str,
) -> list[DecodeCall]:
    """The calls of `decode` with the same, over pages of these sizes (0: over contiguous caches).

    Each occurs four times: with and without lse, for packed queries and for as many of each sequence. A variant is the
    whole of a call's: "full" is ``decode(..., causal=False)``, and "causal+window1024" that of ``decode(...,
    mask=SlidingWindow(1024, 0))``.
    """
    combinations = product(dtypes, head_dims, variants, page_sizes, (False, True), (False, True))
    return _distinct_calls(
        DecodeCall(
            dtype=DTYPES[dtype],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            variant=decode_variant_key(_small(variant), packed),
            sink="sink" in variant.split("+"),
            return_lse=return_lse,
            arch=arch,
            packed=packed,
            page_rows=page_rows_of(page_size),
        )
        for dtype, (head_dim, head_dim_v), variant, page_size, packed, return_lse in combinations
    )


def append_calls(
    head_dims: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    page_sizes: Sequence[int],
    rotary: Sequence[str],
    arch: str,
) -> list[AppendCall]:
    """The calls of `append_kv` before these: packed or not, into pages or contiguous caches.

    rotary: "none", and "halves" or "interleaved" of whole heads: of keys and queries, by tables in float32 and in the
    dtype of the keys.
    """
    wanted = []
    for dtype, (head_dim, head_dim_v), pages, kind, packed in product(
        map(DTYPES.__getitem__, dtypes), head_dims, page_sizes, rotary, (False, True)
    ):
        plain = AppendCall(dtype, head_dim, head_dim_v, packed=packed, paged=pages > 0, arch=arch)
        if kind == "none":
            wanted.append(plain)
            continue
        rotated = replace(plain, rotary_dim=head_dim, interleaved=kind == "interleaved", with_q=True)
        wanted += [replace(rotated, table_dtype=table) for table in (torch.float32, dtype)]
    return _distinct_calls(wanted)


def decode_variant_key(given: Problem, packed: bool) -> str:
    """The problem's variant as a `DecodeCall` names it."""
    batch, seqlen = given.q.shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32) * seqlen if packed else None
    q = given.q.flatten(0, 1)[None] if packed else given.q
    inputs = DecodeInputs(q, given.k, given.v, torch.full((batch,), seqlen, dtype=torch.int32), cu_seqlens_q=ends)
    key, inputs = with_variant(inputs, seqlen, mask_of(given), score_mods_of(given), False, None)
    return with_alignment(key, inputs.operands.tensors)


def decode_jobs(wanted: Sequence[DecodeCall], appending: Sequence[AppendCall] = ()) -> list[AnyJob]:
    """The kernels of these calls for any sizes and splits: calls with one range of keys share their planning kernel."""
    every = [each for call in wanted for each in with_lines(call)]
    attention = [DecodeJob(call, config) for call in every for config in decode_defaults(call)]
    plans = [plan_job(call) for call in every]
    lines = [job for call in every for job in lines_jobs(call, *QUERIES)]
    return _distinct([*attention, *plans, *lines, *map(AppendJob, appending)])


def _small(variant: str) -> Problem:
    """A problem with the variant that is small enough to build on any machine, and asks for gradients."""
    return problem.build(Case(2, 8, 8, 2, 2, 8, 8, variant, "bf16"), "cpu", direction="bwd")


def jobs(wanted: Sequence[AttentionCall], backward: Sequence[BackwardCall] = ()) -> list[AnyJob]:
    """The kernels of these calls for any sizes; for fp8 also those that transpose v."""
    transposing = _distinct(Job(call, None) for call in wanted if call.dtype == FP8)
    # Calls share what comes before and after the main kernel.
    going_back = _distinct(job for call in backward for job in all_jobs(call))
    listed = [call for call in wanted if call.dtype.itemsize == 2]
    lists: list[AnyJob] = [job for call in listed for job in lists_jobs(call.variant, call.arch, call.packed)]
    lists += [job for call in listed if not call.packed for job in bits_jobs(call.variant, call.arch)]
    forward = (Job(call, config) for call in wanted for config in defaults(call))
    return [*transposing, *forward, *going_back, *_distinct(lists)]


def _distinct(given: Iterable[AnyJob]) -> list[AnyJob]:
    found: dict[str, AnyJob] = {}
    for job in given:
        found.setdefault(job.key, job)
    return list(found.values())


Call = TypeVar("Call", DecodeCall, AppendCall)


def _distinct_calls(given: Iterable[Call]) -> list[Call]:
    return list(dict.fromkeys(given))
