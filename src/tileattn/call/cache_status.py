"""Deferred errors of calls on caches on a GPU (:mod:`tileattn.call.deferred_status`): decode and append_kv.

Their kernels read `seqlens_k`, the page table and `cu_seqlens_q` on the device. They clamp or leave out what is wrong,
and store the sequence's number plus 1 in a field of the status, int32 (FIELDS,); cache_fields.py has the fields.
"""

from __future__ import annotations

from . import cache_fields as fields
from .deferred_status import DeferredStatus

_TEXTS = {
    fields.SEQLENS_K: "seqlens_k must be from 0 to the cache's capacity",
    fields.PAGE_TABLE: "page_table's entries for a sequence's keys must be from 0 to the number of pages - 1",
    fields.CU_SEQLENS_Q: "cu_seqlens_q must start at 0, must not decrease, and must not go beyond total_q",
    fields.MAX_SEQLEN_Q: "max_seqlen_q must be at least the longest length",
    fields.POSITIONS: "cos and sin must have a row for each position that is rotated",
}
# Calls on caches are short and many: a copy, some 10 us of the host and 2 us of the device, must not join each. The
# layers of a model call once in about a millisecond.
STATUS = DeferredStatus([_TEXTS[field] for field in range(fields.FIELDS)], "caches", pause=1e-2)
status_of, report, raise_pending = STATUS.of, STATUS.report, STATUS.raise_pending


def check_caches() -> None:
    """Waits until the GPU has checked the lengths and page tables of all calls on caches so far; raises on an error.

    :func:`tileattn.append_kv` and calls that read caches do not wait for values on a GPU. Without check_caches, a later
    call on caches raises the error.

    Raises:
        ValueError: a call's `seqlens_k` was negative or beyond the cache, an entry of its `page_table` that a
            sequence's keys reach was no page, its `cu_seqlens_q` did not start at 0, decreased or went beyond the
            tensor, a length was larger than `max_seqlen_q`, or `cos` and `sin` had no row for a position. Errors of
            several calls since the last ValueError are raised as one.
    """
    STATUS.check()
