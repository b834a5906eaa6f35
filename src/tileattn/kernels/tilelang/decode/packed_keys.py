"""The kernel that finds each sequence's keys among packed ones, for decode kernels: its first key and their number.

One block. It also checks the cumulative lengths of the queries and keys, and copies those of the queries. If any is
wrong, all that it writes is 0, so that all rows of q are unused ones, and a status says what is wrong
(call/packed_status.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ..packed.dependent_launch import let_next_start
from .records import KEYS_BOUND, KEYS_FIELDS, KEYS_LENGTH, KEYS_START

THREADS = 256
FIELDS = 4  # of packed_status: the bounds of the queries, of the keys, then the longest of both
SIZES = ("total_q", "total_k", "max_seqlen_q", "max_seqlen_k")


def packed_keys_kernel(arch: str) -> Any:
    """The TileLang function ``packed_keys(cu_seqlens_q, cu_seqlens_k, found, status, *SIZES)``

    ``cu_seqlens_q``, ``cu_seqlens_k``: int32 (sequences + 1,). ``found``: int32 (KEYS_FIELDS, at least sequences + 1),
    as records.py describes. ``status``: the device's, int32 (4,).
    """
    builder = Builder()
    with builder.prim_func("packed_keys"):
        bounds = T.dynamic("bounds")
        q, k = (builder.prim_func_arg(name, T.Tensor([bounds], "int32")) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        found = builder.prim_func_arg("found", T.Tensor([KEYS_FIELDS, T.dynamic("columns")], "int32"))
        status = builder.prim_func_arg("status", T.Tensor([FIELDS], "int32"))
        sizes = {name: builder.prim_func_arg(name, T.int32()) for name in SIZES}
        _kernel(SimpleNamespace(arch=arch, bounds=bounds, q=q, k=k, found=found, status=status, **sizes))
    return builder.get()


@T.macro
def _kernel(arg):
    with T.Kernel(1, threads=THREADS):
        let_next_start(arg.arch)
        thread = T.get_thread_binding()
        sequences = arg.bounds - 1
        wrong = T.alloc_var("int32", init=0)
        for step in T.serial(T.ceildiv(sequences, THREADS)):
            b = step * THREADS + thread
            if b < sequences:
                checked = [
                    _is_wrong(arg.q, b, sequences, arg.total_q),
                    _is_wrong(arg.k, b, sequences, arg.total_k),
                    arg.q[b + 1] - arg.q[b] > arg.max_seqlen_q,
                    arg.k[b + 1] - arg.k[b] > arg.max_seqlen_k,
                ]
                for field, condition in enumerate(checked):
                    if condition:
                        arg.status[field] = b + 1
                        wrong = 1
        wrong = T.syncthreads_or(wrong)
        for step in T.serial(T.ceildiv(arg.bounds, THREADS)):
            b = step * THREADS + thread
            if b < arg.bounds:
                arg.found[KEYS_BOUND, b] = T.if_then_else(wrong != 0, 0, arg.q[b])
                arg.found[KEYS_START, b] = T.if_then_else(wrong != 0, 0, arg.k[b])
                length = arg.k[T.min(b + 1, sequences)] - arg.k[b]
                arg.found[KEYS_LENGTH, b] = T.if_then_else(wrong != 0, 0, length)


def _is_wrong(bounds: Any, b: Any, sequences: Any, total: Any) -> Any:
    start, end = bounds[b], bounds[b + 1]
    return ((b == 0) & (start != 0)) | (end < start) | ((b == sequences - 1) & (end > total))
