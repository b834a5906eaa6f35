"""The parameters of all forward kernels, in the order in which ``launch.py`` passes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call.facts import AttentionCall
from ....call.fp8 import FP8
from ....variant.program import Program
from ..packed.work_list import WIDTH
from ..tile.lists import declare_steps
from ..tile.mixed_bits import NO_BITS, declare_bits
from ..tile.parameters import NO_PATTERN, SIZES, declare_pattern, operand
from .hopper.sorted_lists import NO_SORTED_LISTS, declare_sorted_lists, declare_sorted_steps


def declare(
    builder: Builder,
    call: AttentionCall,
    traced: Program,
    persistent: bool,
    listed: bool = False,
    bits: tuple[int, int] | None = None,
) -> SimpleNamespace:
    """``(q, k, v, o, [lse], [q_descale, k_descale, v_descale], [sink], [seed], [work], [*lists], [*bits], *tensors,
    scale, heads_per_kv_head, side_by_side, [*list_steps], [*pattern], [tickets, blocks], *ints, *floats)``

    ``tensors``, ``ints`` and ``floats`` are the variant's operands; ``tickets`` and ``blocks`` are a persistent
    kernel's; the descales are fp8's, which also takes v as ``transpose_fp8.py`` writes it; ``seed`` and
    ``pattern`` are dropout's; ``work`` is the work list of packed sequences (packed/work_list.py), whose tensors have
    one batch element; ``lists`` and ``list_steps`` are those of :class:`TileLists` (hopper/sorted_lists.py), and so are
    ``bits`` (tile/mixed_bits.py), of tiles of the sizes `bits`. The sizes, read from the tensors' shapes, come beside
    them.
    """
    dtype = str(call.dtype).removeprefix("torch.")

    def strided(name: str, shape: list[Any]) -> Any:
        strides = [T.dynamic(f"{name}_stride{axis}", "int64") for axis in range(len(shape) - 1)] + [1]
        return builder.prim_func_arg(name, T.StridedTensor(shape, strides, dtype))

    def scalar(name: str, kind: str) -> Any:
        return builder.prim_func_arg(name, T.int32() if kind == "int" else T.float32())

    s = SimpleNamespace(**{name: T.dynamic(name) for name in SIZES})
    # q, k and v may each have one batch for all (an expanded tensor: tensor maps cannot step by 0).
    q = strided("q", [T.dynamic("q_batch"), s.seqlen_q, s.heads, call.head_dim])
    k = strided("k", [T.dynamic("k_batch"), s.seqlen_k, s.kv_heads, call.head_dim])
    if call.dtype == FP8:
        v = builder.prim_func_arg("v", transposed_values(call, s.kv_heads))
    else:
        v = strided("v", [T.dynamic("v_batch"), s.seqlen_k, s.kv_heads, call.head_dim_v])
    out_dtype = str(call.out_dtype).removeprefix("torch.")
    o = builder.prim_func_arg("o", T.Tensor([s.batch, s.seqlen_q, s.heads, call.head_dim_v], out_dtype))
    lse = None
    if call.return_lse:
        lse = builder.prim_func_arg("lse", T.Tensor([s.batch, s.heads, s.seqlen_q], "float32"))
    descales = {}
    if call.dtype == FP8:
        for name in ("q_descale", "k_descale", "v_descale"):
            descales[name] = builder.prim_func_arg(name, T.Tensor([s.batch, s.kv_heads], "float32"))
    sink = builder.prim_func_arg("sink", T.Tensor([s.heads], "float32")) if call.sink else None
    seed = builder.prim_func_arg("seed", T.Tensor([1], "int64")) if call.dropout else None
    work = builder.prim_func_arg("work", T.Tensor([T.dynamic("rows"), WIDTH], "int32")) if call.packed else None
    lists = declare_sorted_lists(builder.prim_func_arg) if listed else NO_SORTED_LISTS
    lists = lists | (NO_BITS if bits is None else declare_bits(builder.prim_func_arg, *bits))
    operands = {symbol.name: builder.prim_func_arg(symbol.name, operand(symbol)) for symbol in traced.tensors}
    scale = scalar("scale", "float")
    heads_per_kv_head, side_by_side = scalar("heads_per_kv_head", "int"), scalar("side_by_side", "int")
    if listed:
        # The tasks of a packed call are in the order of its work list, whatever their lengths.
        lists = lists | (declare_steps(scalar) if call.packed else declare_sorted_steps(scalar))
    pattern = declare_pattern(scalar) if call.dropout else NO_PATTERN
    tickets, blocks = None, None
    if persistent:
        tickets, blocks = builder.prim_func_arg("tickets", T.Tensor([1], "int32")), scalar("blocks", "int")
    operands |= {f"i{index}": scalar(f"i{index}", "int") for index in range(traced.ints)}
    operands |= {f"f{index}": scalar(f"f{index}", "float") for index in range(traced.floats)}
    return SimpleNamespace(
        q=q, k=k, v=v, o=o, lse=lse, sink=sink, seed=seed, work=work, operands=operands, scale=scale,
        heads_per_kv_head=heads_per_kv_head, side_by_side=side_by_side, tickets=tickets, blocks=blocks,
        **lists, **pattern, **descales, **vars(s),
    )  # fmt: skip


def transposed_values(call: AttentionCall, kv_heads: Any) -> Any:
    """The scratch tensor that holds fp8 values for the matrix units: contiguous, keys innermost (transpose_fp8.py)."""
    return T.Tensor([T.dynamic("v_batch"), kv_heads, call.head_dim_v, T.dynamic("padded_k")], "float8_e4m3fn")
