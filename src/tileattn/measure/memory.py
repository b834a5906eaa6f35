"""Peak memory of a call: the largest number of bytes allocated at one time above the level before, with outputs.

CUDA: the caching allocator's own peak (`torch.cuda.max_memory_allocated`) above its level before the call; what other
libraries take from the driver directly is not seen. CPU: PyTorch's profiler reports every allocation and release of
PyTorch's CPU allocator, internal buffers of fused operators included; the peak is that of their running sum. Scratch
memory that a math library (oneDNN, MKL) takes for itself is not seen.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from itertools import accumulate

import torch


def total_bytes(device: torch.device) -> int:
    """Total memory of a device, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of one call. It must have run before, so that lazily created workspaces are not counted."""
    return _peak_cuda(call, device) if device.type == "cuda" else _peak_cpu(call)


def _peak_cuda(call: Callable[[], object], device: torch.device) -> int:
    gc.collect()  # what is garbage already must not be freed in between, and make the call's own bytes seem fewer
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu(call: Callable[[], object]) -> int:
    # Kineto, the profiler's backend, otherwise writes lines to stderr; it reads this when it is first used.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    recorded = profile.kineto_results
    assert recorded is not None
    changes = [(event.start_ns(), event.nbytes()) for event in recorded.events() if event.name() == "[memory]"]
    return max(accumulate(bytes_ for _, bytes_ in sorted(changes)), default=0)
