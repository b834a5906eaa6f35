"""Compiles what a run of the suite random needs before its first case, in parallel.

tileattn's kernels go into its cache. FlashAttention-4 compiles a kernel for each head dim, mask and number of query
heads per kv head at its first call, for seconds; it keeps them on disk where `FA4_CACHE` is 1.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tileattn.bench import passes, problem, warmup
from tileattn.bench.baselines import BASELINES
from tileattn.bench.cases import Case
from tileattn.call.facts import device_arch
from tileattn.kernels.cache.store import kernel_cache
from tileattn.kernels.tilelang.build.batch import CORES, AnyJob, compile_all

FA4 = "fa4"
FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
MAX_PROCESSES = 16  # each imports a compiler


@dataclass(frozen=True)
class BaselineJob:
    """A first call of a baseline, which compiles its kernels."""

    name: str
    case: Case
    direction: str

    @property
    def key(self) -> str:
        """Of no library of tileattn's, so that none is found."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.name} {self.direction} {self.case.name}"

    def compile(self) -> None:
        """Calls the baseline on the GPU."""
        given = problem.build(self.case, "cuda", direction=self.direction)
        baseline = BASELINES[self.name]
        if baseline.refusal(given) is not None:
            return
        with torch.set_grad_enabled(self.direction != "fwd"):
            prepared = baseline.prepare(given)
            with prepared.context():
                passes.start(self.direction, prepared, given)()
        torch.cuda.synchronize()
        del given, prepared
        torch.cuda.empty_cache()  # other processes need it


def own_jobs(cases: Sequence[Case], direction: str, arch: str) -> list[AnyJob]:
    """tileattn's kernels for these cases, each once."""
    found: dict[str, AnyJob] = {}
    # One of each kind: lengths of windows and documents are no part of a kernel.
    kinds = {(case.head_dim, case.head_dim_v, kind(case.variant), case.dtype): case.variant for case in cases}
    for (head_dim, head_dim_v, _, dtype), variant in kinds.items():
        facts = [(head_dim, head_dim_v)], [variant], [dtype], arch
        if direction == "fwd":
            wanted = [call for call in warmup.calls(*facts) if not call.return_lse]
            jobs = warmup.jobs(wanted)
        else:
            backward = warmup.backward_calls(*facts)
            jobs = warmup.jobs([call.forward for call in backward], backward)
        for job in jobs:
            found.setdefault(job.key, job)
    return list(found.values())


def baseline_jobs(cases: Sequence[Case], direction: str) -> list[AnyJob]:
    """First calls of FlashAttention-4, one for each case.

    Those of different kernels come first. The others find them compiled, unless sizes choose another kernel.
    """
    kinds: dict[tuple[object, ...], AnyJob] = {}
    others: list[AnyJob] = []
    for case in cases:
        facts = (case.head_dim, case.head_dim_v, kind(case.variant), case.heads // case.kv_heads, case.dtype)
        job = BaselineJob(FA4, case, direction)
        if kinds.setdefault(facts, job) is not job:
            others.append(job)
    return [*kinds.values(), *others]


def keep_baselines() -> None:
    """FlashAttention-4 keeps what it compiles on disk, here and in processes from here: before anything imports it."""
    os.environ.setdefault(FA4_CACHE, "1")


def compile_ahead(
    cases: Sequence[Case], direction: str, baselines: Sequence[str], device: torch.device, say: Callable[[str], None]
) -> None:
    """Compiles what the caches lack. What fails here fails in its case again."""
    cache = kernel_cache()
    own = own_jobs(cases, direction, device_arch(device))
    wanted = baseline_jobs(cases, direction) if FA4 in baselines else []
    wanted += [job for job in own if cache.find(job.key) is None]
    for number, done in enumerate(compile_all(wanted, min(CORES, MAX_PROCESSES)), start=1):
        took = done.error or ("was in the cache" if done.was_there else f"{done.seconds:.1f} s")
        say(f"kernel {number}/{len(wanted)}: {done.job}: {took}")


def kind(variant: str) -> str:
    """A variant without its numbers."""
    return re.sub(r"\d+", "", variant)
