"""Tensor maps of packed sequences: a tile that TMA loads or stores ends where its sequence ends.

A tensor map is made by the host, which does not know where the sequences lie, and it checks indices against the whole
tensor: a tile that begins near the end of a sequence would hold rows of the next one, and store O over them. So the map
describes the same memory in another way. Its rows are ROWS, of which a sequence's are the last ones; what is behind
them is beyond the map, where loads give zeros and stores do nothing. Two more dimensions put the sequence there:

    index       size      step
    ROWS        MOST      FAR - row     ROWS * FAR elements are a multiple of 2^64 bytes: nothing
    end         MOST      row           the row behind the sequence's last, in the whole tensor
    index       ROWS      row           ROWS - length + first
    head        heads     head
    column      head_dim  1

Together that is the row ``-ROWS + end + (ROWS - length + first)``, which is ``end - length + first``. Addresses wrap
around at 2^64, as Triton's and flash-attn's maps for ragged tensors have it, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm import tirx

ROWS = 2**30
FAR = 2**34
MOST = 2**31 - 1


def with_ragged_tensors(arg: SimpleNamespace) -> SimpleNamespace:
    """A kernel's parameters, with q, k, v and o as maps of packed sequences see them."""
    return SimpleNamespace(**(vars(arg) | {name: ragged(getattr(arg, name)) for name in ("q", "k", "v", "o")}))


def ragged(tensor: Any) -> Any:
    """A tensor (1, total, heads, head_dim) as maps of it see it; total is at most ROWS."""
    _, total, heads, head_dim = tensor.shape
    strides = list(tensor.strides) or [total * heads * head_dim, heads * head_dim, head_dim, 1]
    row, head = (tirx.Cast("int64", tirx.convert(stride)) for stride in strides[1:3])
    steps = [tirx.IntImm("int64", FAR) - row, row, row, head, 1]
    return tirx.decl_buffer([MOST, MOST, ROWS, heads, head_dim], tensor.dtype, tensor.name, tensor.data, steps)


def tile(tensor: Any, end: Any, length: Any, first: Any, rows: int, head: Any, columns: slice) -> Any:
    """Rows `first : first + rows` of a sequence of `length` rows, whose last is in front of row `end`."""
    begin = ROWS - length + first
    return tensor[ROWS, end, begin : begin + rows, head, columns]
