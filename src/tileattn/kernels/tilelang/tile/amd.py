"""AMD's kernels: strides of the caller's tensors, and options of products and copies that TileLang does not offer.

TileLang 0.1.15 copies several elements at once only where it can prove that the address is a multiple of their size. It
cannot prove that for run-time strides, and then loads element by element. Here strides are written as multiples of
eight, which those of aligned tensors are.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import stmt_functor

ELEMENTS = 8  # of 16 bits in 16 bytes


def aligned_rows(tensor: Any) -> Any:
    """The same tensor, with strides whose divisibility by eight can be seen."""
    strides = [tirx.floordiv(stride, ELEMENTS) * ELEMENTS for stride in tensor.strides[:-1]]
    return tirx.decl_buffer(tensor.shape, tensor.dtype, f"{tensor.name}_rows", data=tensor.data, strides=[*strides, 1])


def copied_by(function: Any, width: int) -> Any:
    """The function with copies of ``width`` elements of 16 bits at a time, where the generic schedule asks for four."""

    def rewrite(call: Any) -> Any:
        asked = "coalesced_width" in (call.annotations or {})
        if not _is(call, "copy") or not asked or _buffer(call, 0).dtype not in ("float16", "bfloat16"):
            return None
        return _with(call, coalesced_width=width)

    return function.with_body(stmt_functor.ir_transform(function.body, None, rewrite, ["tirx.Call"]))


def packed(function: Any, k_pack: int) -> Any:
    """The function with products of two operands in shared memory, neither transposed along the sum, packed."""

    def rewrite(call: Any) -> Any:
        if not _is(call, "gemm") or bool(call.args[3]) or not bool(call.args[4]):
            return None
        if not all(_buffer(call, operand).scope().startswith("shared") for operand in (0, 1)):
            return None
        return _with(call, k_pack=k_pack)

    if k_pack == 1:
        return function
    return function.with_body(stmt_functor.ir_transform(function.body, None, rewrite, ["tirx.Call"]))


def _is(call: Any, name: str) -> bool:
    return getattr(call.op, "name", "") == f"tl.tileop.{name}"


def _buffer(call: Any, argument: int) -> Any:
    """Of a region that a tile operation is given."""
    return call.args[argument].args[0].buffer


def _with(call: Any, **annotations: int) -> Any:
    numbers = {name: tirx.IntImm("int32", number) for name, number in annotations.items()}
    return tirx.Call(call.dtype, call.op, call.args, {**(call.annotations or {}), **numbers})
