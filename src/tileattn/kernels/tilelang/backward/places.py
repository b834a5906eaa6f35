"""Where the rows of a block's tile lie: in a batch element, or in one of several packed sequences.

A block asks once (:func:`find`). In a packed call a record of the work list (../records.py) tells its sequence, and the
kernel's parameters are replaced by *views* of the tensors, which begin and end with the sequence: copies find zeros
beyond and store nothing. They look like those of a batch of which every element is this sequence, so that what a kernel
does with its tile is written once, for dense and packed calls; to masks, the sequence's number is the batch element's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder
from tvm import tirx

from ..records import COUNT, FIRST, K_LEN, K_START, PADDED_Q, Q_LEN, Q_START, SEQUENCE
from .operands import BY_KEY, SPREAD

# Parameters, the dimension of their rows, and whose rows they are; and workspaces with whole tiles for each sequence.
_QUERIES, _KEYS = range(2)
_ROWS = (
    *((name, 1, _QUERIES) for name in ("q", "o", "do", "dq")),
    *((name, 1, _KEYS) for name in ("k", "v", "dk", "dv")),
    *((name, 2, _QUERIES) for name in ("lse", "dlse")),
)
_PADDED = ("lse2", "delta", "dq_sum")
ANY_NUMBER = 2**31 - 1  # of batch elements


def blocks(arg: Any, side: str, rows: int, heads: Any) -> Any:
    """How many are launched: one for each tile of each head; of packed sequences, for as many tiles as there may be.

    Args:
        side: the length that is cut into tiles.
        rows: of a tile, where the call is dense.
    """
    if arg.work is None:
        return T.ceildiv(getattr(arg, side), rows) * heads * arg.batch
    return (arg.work.shape[0] - 1) * heads


def find(arg: Any, block: Any, heads: Any) -> BatchElement | Sequence:
    """Where a block is, of those that are launched for `heads` heads of queries, or of keys."""
    return BatchElement(arg, block, heads) if arg.work is None else Sequence(arg, block, heads)


class BatchElement:
    """Of a dense call.

    Attributes:
        exists: whether there is a tile for the block.
        arg: the kernel's parameters, as the tile's work is written for them.
        block: the block's number among those of its sequence, here among all: tiles and heads follow from it.
        least_tiles: of the other side, which a block visits even where nothing is visible: its loads by TMA are waited
            for within the loop over them.
    """

    exists, least_tiles = True, 1

    def __init__(self, arg: Any, block: Any, heads: Any) -> None:
        self.arg, self.block, self.heads = arg, block, heads

    def number(self, pair: Any) -> Any:
        """Of the batch element, given the number of its pair with a head."""
        return T.truncdiv(pair, self.heads)


class Sequence:
    """The same of a packed sequence."""

    least_tiles = 0

    def __init__(self, arg: Any, block: Any, heads: Any) -> None:
        run = T.truncdiv(block, heads)

        def field(name: str, index: int) -> Any:
            return Builder.current().bind(name, arg.work[1 + run, index])

        self.exists = run < arg.work[0, COUNT]
        self.block = block - field("first", FIRST) * heads
        self.sequence, self.padded_q = field("sequence", SEQUENCE), field("padded_q", PADDED_Q)
        self.q_start, self.seqlen_q = field("q_start", Q_START), field("seqlen_q", Q_LEN)
        self.k_start, self.seqlen_k = field("k_start", K_START), field("seqlen_k", K_LEN)
        self.arg = self._own(arg)

    def number(self, pair: Any) -> Any:
        return self.sequence

    def _own(self, arg: Any) -> SimpleNamespace:
        """The parameters with views in the place of tensors."""
        rows = {_QUERIES: (self.q_start, self.seqlen_q), _KEYS: (self.k_start, self.seqlen_k)}
        own = vars(arg) | {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
        for name, axis, side in _ROWS:
            if own.get(name) is not None:
                own[name] = view(own[name], axis, *rows[side])
        for name in _PADDED:
            if own.get(name) is not None:
                # dq's sums are in rows of the head dim, or of other columns.
                rows_each = (arg.sum_columns, own[name].shape[3]) if name == "dq_sum" else (1, 1)
                first = T.truncdiv(self.padded_q * rows_each[0], rows_each[1])
                own[name] = view(own[name], 2, first, own[name].shape[2] - first)
        by_way = {BY_KEY: _KEYS, SPREAD: _QUERIES}
        own["handed_over"] = [
            view(tensor, 2, *rows[by_way[path.way]]) if path.way in by_way else tensor
            for tensor, path in zip(own.get("handed_over", ()), own.get("paths", ()))
        ]
        return SimpleNamespace(**own)


def view(tensor: Any, axis: int, start: Any, length: Any) -> Any:
    """Of the one batch element of a tensor, the rows from `start` on, whose dimension is `axis`: as those of any."""
    shape, strides = [ANY_NUMBER, *tensor.shape[1:]], [0, *tensor.strides[1:]]
    shape[axis] = length
    offset = T.cast(start, "int64") * strides[axis]
    name = f"{tensor.name}_of_sequence"
    return tirx.decl_buffer(shape, tensor.dtype, name, data=tensor.data, strides=strides, elem_offset=offset)
