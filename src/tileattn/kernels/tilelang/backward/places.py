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

from ..records import COUNT, FIRST, K_LEN, K_START, PADDED_Q, Q_LEN, Q_START, SEQUENCE, WIDTH
from .operands import BY_KEY, SPREAD

# Parameters, the dimension of their rows, and whose rows they are; and workspaces with whole tiles for each sequence.
_QUERIES, _KEYS = range(2)
_ROWS = (
    *((name, 1, _QUERIES) for name in ("q", "o", "do", "dq")),
    *((name, 1, _KEYS) for name in ("k", "v", "dk", "dv")),
    *((name, 2, _QUERIES) for name in ("lse", "dlse")),
)
_READ = ("q", "do", "lse2", "delta")  # where a sequence has no keys, nothing is read of its queries
_PADDED = ("lse2", "delta", "dq_sum")
ROWS_BY_TMA = ("q", "k", "v", "do", "dq", "dk", "dv")
BY_TMA = (*ROWS_BY_TMA, *_PADDED)
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


def find(arg: Any, block: Any, heads: Any, by_tma: tuple[str, ...] = ()) -> BatchElement | Sequence:
    """Where a block is.

    Args:
        arg: the kernel's parameters.
        block: of those that are launched.
        heads: of queries, or of keys, that the grid has blocks for.
        by_tma: the parameters that are copied by TMA.
    """
    return BatchElement(arg, block, heads) if arg.work is None else Sequence(arg, block, heads, by_tma)


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

    def uniform(self, value: Any) -> Any:
        """The same value, which ptxas is to know to be the same in all threads of a warp."""
        return value


@T.macro
def _keep(record, work, number):
    """A record in shared memory."""
    thread = T.get_thread_binding()
    if thread < WIDTH:
        record[thread] = work[number, thread]
    T.sync_threads()


class Sequence:
    """The same of a packed sequence."""

    least_tiles = 0

    def __init__(self, arg: Any, block: Any, heads: Any, by_tma: tuple[str, ...]) -> None:
        run = T.truncdiv(block, heads)
        if by_tma:
            # Where every register counts: read from there wherever it is needed.
            record = T.alloc_shared([WIDTH], "int32", scope="shared")
            _keep(record, arg.work, 1 + run)
        self._record = record if by_tma else None

        def field(name: str, index: int) -> Any:
            return record[index] if by_tma else Builder.current().bind(name, arg.work[1 + run, index])

        self.exists = run < arg.work[0, COUNT]
        self.block = block - field("first", FIRST) * heads
        self.sequence, self.padded_q = field("sequence", SEQUENCE), field("padded_q", PADDED_Q)
        self.q_start, self.seqlen_q = field("q_start", Q_START), field("seqlen_q", Q_LEN)
        self.k_start, self.seqlen_k = field("k_start", K_START), field("seqlen_k", K_LEN)
        self.arg = self._own(arg, by_tma)

    def number(self, pair: Any) -> Any:
        return self.sequence

    def uniform(self, value: Any) -> Any:
        return value if isinstance(value, int) else T.shfl_sync(value, 0)

    def _own(self, arg: Any, by_tma: tuple[str, ...]) -> SimpleNamespace:
        """The parameters with what stands for the sequence's rows in the place of tensors."""
        read_q = T.if_then_else(self.seqlen_k > 0, self.seqlen_q, 0)
        if not by_tma:
            read_q = Builder.current().bind("read_q", read_q)
        own = vars(arg) | {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
        for name, axis, side in _ROWS:
            if own.get(name) is not None:
                start = (self.q_start, self.k_start)[side]
                length = read_q if name in _READ else (self.seqlen_q, self.seqlen_k)[side]
                own[name] = (
                    RaggedRows(own[name], start, length) if name in by_tma else view(own[name], axis, start, length)
                )
        for name in _PADDED:
            if own.get(name) is not None:
                own[name] = self._padded(name, own[name], arg, read_q, by_tma)
        by_way = {BY_KEY: (self.k_start, self.seqlen_k), SPREAD: (self.q_start, self.seqlen_q)}
        own["handed_over"] = [
            view(tensor, 2, *by_way[path.way]) if path.way in by_way else tensor
            for tensor, path in zip(own.get("handed_over", ()), own.get("paths", ()))
        ]
        return SimpleNamespace(**own)

    def _padded(self, name: str, tensor: Any, arg: Any, read_q: Any, by_tma: tuple[str, ...]) -> Any:
        first, length = self.padded_q, tensor.shape[2] - self.padded_q
        if name == "dq_sum":  # in rows of the head dim, or of other columns
            first = T.truncdiv(self.padded_q * arg.sum_columns, tensor.shape[3])
            length = tensor.shape[2] - first
        elif "lse" not in vars(arg):  # only prepare.py, which fills them, has business behind the last row
            length = read_q
        return MovedRows(tensor, first) if name in by_tma else view(tensor, 2, first, length)


def view(tensor: Any, axis: int, start: Any, length: Any) -> Any:
    """Of the one batch element of a tensor, the rows from `start` on, whose dimension is `axis`: as those of any."""
    shape, strides = [ANY_NUMBER, *tensor.shape[1:]], [0, *tensor.strides[1:]]
    shape[axis] = length
    offset = T.cast(start, "int64") * strides[axis]
    name = f"{tensor.name}_of_sequence"
    return tirx.decl_buffer(shape, tensor.dtype, name, data=tensor.data, strides=strides, elem_offset=offset)


class MovedRows:
    """Of a workspace (1, heads, rows, ..), the rows from `first` on, for copies of whole tiles by TMA."""

    def __init__(self, tensor: Any, first: Any) -> None:
        self._tensor, self._first = tensor, first

    def __getitem__(self, indices: Any) -> Any:
        _, h, rows, *columns = indices
        moved = slice(self._first + rows.start, self._first + rows.stop)
        return self._tensor[(0, h, moved, *columns)]


class RaggedRows:
    """Of a tensor (1, rows, heads, dim), the `length` rows from `start` on, for copies of tiles by TMA that end there.

    A tensor map is made by the host, which does not know where sequences end. But one row may be reached by several
    coordinates, and addresses count modulo 2^64. So a tensor (y, z, x, heads, dim) is declared over the same memory.
    Its first dimensions have N = 2^30 elements, and steps of Z - S, Z and S bytes, S being a row's and Z = 2^34. At
    y = N - end, z = end and x = N - length + r, where end = start + length, lies the byte

        (N - end) (Z - S) + end Z + (N - length + r) S  =  N Z + (end - length + r) S  =  (start + r) S

    and row r = length is beyond the end of x. (Triton's ragged TMA, and flash-attn 4, do the same.)
    """

    shape = (ANY_NUMBER,)
    _N, _Z = 2**30, 2**34

    def __init__(self, tensor: Any, start: Any, length: Any) -> None:
        # All tensors are of 16 bits.
        z, row = tirx.const(self._Z // 2, "int64"), T.cast(tensor.strides[1], "int64")
        strides = [z - row, z, row, tensor.strides[2], 1]
        shape = [self._N, self._N, self._N, *tensor.shape[2:]]
        name = f"{tensor.name}_ragged"
        self._map = tirx.decl_buffer(shape, tensor.dtype, name, data=tensor.data, strides=strides)
        self._end, self._length = start + length, length

    def __getitem__(self, indices: Any) -> Any:
        _, rows, h, columns = indices
        first = self._N - self._length
        return self._map[
            self._N - self._end, self._end, first + rows.start : first + rows.stop, h, columns.start : columns.stop
        ]
