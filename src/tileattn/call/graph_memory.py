"""Whether memory that is allocated now belongs to CUDA graphs, so that no later call may use it.

torch.compile(mode="reduce-overhead") runs a function once before it captures it, on its graphs' stream and in their
memory. PyTorch raises if a tensor of that run is still there when it ends and is none of its outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

TREES = "torch._inductor.cudagraph_trees"
T = TypeVar("T")


def is_of_a_graph(device: torch.device) -> bool:
    """Whether the current stream of a GPU is captured, or runs a function for torch.compile before it is captured."""
    return torch.cuda.is_current_stream_capturing() or warms_up(device)


def warms_up(device: torch.device) -> bool:
    """Whether the current stream is the one of torch.compile's graphs."""
    trees = sys.modules.get(TREES)  # without it there are no such graphs
    if trees is None:
        return False
    stream = torch.cuda.current_stream(device)
    manager = trees.get_manager(stream.device_index, create_if_none_exists=False)
    return manager is not None and bool(stream.cuda_stream == manager.stream.cuda_stream)


def made_outside(make: Callable[[], T], device: torch.device) -> T:
    """What `make` returns, whose tensors later calls may use, also where `warms_up`: the host then waits for them."""
    if not warms_up(device):
        return make()

    def on_the_default_stream() -> T:
        made = make()
        torch.cuda.default_stream(device).synchronize()
        return made

    with ThreadPoolExecutor(1) as other:  # graphs take the memory that their own thread allocates
        return other.submit(on_the_default_stream).result()
