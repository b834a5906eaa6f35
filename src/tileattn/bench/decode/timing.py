"""Time of a decode call.

CUDA: calls on distinct caches, captured one after the other in one CUDA graph, as a server replays a step of all
layers. So no host time is in it, no call finds its K and V in the L2 cache, and all that a call launches (a plan, a
combination of parts) is in it. A sample is a replay's time between two events over the number of calls. Another replay
runs right before, so that the GPU does not wait for the host's launch between the events.

CPU: the wall clock around the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
# A graph has so many calls, or as many as read so many bytes: a millisecond at least, beside which events cost nothing.
FEWEST_CALLS, FEWEST_BYTES = 64, 2**32
WARM_CALLS = 3


def sampler(calls: Sequence[Call], call_bytes: int, device: torch.device) -> Callable[[], float]:
    """A function that runs all calls, one for each cache, and returns microseconds per call, of `call_bytes` each."""
    return _captured(calls, call_bytes) if device.type == "cuda" else _on_cpu(calls)


def captured(calls: Sequence[Call], call_bytes: int) -> list[Call]:
    """The calls of one graph: all of them, as often as needed for a time that events can measure."""
    fewest = min(FEWEST_CALLS, -(-FEWEST_BYTES // call_bytes))
    return list(calls) * -(-fewest // len(calls))


def _captured(calls: Sequence[Call], call_bytes: int) -> Callable[[], float]:
    todo = captured(calls, call_bytes)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in todo[:WARM_CALLS]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in todo:
            call()
    graph.replay()
    torch.cuda.synchronize()

    def sample() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(todo)

    return sample


def _on_cpu(calls: Sequence[Call]) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e6 / len(calls)

    return sample
