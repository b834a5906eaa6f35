"""The bandwidth ceilings of a GPU: a copy and a read of 2 GiB, measured in the run whose results they are beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

BYTES = 2**31
SAMPLES, CALLS = 7, 4  # the median of so many samples of so many calls in a row
BLOCK = 4096  # int32 that a program of the reading kernel loads at once


@dataclass(frozen=True)
class Ceiling:
    """One measurement in one process.

    when: such as "before" or "after" the rows.
    process: "tileattn" or "baselines".
    copy_gbps: a copy, counting read and written bytes, in 10^9 bytes per second.
    read_gbps: a kernel that adds up what it reads; None without Triton.
    """

    when: str
    process: str
    copy_gbps: float
    read_gbps: float | None


def measure(when: str, process: str, device: torch.device) -> Ceiling:
    """Measures both on a GPU."""
    source = torch.randint(-(2**31), 2**31 - 1, (BYTES // 4,), dtype=torch.int32, device=device)
    copy = _gbps(partial(torch.empty_like(source).copy_, source), 2 * BYTES)
    try:
        read: float | None = _gbps(_reader(source), BYTES)
    except ImportError:
        read = None
    return Ceiling(when, process, copy, read)


def overall(ceilings: Sequence[Ceiling]) -> tuple[float, float | None] | None:
    """The largest copy and read speed of a run: what the GPU reached at its best; None without measurements."""
    if not ceilings:
        return None
    reads = [each.read_gbps for each in ceilings if each.read_gbps is not None]
    return max(each.copy_gbps for each in ceilings), max(reads, default=None)


def _gbps(call: Callable[[], object], moved: int) -> float:
    for _ in range(CALLS):
        call()
    ms = []
    for _ in range(SAMPLES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        ms.append(start.elapsed_time(end) / CALLS)
    return moved / median(ms) / 1e6


def _reader(source: Tensor) -> Callable[[], object]:
    """A call that reads all of `source`, by a persistent grid."""
    kernel = _read_kernel()
    programs = 8 * torch.cuda.get_device_properties(source.device).multi_processor_count
    sums = torch.empty(programs, dtype=torch.int32, device=source.device)
    return lambda: kernel[(programs,)](source, sums, source.numel(), BLOCK, num_warps=8)


@lru_cache(maxsize=1)
def _read_kernel() -> Any:
    from tileattn.bench.decode.read_kernel import read

    return read
