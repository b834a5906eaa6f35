"""The kernel that adds up the shares' parts of dk and dv, in their order, and rounds the sums.

No atomic operation: each element has one thread, which adds the parts of share 0, 1, .. to 0. A thread has eight
elements side by side, of dk or of dv: it loads 32 bytes of each part and stores 16 of the sum.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
import torch
from tilelang.language.eager.builder import Builder

from ...build.compile import OWN_BOUNDS

THREADS = 256
ELEMENTS = 8  # of a thread; head dims are multiples of it
LOADED = 4  # elements of float32 in one load


@T.macro
def add_elements(parts, gradient, first, b, number):
    """A thread's elements of a gradient, by their number among those of a batch element's keys that have parts."""
    if number < elements_of(parts):
        row = T.alloc_var("int32", init=T.truncdiv(number, parts.shape[3]))
        column = T.alloc_var("int32", init=T.truncmod(number, parts.shape[3]))
        # [ELEMENTS]
        total, part = T.alloc_local([ELEMENTS], "float32"), T.alloc_local([ELEMENTS], "float32")
        for c in T.unroll(ELEMENTS):
            total[c] = 0.0
        # gradient = sum of its parts
        for share in T.serial(parts.shape[2]):
            for load in T.unroll(ELEMENTS // LOADED):
                for c in T.vectorized(LOADED):
                    part[load * LOADED + c] = parts[b, row, share, column, load * LOADED + c]
            for c in T.unroll(ELEMENTS):
                total[c] += part[c]
        for c in T.vectorized(ELEMENTS):
            gradient[b, first + row, column, c] = total[c]


def elements_of(parts: Any) -> Any:
    """The elements of a batch element's gradient that have parts, in vectors of ``ELEMENTS``."""
    return parts.shape[1] * parts.shape[3]


def blocks_of(parts: Any) -> Any:
    """The number of blocks that have elements of a batch element's gradient."""
    return T.ceildiv(elements_of(parts), THREADS)


@T.macro
def add(arg):
    with T.Kernel(blocks_of(arg.dk_parts) + blocks_of(arg.dv_parts), arg.batch, threads=THREADS) as (block, b):
        thread = T.get_thread_binding()
        if block < blocks_of(arg.dk_parts):
            add_elements(arg.dk_parts, arg.dk, arg.first, b, block * THREADS + thread)
        else:
            add_elements(arg.dv_parts, arg.dv, arg.first, b, (block - blocks_of(arg.dk_parts)) * THREADS + thread)


def add_kernel(dtype: torch.dtype) -> Any:
    """The function ``add(dk_parts, dv_parts, dk, dv, first)``, of parts (batch, rows, shares, columns / 8, 8).

    Rows are the keys from the first of them on, and columns those of all kv heads. dk and dv, (batch, all keys,
    columns / 8, 8), are contiguous.
    """
    builder = Builder()
    with builder.prim_func("add"):
        batch, rows, shares, all_rows = (T.dynamic(name) for name in ("batch", "rows", "shares", "all_rows"))
        columns = {name: T.dynamic(f"{name}_columns") for name in ("dk", "dv")}
        arg = SimpleNamespace(batch=batch)
        for name in columns:
            shape = [batch, rows, shares, columns[name], ELEMENTS]
            setattr(arg, f"{name}_parts", builder.prim_func_arg(f"{name}_parts", T.Tensor(shape, "float32")))
        for name in columns:
            kind = str(dtype).removeprefix("torch.")
            shape = [batch, all_rows, columns[name], ELEMENTS]
            setattr(arg, name, builder.prim_func_arg(name, T.Tensor(shape, kind)))
        arg.first = builder.prim_func_arg("first", T.int32())
        add(arg)
    return builder.get().with_attr(OWN_BOUNDS, True)
