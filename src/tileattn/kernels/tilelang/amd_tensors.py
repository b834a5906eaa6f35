"""How AMD's kernels read the caller's tensors, and how their products and copies are told what TileLang's do not ask.

TileLang 0.1.15 writes a copy of several elements as one only where it can see that its address is a multiple of them.
It cannot of strides that are numbers at run time: it then loads element by element, and eight at a time not at all.
Here strides are written as multiples of eight, which those of aligned tensors are.
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
    """The function with copies of ``width`` elements at a time, where the generic schedule asks for four."""

    def rewrite(call: Any) -> Any:
        if getattr(call.op, "name", "") != "tl.tileop.copy" or "coalesced_width" not in (call.annotations or {}):
            return None
        annotations = {**call.annotations, "coalesced_width": tirx.IntImm("int32", width)}
        return tirx.Call(call.dtype, call.op, call.args, annotations)

    return function.with_body(stmt_functor.ir_transform(function.body, None, rewrite, ["tirx.Call"]))
