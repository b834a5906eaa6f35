"""Times of a call: samples in milliseconds, of which the caller takes the median.

CUDA: each call runs between two events on the stream. The L2 cache is overwritten before it, so that no call reads its
inputs from there. Overwriting takes tens of microseconds, which hides the host's launch time. A longer time of the
host, such as autograd's in a backward pass, is hidden as long as overwriting and call together take the GPU longer: the
host is then several calls ahead. This is the method of `triton.testing.do_bench`, written out so that the benchmark
needs no Triton.

CPU: the wall clock around each call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor

# Larger than any GPU's L2 (H200: 50 MB; B200: 126 MB; MI300X's Infinity Cache: 256 MB).
FLUSH_BYTES = 256 * 2**20
# Of a round, where `min_calls` does not ask for more: a median of millions of calls of nanoseconds says nothing more.
MOST_CALLS = 10_000


@dataclass(frozen=True)
class Effort:
    """Milliseconds of calls per implementation and round; rounds alternate between the implementations of a case."""

    warmup_ms: float = 20.0
    measure_ms: float = 40.0
    rounds: int = 5
    min_calls: int = 1

    def __post_init__(self) -> None:
        for name in ("warmup_ms", "measure_ms"):
            ms = getattr(self, name)
            if not isinstance(ms, (int, float)) or not 0 <= ms < math.inf:
                raise ValueError(f"Effort: {name} must be a finite number of 0 or more, got {ms!r}")
        for name in ("rounds", "min_calls"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"Effort: {name} must be an integer of at least 1, got {count!r}")


DEFAULT = Effort()


def sample_ms(call: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    """Milliseconds of the calls of one round. The call must have run before, so that nothing compiles here."""
    return _sample_cuda(call, device, effort) if device.type == "cuda" else _sample_cpu(call, effort)


def time_calls(call: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Milliseconds of the given number of calls, without an estimate or warm-up before them."""
    if device.type == "cuda":
        return _timed_cuda(call, _flush_buffer(device), calls)
    return [_timed_cpu(call) for _ in range(calls)]


def release() -> None:
    """Frees the memory with which the L2 cache is overwritten."""
    _flush_buffer.cache_clear()


@lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def _sample_cuda(call: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    flush = _flush_buffer(device)
    estimate = max(1e-3, median(_timed_cuda(call, flush, 3)))
    _timed_cuda(call, flush, min(MOST_CALLS, int(effort.warmup_ms / estimate)))
    return _timed_cuda(call, flush, max(effort.min_calls, min(MOST_CALLS, int(effort.measure_ms / estimate))))


def _timed_cuda(call: Callable[[], object], flush: Tensor, calls: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(flush.device)
    return [start.elapsed_time(end) for start, end in events]


def _sample_cpu(call: Callable[[], object], effort: Effort) -> list[float]:
    # Once, so that the caches hold this call's tensors and not those of the implementation before it.
    _timed_cpu(call)
    samples: list[float] = []
    # What the loop itself takes counts too: it is most of the time where a call takes nanoseconds.
    end = time.perf_counter() + effort.measure_ms / 1e3
    while len(samples) < effort.min_calls or (len(samples) < MOST_CALLS and time.perf_counter() < end):
        samples.append(_timed_cpu(call))
    return samples


def _timed_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
