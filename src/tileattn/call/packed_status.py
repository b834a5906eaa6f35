"""Deferred errors of packed calls on a GPU; they avoid a host-device synchronisation.

The kernel that plans a packed call reads `cu_seqlens` on the device. It leaves out what is wrong, so that nothing
outside of the tensors is touched, and records the error in the device's *status*: int32 (4,), zeros while there is no
error. A nonzero field holds the number of a wrong sequence, plus 1. If several sequences are wrong, it is any of them,
because plain stores write the field.

    status[0]   cu_seqlens_q does not start at 0, decreases, or goes beyond total_q at this sequence
    status[1]   the same for cu_seqlens_k and total_k
    status[2]   the sequence's length in q is larger than max_seqlen_q
    status[3]   the same in k

A kernel writes to the status only if there is an error, so one status serves all calls, including those of replayed
CUDA graphs. The launcher calls :func:`raise_pending` at the start of a packed call and :func:`report` at its end.
:func:`report` starts a copy of the status to the host, unless one is under way; a copy for each call would cost more
than the planning. An error is therefore raised by the first later call that finds a finished copy. :func:`check_packed`
waits instead.
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
    """An asynchronous copy of a status to the host: pinned memory, and an event recorded after the copy."""

    def __init__(self) -> None:
        self.values = torch.empty(len(_WRONG), dtype=torch.int32, pin_memory=True)
        self.event = torch.cuda.Event()

    def start(self, status: Tensor) -> None:
        self.values.copy_(status, non_blocking=True)
        self.event.record(torch.cuda.current_stream(status.device))

    def has_arrived(self) -> bool:
        return bool(self.event.query())


class _Status:
    """The status of one device."""

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
        """The error in a copy that has arrived, or None."""
        if not self.under_way or self.copy is None or not self.copy.has_arrived():
            return None
        self.under_way = False
        return self._error(self.copy.values)

    def wait(self) -> ValueError | None:
        """The error in the status after all calls so far have finished, or None. Waits for the device."""
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
    """A device's status, int32 (4,), which a planning kernel writes to."""
    status = _statuses.get(device)
    if status is not None:
        return status.tensor
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph's memory must not serve other calls. After a warm-up before the capture, as PyTorch asks for, the
        # status exists, and this line is not reached.
        return torch.zeros(len(_WRONG), dtype=torch.int32, device=device)
    with _lock:
        return _statuses.setdefault(device, _Status(device)).tensor


def report(device: torch.device) -> None:
    """Starts a copy of a device's status to the host, on the current stream, without waiting for it.

    Does nothing during the capture of a CUDA graph. Calls outside of the graph and :func:`check_packed` report errors
    of its replays.
    """
    if torch.cuda.is_current_stream_capturing() or device not in _statuses:
        return
    with _lock:
        _statuses[device].start_copy()


def raise_pending() -> None:
    """Raises ValueError if the error of an earlier call has arrived on the host; does not wait."""
    # Events cannot be queried during a capture.
    if not any(status.under_way for status in _statuses.values()) or torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        errors = [status.take() for status in _statuses.values()]
    _raise_first(errors)


def check_packed() -> None:
    """Waits until the GPU has checked the `cu_seqlens` of all packed calls so far, and raises if one was wrong.

    :func:`tileattn.varlen_attention` does not wait for values on a GPU. Without check_packed, a later call on packed
    sequences raises the error.

    Raises:
        ValueError: the `cu_seqlens` of a call did not start at 0, decreased, or went beyond its tensor; or a length was
            larger than its `max_seqlen`. Errors of several calls since the last ValueError are raised as one.
    """
    with _lock:
        errors = [status.wait() for status in _statuses.values()]
    _raise_first(errors)


def _raise_first(errors: list[ValueError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
