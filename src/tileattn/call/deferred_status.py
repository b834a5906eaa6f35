"""Errors that kernels find on a GPU and the host raises later; this avoids a host-device synchronisation.

Some arguments are right or wrong by values that only the device knows, such as cumulative lengths or a page table. A
kernel that finds a wrong value leaves it out, so that nothing outside of the tensors is touched, and records the error
in the device's *status*: an int32 tensor, zeros while there is no error, with one field for each kind of error. A
nonzero field holds the number of a wrong sequence, plus 1. If several sequences are wrong, it is any of them, because
plain stores write the field.

A kernel writes to the status only if there is an error, so one status serves all calls of its kind, including those of
replayed CUDA graphs. The launcher calls :meth:`DeferredStatus.raise_pending` at the start of a call and
:meth:`DeferredStatus.report` at its end. :meth:`~DeferredStatus.report` starts a copy of the status to the host, unless
one is under way or began less than the kind's `pause` ago: a copy for each call would cost more than a short kernel. An
error is therefore raised by the first later call that finds a finished copy. :meth:`DeferredStatus.check` waits
instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .graph_memory import made_outside


class Copy:
    """An asynchronous copy of a status to the host: pinned memory, and an event recorded after the copy."""

    def __init__(self, fields: int) -> None:
        with torch.inference_mode(False):  # else no call outside of inference mode could write to it
            self.values = torch.empty(fields, dtype=torch.int32, pin_memory=True)
        self.event = torch.cuda.Event()

    def start(self, status: Tensor) -> None:
        """Copies on the current stream."""
        self.values.copy_(status, non_blocking=True)
        self.mark(status)

    def mark(self, status: Tensor) -> None:
        """Records the event on the current stream."""
        self.event.record(torch.cuda.current_stream(status.device))

    def has_arrived(self) -> bool:
        """Whether all before the event has ended, such as the copy that was started last; does not wait."""
        return bool(self.event.query())


class DeferredStatus:
    """The errors of one kind of call, on all devices.

    Args:
        texts: what each field says is wrong: the argument and what it must be.
        calls: the kind of call, as in "an earlier call on packed sequences".
        pause: seconds from the start of a copy before which no other copy is started.
    """

    def __init__(self, texts: Sequence[str], calls: str, pause: float = 0.0) -> None:
        self.texts, self.calls, self.pause = tuple(texts), calls, pause
        self.devices: dict[torch.device, _OfDevice] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> Tensor:
        """A device's status, int32 (fields,), which kernels write to."""
        found = self.devices.get(device)
        if found is not None:
            return found.tensor
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A graph's memory must not serve other calls. After a warm-up before the capture, as PyTorch asks for, the
            # status exists, and this line is not reached.
            return torch.zeros(len(self.texts), dtype=torch.int32, device=device)
        with self._lock:
            if device not in self.devices:
                self.devices[device] = made_outside(lambda: _OfDevice(self, device), device)
            return self.devices[device].tensor

    def report(self, device: torch.device) -> None:
        """Starts a copy of a device's status to the host, on the current stream, without waiting for it.

        Does nothing during the capture of a CUDA graph. Errors of its replays are found by calls outside of the graph
        and by :meth:`check`.
        """
        found = self.devices.get(device)
        if found is None or not found.may_start() or torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            found.start_copy()

    def raise_pending(self) -> None:
        """Raises ValueError if the error of an earlier call has arrived on the host; does not wait."""
        # Events cannot be queried during a capture.
        if (
            True not in [of.under_way for of in tuple(self.devices.values())]
            or torch.cuda.is_current_stream_capturing()
        ):
            return
        with self._lock:
            errors = [of.take() for of in self.devices.values()]
        _raise_first(errors)

    def check(self) -> None:
        """Waits until all calls so far have finished, and raises ValueError if one recorded an error."""
        with self._lock:
            errors = [of.wait() for of in self.devices.values()]
        _raise_first(errors)


class _OfDevice:
    """The status of one device."""

    def __init__(self, kind: DeferredStatus, device: torch.device) -> None:
        self.kind = kind
        with torch.inference_mode(False):  # else no call outside of inference mode could clear it
            self.tensor = torch.zeros(len(kind.texts), dtype=torch.int32, device=device)
        self.copy = Copy(len(kind.texts)) if device.type == "cuda" else None
        self.under_way = False
        self.clears = False  # whether zeros may not be there yet for a copy on another stream than theirs
        self.next_start = 0.0
        self._mark_zeros()

    def _mark_zeros(self) -> None:
        """Lets no copy start before the zeros are there that the current stream has been given."""
        if self.copy is not None:
            self.copy.mark(self.tensor)
            self.clears = True

    def may_start(self) -> bool:
        """Whether no copy is under way, and the last one was started long enough ago."""
        return not self.under_way and (not self.kind.pause or time.monotonic() >= self.next_start)

    def start_copy(self) -> None:
        if not self.may_start():
            return
        self.copy = self.copy or Copy(len(self.kind.texts))
        if self.clears and not self.copy.has_arrived():
            return  # a copy could have what was in this memory before, or an error that has been raised
        self.clears = False
        self.copy.start(self.tensor)
        self.under_way = True
        self.next_start = time.monotonic() + self.kind.pause

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
        self.under_way, self.next_start = False, 0.0
        return self._error(self.tensor)

    def _error(self, values: Tensor) -> ValueError | None:
        for sequence, text in zip(values.tolist(), self.kind.texts):
            if sequence:
                self.tensor.zero_()
                self._mark_zeros()
                return ValueError(
                    f"{text}: an earlier call on {self.kind.calls} was wrong at sequence {sequence - 1}, and its "
                    f"results mean nothing (nothing outside of the tensors was touched)"
                )
        return None


def _raise_first(errors: list[ValueError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
