"""`tileattn warmup`: compiles kernels into the cache ahead of the first call."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product

from tileattn.bench import problem
from tileattn.bench.cases import DTYPES, Case
from tileattn.bench.peers.own import variant_key
from tileattn.call import AttentionCall
from tileattn.kernels.cache import KernelCache, default_folder
from tileattn.kernels.tilelang.defaults import defaults
from tileattn.kernels.tilelang.launch import cache_key, ensure_compiled

# Each imports TileLang and runs nvcc: more of them want more memory than they save time.
MAX_PROCESSES = 16


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel: it was in the cache, or took some seconds to compile, or could not be compiled."""

    call: AttentionCall
    seconds: float = 0.0
    was_there: bool = False
    error: str | None = None


def calls(
    head_dims: Sequence[tuple[int, int]], variants: Sequence[str], dtypes: Sequence[str], arch: str
) -> list[AttentionCall]:
    """All combinations of (head_dim, head_dim_v), variant names and dtype names (`cases.DTYPES`).

    Each twice: kernels that return lse are others than those that do not.
    """
    return [
        AttentionCall(
            dtype=DTYPES[dtype],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            variant=_key(variant),
            sink="sink" in variant.split("+"),
            return_lse=return_lse,
            arch=arch,
        )
        for dtype, (head_dim, head_dim_v), variant, return_lse in product(dtypes, head_dims, variants, (False, True))
    ]


def _key(variant: str) -> str:
    """The variant as kernels know it, by way of a problem small enough to build on any machine."""
    return variant_key(problem.build(Case(2, 8, 8, 2, 2, 8, 8, variant, "bf16"), "cpu"))


def compile_all(wanted: Sequence[AttentionCall]) -> Iterator[Compiled]:
    """Compile in parallel processes, one a core, and yield each kernel as it is ready.

    Processes are spawned: TileLang may initialise CUDA when it is imported, which does not survive a fork.
    """
    workers = min(len(wanted), len(os.sched_getaffinity(0)), MAX_PROCESSES)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile, call) for call in wanted]):
            yield done.result()


def _compile(call: AttentionCall) -> Compiled:
    """Runs in a process of its own; an exception of a compiler need not survive the way back, its text does."""
    missing = [
        config for config in defaults(call) if KernelCache(default_folder()).find(cache_key(call, config)) is None
    ]
    start = time.perf_counter()
    try:
        for config in missing:
            ensure_compiled(call, config)
    except Exception as failure:
        return Compiled(call, error=f"{type(failure).__name__}: {failure}")
    return Compiled(call, seconds=time.perf_counter() - start, was_there=not missing)
