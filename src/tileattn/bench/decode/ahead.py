"""Compiles tileattn's kernels of a run before its first row, in parallel: on a GPU a compiler would be waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from tileattn.bench.decode.cases import GPU_GRID, Case
from tileattn.bench.decode.methods import Method, Own, fixed, own_methods
from tileattn.bench.decode.ratios.cases import suite
from tileattn.call.decoding import DecodeCall, DecodeInputs, DecodeSizes
from tileattn.kernels.tilelang.build.batch import CORES, AnyJob, compile_all
from tileattn.kernels.tilelang.decode.job import jobs_of
from tileattn.kernels.tilelang.decode.launch import Decoding
from tileattn.kernels.tilelang.decode.library import PlanJob
from tileattn.runtime.decoding import DecodeOptions, make_decode_call, with_variant
from tileattn.runtime.dispatch import prepare_decode

DECODE, RATIOS = "decode", "decode-ratios"
SUITES = (DECODE, RATIOS)
MAX_PROCESSES = 16  # each imports TileLang and runs nvcc


def jobs(
    rows: Sequence[tuple[Case, Method]], device: torch.device, dtype: torch.dtype, arch: str | None = None
) -> list[AnyJob]:
    """The kernels that tileattn needs for methods on rows, each once, attention before plans.

    arch: the architecture, if not that of `device`.
    """
    found: dict[str, AnyJob] = {}
    for case, method in rows:
        if isinstance(method, Own):
            try:
                phase = _phase(case, method, device, dtype, arch)
            except NotImplementedError:  # its row will say so
                continue
            if isinstance(phase, Decoding):
                for job in jobs_of(phase.call, phase.config, phase.lines and phase.lines.queries):
                    found.setdefault(job.key, job)
    return sorted(found.values(), key=lambda job: isinstance(job, PlanJob))


def suite_jobs(names: Sequence[str], arch: str) -> list[AnyJob]:
    """The kernels of whole suites on a GPU, for benchmarks/precompile.py."""
    rows: list[tuple[Case, Method]] = []
    if DECODE in names:
        own = [*own_methods("tilelang"), fixed("tilelang")]
        rows += [(case, method) for case in GPU_GRID.cases() for method in own]
    if RATIOS in names:
        rows += [(case, method) for case, each in suite("cuda", "tilelang").methods.items() for method in each]
    return jobs(rows, torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16, arch)


def compile_ahead(
    rows: Sequence[tuple[Case, Method]], device: torch.device, dtype: torch.dtype, say: Callable[[str], None]
) -> None:
    """Compiles what the kernel cache lacks. What fails here fails in its row again."""
    wanted = jobs(rows, device, dtype)
    for number, done in enumerate(compile_all(wanted, min(CORES, MAX_PROCESSES)), start=1):
        took = done.error or ("was in the cache" if done.was_there else f"{done.seconds:.1f} s")
        say(f"kernel {number}/{len(wanted)}: {done.job}: {took}")


def _phase(case: Case, method: Own, device: torch.device, dtype: torch.dtype, arch: str | None) -> Any:
    """What decodes a row."""
    call = _facts(case.page, case.heads, case.kv_heads, case.head_dim, method, device, dtype)
    keys = method.variant.keys or case.context
    sizes = DecodeSizes(case.batch, method.q_len, case.batch * method.q_len, case.heads, case.kv_heads, keys, case.page)
    return prepare_decode(
        replace(call, arch=arch or call.arch), method.backend, sizes, case.head_dim**-0.5, method.splits
    ).run


@lru_cache(maxsize=256)
def _facts(
    page: int, heads: int, kv_heads: int, head_dim: int, method: Own, device: torch.device, dtype: torch.dtype
) -> DecodeCall:
    """The static facts of a method's calls, from a small call on the same kind of caches."""
    kinds: dict[str, Any] = {"dtype": dtype, "device": device}
    q = torch.empty(2, method.q_len, heads, head_dim, **kinds)
    cache = torch.empty(2, page or 64, kv_heads, head_dim, **kinds)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device) if page else None
    inputs = DecodeInputs(q, cache, cache, torch.ones(2, dtype=torch.int32, device=device), table)
    given = method.options(heads, device)
    mask, score_mod = given.get("mask"), given.get("score_mod")
    variant, inputs = with_variant(inputs, method.q_len, mask, score_mod, given["causal"], None)
    inputs = inputs._replace(sink=given.get("sink"))
    options = DecodeOptions(variant, head_dim**-0.5, method.q_len, method.splits, False, method.backend)
    return make_decode_call(inputs, options)
