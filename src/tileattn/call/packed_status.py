"""What was wrong with packed calls on a GPU, told later, so that nobody waits for the device.

The kernel that plans a packed call reads `cu_seqlens` on the device, leaves out what is wrong, so that nothing outside
of the tensors is touched, and says so in the device's *status*: int32 (4,), zeros as long as all is well. Each field
names one sequence, its number plus 1, of which it holds that (any of them, where there are several: plain stores do)

    status[0]   cu_seqlens_q does not start at 0 there, decreases, or goes beyond total_q
    status[1]   the same of cu_seqlens_k and total_k
    status[2]   its length in q is larger than max_seqlen_q
    status[3]   the same in k

A kernel writes what is wrong and nothing else, so that one status serves all calls, those of replayed CUDA graphs as
well. Who launches it calls :func:`raise_pending` at the start of a packed call and :func:`report` at its end, which
starts a copy to the host unless one is under way: a copy for each call would cost more than the planning. So it is the
next call that raises, or a later one, as soon as a copy has come to the host; :func:`check_packed` waits.
"""

from __future__ import annotations

import threading

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
        self.values.copy_(status, non_blocking=True)
        self.event.record(torch.cuda.current_stream(status.device))

    def has_arrived(self) -> bool:
        return bool(self.event.query())


class _Status:
    """That of one device."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(len(_WRONG), dtype=torch.int32, device=device)
        self.copy: _Copy | None = None
        self.under_way = False

    def start_copy(self) -> None:
        if not self.under_way:
            self.copy = self.copy or _Copy()
            self.copy.start(self.tensor)
            self.under_way = True

    def take(self) -> ValueError | None:
        """What a copy says that has arrived."""
        if not self.under_way or self.copy is None or not self.copy.has_arrived():
            return None
        self.under_way = False
        return self._error(self.copy.values)

    def wait(self) -> ValueError | None:
        """What the status says when all calls so far have written theirs."""
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
        self.under_way = False
        return self._error(self.tensor)

    def _error(self, values: Tensor) -> ValueError | None:
        for sequence, text in zip(values.tolist(), _WRONG):
            if sequence:
                self.tensor.zero_()
                return ValueError(
                    f"{text}: an earlier call on packed sequences was wrong at sequence {sequence - 1}, and its "
                    f"results mean nothing (nothing outside of the tensors was touched)"
                )
        return None


_statuses: dict[torch.device, _Status] = {}
_lock = threading.Lock()


def status_of(device: torch.device) -> Tensor:
    """A device's status, int32 (4,), for a planning kernel to write to."""
    found = _statuses.get(device)
    if found is not None:
        return found.tensor
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph's memory must not serve other calls. Who warms up before a capture, as PyTorch asks, never comes here.
        return torch.zeros(len(_WRONG), dtype=torch.int32, device=device)
    with _lock:
        return _statuses.setdefault(device, _Status(device)).tensor


def report(device: torch.device) -> None:
    """Sends a device's status to the host, behind the work of the current stream; does not wait.

    Not while a CUDA graph is captured: what its replays write is found by calls outside, and by :func:`check_packed`.
    """
    if torch.cuda.is_current_stream_capturing() or device not in _statuses:
        return
    with _lock:
        _statuses[device].start_copy()


def raise_pending() -> None:
    """Raises ValueError if an earlier call is known to have been wrong; does not wait."""
    # A capture allows no questions about events.
    if not any(status.under_way for status in _statuses.values()) or torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        errors = [status.take() for status in _statuses.values()]
    _raise_first(errors)


def check_packed() -> None:
    """Waits until all packed calls so far have looked at their `cu_seqlens` on the GPU, and raises if one was wrong.

    :func:`tileattn.varlen_attention` does not wait for values on a GPU: without this function a later call on packed
    sequences raises.

    Raises:
        ValueError: the `cu_seqlens` of a call did not start at 0, decreased, or went beyond its tensor; or a length was
            larger than its `max_seqlen`. What was wrong with several calls since the last error is told once.
    """
    with _lock:
        errors = [status.wait() for status in _statuses.values()]
    _raise_first(errors)


def _raise_first(errors: list[ValueError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
