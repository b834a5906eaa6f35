"""The queue from which a persistent kernel's blocks draw their tiles: one counter in device memory."""

from __future__ import annotations

import functools

import torch

from ....call.graph_memory import warms_up

_tickets: dict[tuple[int, int], torch.Tensor] = {}


def tickets(device: torch.device) -> torch.Tensor:
    """A counter (1,), int32, at 0 when the kernel that is launched next on the current stream begins.

    A kernel leaves it at 0, and kernels on one stream follow each other, so that each stream needs only one. A CUDA
    graph may be replayed on any stream: it gets a counter of its own, which it sets to 0 itself at each replay. So
    does a call in the memory of graphs, which must not be kept.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = index, torch._C._cuda_getCurrentRawStream(index)
    counter = _tickets.get(key)
    if counter is None:
        if warms_up(device):
            return torch.zeros(1, dtype=torch.int32, device=device)
        # setdefault: two threads that come first at the same time must not get two counters, one half used.
        counter = _tickets.setdefault(key, torch.zeros(1, dtype=torch.int32, device=device))
    return counter


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors: of blocks that run at once if each takes a whole one."""
    return torch.cuda.get_device_properties(device).multi_processor_count
