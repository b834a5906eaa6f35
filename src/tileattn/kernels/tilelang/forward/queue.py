"""The queue from which a persistent kernel's blocks draw their tiles: one counter in device memory."""

from __future__ import annotations

import functools

import torch

_tickets: dict[tuple[int, int], torch.Tensor] = {}


def tickets(device: torch.device) -> torch.Tensor:
    """A counter (1,), int32, at 0 when the kernel that is launched next on the current stream begins.

    A kernel leaves it at 0, and kernels on one stream follow each other, so that each stream needs only one. A CUDA
    graph may be replayed on any stream: it gets a counter of its own, which it sets to 0 itself at each replay.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = index, torch._C._cuda_getCurrentRawStream(index)
    found = _tickets.get(key)
    if found is None:
        # setdefault: two threads that come first at the same time must not get two counters, one half used.
        found = _tickets.setdefault(key, torch.zeros(1, dtype=torch.int32, device=device))
    return found


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks run at the same time where each takes a whole multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
