"""What was wrong with packed calls on a GPU, told later, so that nobody waits for the device.

The kernel that plans a packed call reads `cu_seqlens` on the device, clamps what is wrong, so that nothing outside of
the tensors is touched, and writes a *status*: int32 (4,), zeros where all is well. Each field names one sequence, its
number plus 1, of which it holds that (any of them, where there are several: plain stores do)

    status[0]   cu_seqlens_q does not start at 0 there, decreases, or goes beyond total_q
    status[1]   the same of cu_seqlens_k and total_k
    status[2]   its length in q is larger than max_seqlen_q
    status[3]   the same in k

Who launches that kernel calls :func:`report` behind it, and :func:`raise_pending` at the start of each packed call. So
it is the next call that raises, or the one after it, as soon as the status has come to the host; :func:`check_packed`
waits for it.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

_WRONG = (
    "cu_seqlens_q must start at 0, must not decrease, and must not go beyond total_q",
    "cu_seqlens_k must start at 0, must not decrease, and must not go beyond total_k",
    "max_seqlen_q must be at least the longest length",
    "max_seqlen_k must be at least the longest length",
)


class _Copy:
    """A status on its way to the host: pinned memory, and an event behind the copy."""

    def __init__(self) -> None:
        self.values = torch.empty(len(_WRONG), dtype=torch.int32, pin_memory=True)
        self.event = torch.cuda.Event()

    def start(self, status: Tensor) -> None:
        self.device = status.device
        self.values.copy_(status, non_blocking=True)
        self.event.record(torch.cuda.current_stream(status.device))

    def has_arrived(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def error(self) -> ValueError | None:
        """What the status says; it must have arrived."""
        for sequence, text in zip(self.values.tolist(), _WRONG):
            if sequence:
                return ValueError(
                    f"{text}: an earlier call on packed sequences was wrong at sequence {sequence - 1}, and its "
                    f"results mean nothing (lengths were cut, so that nothing outside of the tensors was touched)"
                )
        return None


class _Reports:
    """Copies that are under way, in the order of their calls, and those that may be used again, by device."""

    def __init__(self) -> None:
        self.pending: deque[_Copy] = deque()
        self.free: dict[torch.device, list[_Copy]] = {}
        self.lock = threading.Lock()

    def add(self, status: Tensor) -> None:
        with self.lock:
            free = self.free.setdefault(status.device, [])
            copy = free.pop() if free else _Copy()
            copy.start(status)
            self.pending.append(copy)

    def take(self, wait: bool) -> list[ValueError]:
        """The errors of those that have arrived: the first, or, after waiting for all, each."""
        found: list[ValueError] = []
        with self.lock:
            while self.pending and (wait or (not found and self.pending[0].has_arrived())):
                copy = self.pending.popleft()
                if wait:
                    copy.wait()
                error = copy.error()
                self.free[copy.device].append(copy)
                if error is not None:
                    found.append(error)
        return found


_reports = _Reports()


def report(status: Tensor) -> None:
    """Sends a status to the host, behind the work of the current stream; does not wait.

    Not while a CUDA graph is captured: its launches are not watched.
    """
    if not torch.cuda.is_current_stream_capturing():
        _reports.add(status)


def raise_pending() -> None:
    """Raises ValueError if an earlier call is known to have been wrong; does not wait."""
    # A capture allows no questions about events.
    if _reports.pending and not torch.cuda.is_current_stream_capturing():
        for error in _reports.take(wait=False):
            raise error


def check_packed() -> None:
    """Waits until all packed calls so far have looked at their `cu_seqlens` on the GPU, and raises if one was wrong.

    :func:`tileattn.varlen_attention` does not wait for values on a GPU: without this function the next call on packed
    sequences raises. Calls inside a captured CUDA graph are not watched.

    Raises:
        ValueError: the `cu_seqlens` of a call did not start at 0, decreased, or went beyond its tensor; or a length was
            larger than its `max_seqlen`. That of the first such call, and the later ones are forgotten.
    """
    for error in _reports.take(wait=True):
        raise error
