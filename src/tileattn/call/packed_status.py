"""Deferred errors of packed calls on a GPU (:mod:`tileattn.call.deferred_status`).

The kernel that plans a packed call reads `cu_seqlens` on the device, and records errors in the status, int32 (4,):

    status[0]   cu_seqlens_q does not start at 0, decreases, or goes beyond total_q at this sequence
    status[1]   the same for cu_seqlens_k and total_k
    status[2]   the sequence's length in q is larger than max_seqlen_q
    status[3]   the same in k
"""

from __future__ import annotations

from .deferred_status import DeferredStatus

# A copy takes the host as long as the rest of a call does, and must not join each of them.
STATUS = DeferredStatus(
    (
        "cu_seqlens_q must start at 0, must not decrease, and must not go beyond total_q",
        "cu_seqlens_k must start at 0, must not decrease, and must not go beyond total_k",
        "max_seqlen_q must be at least the longest length",
        "max_seqlen_k must be at least the longest length",
    ),
    "packed sequences",
    pause=1e-2,
)
status_of, report, raise_pending = STATUS.of, STATUS.report, STATUS.raise_pending


def check_packed() -> None:
    """Waits until the GPU has checked the `cu_seqlens` of all packed calls so far, and raises if one was wrong.

    :func:`tileattn.varlen_attention` does not wait for values on a GPU. Without check_packed, a later call on packed
    sequences raises the error.

    Raises:
        ValueError: the `cu_seqlens` of a call did not start at 0, decreased, or went beyond its tensor; or a length was
            larger than its `max_seqlen`. Errors of several calls since the last ValueError are raised as one.
    """
    STATUS.check()
