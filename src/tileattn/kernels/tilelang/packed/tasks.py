"""A block's task in a kernel for packed sequences, and the rows of its sequence.

A task is a tile of queries of one sequence and head. Tasks' numbers count through the work list (work_list.py): the
tiles of a sequence, of all heads, then those of the next sequence.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tvm import tirx

from .work_list import COUNT, FIRST, K_LEN, K_START, Q_LEN, Q_START, SEQUENCE


def task_count(arg: Any) -> Any:
    """The number of tasks."""
    return arg.work[0, COUNT] * arg.heads


@T.macro
def find_task(arg, number, rows, is_one):
    """The sequence, head and first row (counted in the sequence) of a task, then q_start, q_len, k_start, k_len, and
    where its sequence's run begins in the work list.

    Within a sequence tasks are in the order of the dense kernels: `side_by_side` heads, which divide all heads, begin
    with their last tiles of `rows` queries. `is_one` is True, or says whether the number is that of a task. A number
    that is none gets a sequence without rows or keys.
    """
    side = arg.side_by_side
    record = T.alloc_var("int32", init=1 + T.truncdiv(number, arg.heads))
    b, first, q_start, q_len, k_start, k_len = (
        T.alloc_var("int32", init=_if(is_one, arg.work[record, field]))
        for field in (SEQUENCE, FIRST, Q_START, Q_LEN, K_START, K_LEN)
    )
    tiles = T.alloc_var("int32", init=T.max(T.truncdiv(q_len + (rows - 1), rows), 1))
    within = T.alloc_var("int32", init=_if(is_one, number - first * arg.heads))
    group = T.alloc_var("int32", init=T.truncdiv(within, side * tiles))
    rest = T.alloc_var("int32", init=within - group * (side * tiles))
    h = T.alloc_var("int32", init=group * side + T.truncmod(rest, side))
    row = T.alloc_var("int32", init=(tiles - 1 - T.truncdiv(rest, side)) * rows)
    return b, h, row, q_start, q_len, k_start, k_len, first


def _if(condition: Any, value: Any) -> Any:
    return value if condition is True else T.if_then_else(condition, value, 0)


def of_sequence(arg: Any, q_start: Any, q_len: Any, k_start: Any, k_len: Any) -> SimpleNamespace:
    """The kernel's parameters with the rows of one sequence instead of all, as a batch of one element.

    Copies that are guarded by a tensor's shape then end with the sequence.
    """
    q, o = (_rows(tensor, q_start, q_len) for tensor in (arg.q, arg.o))
    k, v = (_rows(tensor, k_start, k_len) for tensor in (arg.k, arg.v))
    lse = None if arg.lse is None else lse_of(arg.lse, q_start, q_len)
    own = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "seqlen_q": q_len, "seqlen_k": k_len}
    return SimpleNamespace(**(vars(arg) | own))


def lse_of(lse: Any, start: Any, length: Any) -> Any:
    """A sequence's part of lse (1, heads, total), as that of a batch of one."""
    _, heads, total = lse.shape
    return _view(lse, [1, heads, length], [heads * total, total, 1], start)


def _rows(tensor: Any, start: Any, length: Any) -> Any:
    _, total, heads, head_dim = tensor.shape
    strides = list(tensor.strides) or [total * heads * head_dim, heads * head_dim, head_dim, 1]
    return _view(tensor, [1, length, heads, head_dim], strides, T.cast(start, "int64") * strides[1])


def _view(tensor: Any, shape: list[Any], strides: list[Any], offset: Any) -> Any:
    return tirx.decl_buffer(shape, tensor.dtype, tensor.name, tensor.data, strides, offset)


def sink_of(arg: Any, h: Any, k_end: Any) -> Any:
    """A head's sink; -inf for rows that belong to no sequence, whose keys are NOWHERE."""
    return T.if_then_else(k_end < 0, -T.infinity("float32"), arg.sink[h])
