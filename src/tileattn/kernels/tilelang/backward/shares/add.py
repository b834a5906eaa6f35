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
def add_elements(parts, gradient, number):
    """A thread's elements of a gradient, by their number among those of all threads."""
    if number < gradient.shape[0] * gradient.shape[1]:
        row = T.alloc_var("int32", init=T.truncdiv(number, gradient.shape[1]))
        column = T.alloc_var("int32", init=T.truncmod(number, gradient.shape[1]))
        # [ELEMENTS]
        total, part = T.alloc_local([ELEMENTS], "float32"), T.alloc_local([ELEMENTS], "float32")
        for c in T.unroll(ELEMENTS):
            total[c] = 0.0
        # gradient = sum of its parts
        for share in T.serial(parts.shape[1]):
            for load in T.unroll(ELEMENTS // LOADED):
                for c in T.vectorized(LOADED):
                    part[load * LOADED + c] = parts[row, share, column, load * LOADED + c]
            for c in T.unroll(ELEMENTS):
                total[c] += part[c]
        for c in T.vectorized(ELEMENTS):
            gradient[row, column, c] = total[c]


def blocks_of(gradient: Any) -> Any:
    """The number of blocks that have elements of a gradient."""
    return T.ceildiv(gradient.shape[0] * gradient.shape[1], THREADS)


@T.macro
def add(arg):
    with T.Kernel(blocks_of(arg.dk) + blocks_of(arg.dv), threads=THREADS) as block:
        thread = T.get_thread_binding()
        if block < blocks_of(arg.dk):
            add_elements(arg.dk_parts, arg.dk, block * THREADS + thread)
        else:
            add_elements(arg.dv_parts, arg.dv, (block - blocks_of(arg.dk)) * THREADS + thread)


def add_kernel(dtype: torch.dtype) -> Any:
    """The function ``add(dk_parts, dv_parts, dk, dv)``, of parts (rows, shares, columns / 8, 8).

    Rows are those of all batch elements' keys, and columns those of all kv heads.
    """
    builder = Builder()
    with builder.prim_func("add"):
        rows, shares = T.dynamic("rows"), T.dynamic("shares")
        columns = {name: T.dynamic(f"{name}_columns") for name in ("dk", "dv")}
        arg = SimpleNamespace()
        for name in columns:
            shape = [rows, shares, columns[name], ELEMENTS]
            setattr(arg, f"{name}_parts", builder.prim_func_arg(f"{name}_parts", T.Tensor(shape, "float32")))
        for name in columns:
            kind = str(dtype).removeprefix("torch.")
            setattr(arg, name, builder.prim_func_arg(name, T.Tensor([rows, columns[name], ELEMENTS], kind)))
        add(arg)
    return builder.get().with_attr(OWN_BOUNDS, True)
