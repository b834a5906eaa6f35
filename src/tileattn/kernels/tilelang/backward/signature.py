"""The parameters of the backward kernels, in the order in which ``launch.py`` passes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call.facts import AttentionCall
from ....variant.program import Program
from ..architecture import padded_finely
from ..packed.work_list import WIDTH
from ..tile.lists import declare_lists, declare_steps
from ..tile.mixed_bits import declare_bits
from ..tile.parameters import SIZES, declare_pattern, operand
from .hopper.dq_order import COLUMNS
from .operand_gradients import BY_KEY, SPREAD, STORED, Path


class Parameters:
    """Declares the parameters of one kernel; sizes and strides are run-time values, as in the forward pass.

    Of packed sequences the tensors are one batch element, and what follows their rows has the total number of them.
    """

    def __init__(self, builder: Builder, call: AttentionCall) -> None:
        self.builder, self.call = builder, call
        self.dtype = str(call.dtype).removeprefix("torch.")
        names = {name: name for name in (*SIZES, "padded_q", "padded_k")}
        if call.packed:
            names |= {"seqlen_q": "total_q", "seqlen_k": "total_k"}
        self.sizes = SimpleNamespace(**{name: T.dynamic(text) for name, text in names.items()})
        if call.packed:
            self.sizes.batch, self.sizes.padded_k = 1, self.sizes.seqlen_k

    def strided(self, name: str) -> Any:
        """A tensor of the caller's: q, k, v, o or do (bshd). It may have one batch for all."""
        sizes, of_keys, of_values = self.sizes, name in "kv", name in ("v", "o", "do")
        shape = [
            1 if self.call.packed else T.dynamic(f"{name}_batch"),
            sizes.seqlen_k if of_keys else sizes.seqlen_q,
            sizes.kv_heads if of_keys else sizes.heads,
            self.call.head_dim_v if of_values else self.call.head_dim,
        ]
        return self.with_strides(name, shape, self.dtype)

    def gradient(self, name: str, some_keys: bool = False) -> Any:
        """dq, dk or dv, in the inputs' dtype: contiguous, or with `some_keys` a slice of some keys."""
        sizes, of_keys = self.sizes, name != "dq"
        shape = [
            sizes.batch,
            sizes.seqlen_k if of_keys else sizes.seqlen_q,
            sizes.kv_heads if of_keys else sizes.heads,
            self.call.head_dim_v if name == "dv" else self.call.head_dim,
        ]
        if not some_keys:
            return self.tensor(name, shape, self.dtype)
        return self.with_strides(name, shape, self.dtype)

    def parts(self, name: str) -> Any:
        """The float32 parts of dk or dv, side by side, of all shares of the heads (shares/)."""
        columns = self.call.head_dim_v if name == "dv" else self.call.head_dim
        return self.tensor(name, [self.sizes.batch, self.sizes.seqlen_k, self.sizes.share_heads, columns])

    def rows(self, name: str) -> Any:
        """lse2 or delta: a number for each row of queries, with padding."""
        return self.tensor(name, [self.sizes.batch, self.sizes.heads, self.sizes.padded_q])

    def lse(self, name: str) -> Any:
        """lse or its gradient, as the caller has it."""
        return self.tensor(name, [self.sizes.batch, self.sizes.heads, self.sizes.seqlen_q])

    def accumulator(self) -> Any:
        """dq in float32 while tiles of keys add to it, with padding."""
        shape = [self.sizes.batch, self.sizes.heads, self.sizes.padded_q, padded_finely(self.call.head_dim)]
        return self.tensor("dq_sum", shape)

    def accumulator_rows(self) -> Any:
        """The same memory in rows of ``COLUMNS``, for a schedule that has an order of its own (hopper/dq_order.py)."""
        return self.tensor("dq_sum", [self.sizes.batch, self.sizes.heads, T.dynamic("sum_rows"), COLUMNS])

    def work(self) -> Any:
        """The work list of a packed call (packed/work_list.py), None of others."""
        return self.tensor("work", [T.dynamic("records"), WIDTH], "int32") if self.call.packed else None

    def tensor(self, name: str, shape: list[Any], dtype: str = "float32") -> Any:
        return self.builder.prim_func_arg(name, T.Tensor(shape, dtype))

    def with_strides(self, name: str, shape: list[Any], dtype: str) -> Any:
        """A tensor with any strides but the last one, which is 1."""
        strides = [T.dynamic(f"{name}_stride{axis}", "int64") for axis in range(len(shape) - 1)] + [1]
        return self.builder.prim_func_arg(name, T.StridedTensor(shape, strides, dtype))

    def scalar(self, name: str, kind: str) -> Any:
        return self.builder.prim_func_arg(name, T.int32() if kind == "int" else T.float32())


def declare_prepare(builder: Builder, call: AttentionCall, has_dlse: bool, clears: bool) -> Any:
    """``([work], o, do, lse, [dlse], lse2, delta, [dq_sum])``"""
    p = Parameters(builder, call)
    arg = SimpleNamespace(work=p.work(), o=p.strided("o"), do=p.strided("do"), lse=p.lse("lse"))
    arg.dlse = p.lse("dlse") if has_dlse else None
    arg.lse2, arg.delta = p.rows("lse2"), p.rows("delta")
    arg.dq_sum = p.accumulator() if clears else None
    return _with_sizes(p, arg)


def declare_finish(builder: Builder, call: AttentionCall, own_order: bool) -> Any:
    """``([work], dq, dq_sum, scale)``"""
    p = Parameters(builder, call)
    arg = SimpleNamespace(work=p.work(), dq=p.gradient("dq"))
    arg.dq_sum = p.accumulator_rows() if own_order else p.accumulator()
    arg.scale = p.scalar("scale", "float")
    return _with_sizes(p, arg)


def declare_main(
    builder: Builder,
    call: AttentionCall,
    traced: Program,
    paths: tuple[Path, ...],
    dq: bool,
    hopper: bool = False,
    leaving: int | None = None,
    split: bool = False,
    listed: bool = False,
    some_keys: bool = False,
    *,
    bits: tuple[int, int] | None = None,
) -> Any:
    """``([work], q, k, v, do, lse2, delta, dk, dv, [dq_sum], *written_out, [*lists], [*bits], [seed], *tensors, scale,
    heads_per_kv_head, [side_by_side], [*list_steps], [*pattern], *ints, *floats)``

    ``written_out`` has one tensor for each path, as operand_gradients.py describes; that of the path ``leaving``, whose
    gradient leaves by TMA, has strides. ``dq`` says whether dq is added up. With `split`, dk and dv are float32 parts:
    heads of the number (share * kv_heads + kv head). With `some_keys` dk and dv may be slices of some keys. ``bits``
    are of tiles of the sizes `bits` (tile/mixed_bits.py).
    """
    p = Parameters(builder, call)
    arg = SimpleNamespace(work=p.work(), **{name: p.strided(name) for name in ("q", "k", "v", "do")})
    arg.lse2, arg.delta = p.rows("lse2"), p.rows("delta")
    p.sizes.share_heads = T.dynamic("share_heads") if split else p.sizes.kv_heads
    arg.dk, arg.dv = (p.parts(name) if split else p.gradient(name, some_keys) for name in ("dk", "dv"))
    arg.dq_sum = (p.accumulator_rows() if hopper else p.accumulator()) if dq else None
    arg.written_out = [_written_out(p, index, path, traced, index == leaving) for index, path in enumerate(paths)]
    arg.paths = paths
    _declare_variant(p, arg, traced, hopper, listed, bits)
    return _with_sizes(p, arg)


def declare_queries(
    builder: Builder, call: AttentionCall, traced: Program, hopper: bool = False, listed: bool = False
) -> Any:
    """``([work], q, k, v, do, lse2, delta, dq, [*lists], [seed], *tensors, scale, heads_per_kv_head, [side_by_side],
    [*list_steps], [*pattern], *ints, *floats)``"""
    p = Parameters(builder, call)
    arg = SimpleNamespace(work=p.work(), **{name: p.strided(name) for name in ("q", "k", "v", "do")})
    arg.lse2, arg.delta = p.rows("lse2"), p.rows("delta")
    arg.dq = p.gradient("dq")
    _declare_variant(p, arg, traced, hopper, listed)
    return _with_sizes(p, arg)


def _written_out(p: Parameters, index: int, path: Path, traced: Program, leaving: bool) -> Any:
    sizes, name = p.sizes, f"path{index}"
    if path.way == BY_KEY:
        return p.tensor(name, [sizes.batch, sizes.heads, sizes.padded_k])
    if path.way == SPREAD:
        keys = T.dynamic("max_seqlen_k") if p.call.packed else sizes.seqlen_k
        return p.tensor(name, [sizes.batch, sizes.heads, sizes.seqlen_q, keys])
    symbol = traced.tensors[path.tensor]
    shape = [1 if one else T.dynamic(f"{name}_size{axis}") for axis, one in enumerate(symbol.ones)]
    dtype = str(symbol.dtype).removeprefix("torch.") if path.way == STORED else "float32"
    return p.with_strides(name, shape, dtype) if leaving else p.tensor(name, shape, dtype)


def _declare_variant(
    p: Parameters,
    arg: Any,
    traced: Program,
    side_by_side: bool = False,
    listed: bool = False,
    bits: tuple[int, int] | None = None,
) -> None:
    if listed:
        vars(arg).update(declare_lists(p.builder.prim_func_arg))
    if bits is not None:
        vars(arg).update(declare_bits(p.builder.prim_func_arg, *bits))
    arg.seed = p.tensor("seed", [1], "int64") if p.call.dropout else None
    arg.operands = {symbol.name: p.builder.prim_func_arg(symbol.name, operand(symbol)) for symbol in traced.tensors}
    arg.scale, arg.heads_per_kv_head = p.scalar("scale", "float"), p.scalar("heads_per_kv_head", "int")
    if side_by_side:
        arg.side_by_side = p.scalar("side_by_side", "int")
    if listed:
        vars(arg).update(declare_steps(p.scalar))
    if p.call.dropout:
        vars(arg).update(declare_pattern(p.scalar))
    arg.operands |= {f"i{index}": p.scalar(f"i{index}", "int") for index in range(traced.ints)}
    arg.operands |= {f"f{index}": p.scalar(f"f{index}", "float") for index in range(traced.floats)}


def _with_sizes(p: Parameters, arg: SimpleNamespace) -> SimpleNamespace:
    sizes = vars(p.sizes)
    if p.call.packed:  # a sequence's lengths are in its record
        sizes = {name: size for name, size in sizes.items() if not name.startswith("seqlen")}
    return SimpleNamespace(**vars(arg), **sizes, sum_columns=padded_finely(p.call.head_dim), arch=p.call.arch)
