"""The keys of a decode call's jobs (records.py), as the planning kernel and the attention kernels compute them."""

from __future__ import annotations

from types import SimpleNamespace

import tilelang.language as T

from ..tile.expressions import Emitter
from ..tile.mask import Visibility
from .ranges import names_in_range


@T.macro
def keys_of_rows(traced, operands, block_N, b, row0, rows, group, q_len, seqlen):
    """The keys that packed rows row0 .. row0 + rows of a sequence may see; see :func:`keys_of_queries`."""
    q_lo = seqlen - q_len + T.truncdiv(row0, group)
    q_hi = seqlen - q_len + T.truncdiv(row0 + rows - 1, group)
    return keys_of_queries(traced, operands, block_N, b, q_lo, q_hi, seqlen)


@T.macro
def keys_of_queries(traced, operands, block_N, b, first_query, last_query, seqlen):
    """The keys [kv_lo, kv_hi) that the queries at these positions may see, and their tiles [first, end).

    There may be no tiles, never fewer.
    """
    q_lo = T.alloc_var("int32", init=first_query)
    q_hi = T.alloc_var("int32", init=last_query)
    kv_lo = T.alloc_var("int32", init=0)
    kv_hi = T.alloc_var("int32", init=seqlen)
    if len(names_in_range(traced)) > 0:
        lo, hi = Visibility(traced, Emitter(operands, clamps=True), seqlen).kv_range(b, 0, q_lo, q_hi)
        kv_lo = T.min(lo, seqlen)
        kv_hi = T.max(hi, kv_lo)
    first = T.alloc_var("int32", init=T.truncdiv(kv_lo, block_N))
    end = T.alloc_var("int32", init=first)
    if kv_hi > kv_lo:
        end = T.truncdiv(kv_hi + (block_N - 1), block_N)
    return SimpleNamespace(q_lo=q_lo, q_hi=q_hi, kv_lo=kv_lo, kv_hi=kv_hi, first=first, end=end)
