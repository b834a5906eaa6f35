"""Tensor maps of packed sequences: tiles that TMA loads or stores end where their sequence ends.

The host makes a tensor map without knowing where the sequences lie, and the map checks indices against the whole tensor
only. A tile near the end of a sequence would contain rows of the next one, and O would be stored over them. The map
therefore describes the same memory in another way. It has ROWS rows, of which the last ones are the sequence's. Rows
behind them are outside the map, where loads give zeros and stores do nothing. Two more dimensions place the sequence:

    index       size      step
    ROWS        MOST      FAR - row     ROWS * FAR elements are a multiple of 2^64 bytes: nothing
    end         MOST      row           the row behind the sequence's last, in the whole tensor
    index       ROWS      row           ROWS - length + first
    head        heads     head
    column      head_dim  1

The sum is the row ``-ROWS + end + (ROWS - length + first)``, which is ``end - length + first``. Addresses wrap around
at 2^64. Triton's and flash-attn's maps for ragged tensors use this as well.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm import tirx

ROWS = 2**30
FAR = 2**34
MOST = 2**31 - 1


def with_ragged_tensors(arg: SimpleNamespace) -> SimpleNamespace:
    """A kernel's parameters, with q, k, v and o in the dimensions of these maps."""
    return SimpleNamespace(**(vars(arg) | {name: ragged(getattr(arg, name)) for name in ("q", "k", "v", "o")}))


def ragged(tensor: Any) -> Any:
    """A tensor (1, total, heads, head_dim) in the dimensions of its map; total is at most ROWS."""
    _, total, heads, head_dim = tensor.shape
    strides = list(tensor.strides) or [total * heads * head_dim, heads * head_dim, head_dim, 1]
    row, head = (tirx.Cast("int64", tirx.convert(stride)) for stride in strides[1:3])
    steps = [tirx.IntImm("int64", FAR) - row, row, row, head, 1]
    return tirx.decl_buffer([MOST, MOST, ROWS, heads, head_dim], tensor.dtype, tensor.name, tensor.data, steps)


def tile(tensor: Any, end: Any, length: Any, first: Any, rows: int, head: Any, columns: slice) -> Any:
    """Rows `first : first + rows` of a sequence of `length` rows, whose last is in front of row `end`."""
    begin = ROWS - length + first
    return tensor[ROWS, end, begin : begin + rows, head, columns]
