"""The parameters of all decode kernels, in the order in which ``launch.py`` passes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call import cache_fields
from ....call.decoding import DecodeCall
from ....variant.program import Program
from ..tile.parameters import operand
from .lines.entries import LISTED
from .records import STATE_COLUMNS, WIDTH

SCALARS = (
    "group", "page_size", "rule", "jobs", "most_parts", "most_groups", "workers", "first_record", "batch"
)  # fmt: skip


def declare(builder: Builder, call: DecodeCall, traced: Program) -> SimpleNamespace:
    """``(q, k, v, o, [lse], [page_table], plan, parts, status, [sink], *tensors, scale, *SCALARS, *ints, *floats)``

    ``k`` and ``v`` are the caches. ``plan`` is what plan_kernel.py has written (records.py), and ``first_record`` its
    row of the first sequence record. ``parts`` has the slots. ``page_size`` is 0 for contiguous caches. For packed keys
    ``page_table`` has one column: where each sequence's keys begin.

    Where kernels go by lines (lines/entries.py), LISTED follow the SCALARS.
    """
    dtype = str(call.dtype).removeprefix("torch.")

    def strided(name: str, shape: list[Any]) -> Any:
        strides = [T.dynamic(f"{name}_stride{axis}", "int64") for axis in range(len(shape) - 1)] + [1]
        return builder.prim_func_arg(name, T.StridedTensor(shape, strides, dtype))

    s = SimpleNamespace(**{name: T.dynamic(name) for name in ("q_batch", "total_q", "heads", "kv_heads")})
    cache = [T.dynamic("cache_rows"), T.dynamic("cache_tokens"), s.kv_heads]
    q = strided("q", [s.q_batch, s.total_q, s.heads, call.head_dim])
    k = strided("k", [*cache, call.head_dim])
    v = strided("v", [*cache, call.head_dim_v])
    o = strided("o", [s.q_batch, s.total_q, s.heads, call.head_dim_v])
    lse = table = sink = None
    if call.return_lse:
        lse = builder.prim_func_arg("lse", T.Tensor([s.q_batch, s.heads, s.total_q], "float32"))
    if call.paged or call.packed_keys:
        shape, strides = [T.dynamic("table_rows"), T.dynamic("table_width")], [T.dynamic("table_stride", "int64"), 1]
        table = builder.prim_func_arg("page_table", T.StridedTensor(shape, strides, "int32"))
    plan = builder.prim_func_arg("plan", T.Tensor([T.dynamic("plan_rows"), WIDTH], "int32"))
    slots = [T.dynamic("slots"), T.dynamic("slot_rows"), call.head_dim_v + STATE_COLUMNS]
    parts = builder.prim_func_arg("parts", T.Tensor(slots, "float32"))
    status = builder.prim_func_arg("status", T.Tensor([cache_fields.FIELDS], "int32"))
    if call.sink:
        sink = builder.prim_func_arg("sink", T.Tensor([s.heads], "float32"))
    operands = {symbol.name: builder.prim_func_arg(symbol.name, operand(symbol)) for symbol in traced.tensors}
    scale = builder.prim_func_arg("scale", T.float32())
    scalars = {name: builder.prim_func_arg(name, T.int32()) for name in (*SCALARS, *(LISTED if call.listed else ()))}
    operands |= {f"i{index}": builder.prim_func_arg(f"i{index}", T.int32()) for index in range(traced.ints)}
    operands |= {f"f{index}": builder.prim_func_arg(f"f{index}", T.float32()) for index in range(traced.floats)}
    return SimpleNamespace(
        q=q, k=k, v=v, o=o, lse=lse, page_table=table, plan=plan, parts=parts, status=status, sink=sink,
        operands=operands, scale=scale, **scalars, **vars(s),
    )  # fmt: skip
