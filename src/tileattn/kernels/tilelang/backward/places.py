"""The place of a block's tile: its rows in a batch element, or in one of several packed sequences.

A block calls :func:`find` once. In a packed call a record of the work list (packed/work_list.py) names its sequence,
and *views* of the tensors replace the kernel's parameters. A view begins and ends with the sequence: beyond it, loads
give zeros and stores do nothing. The views look like tensors of a batch in which every element is this sequence.
Therefore a kernel's work on a tile is written once, for dense and packed calls. Masks get the sequence's number as the
batch element's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder
from tvm import arith, tirx

from ..packed import ragged
from ..packed.dependent_launch import wait_for_previous
from ..packed.work_list import COUNT, FIRST, K_LEN, K_START, PADDED_Q, Q_LEN, Q_START, SEQUENCE, WIDTH
from .operand_gradients import BY_KEY, SPREAD

# Parameters with rows of queries, and of keys, and which of their dimensions these are.
_OF_QUERIES = {"q": 1, "o": 1, "do": 1, "dq": 1, "lse": 2, "dlse": 2}
_OF_KEYS = {"k": 1, "v": 1, "dk": 1, "dv": 1}
# Workspaces (batch, heads, padded_q, ..), with whole tiles for each sequence.
_PADDED = ("lse2", "delta", "dq_sum")
ROWS_BY_TMA = ("q", "k", "v", "do", "dq", "dk", "dv")
BY_TMA = (*ROWS_BY_TMA, *_PADDED)
BY_TMA_BUT_PARTS = tuple(name for name in BY_TMA if name not in ("dk", "dv"))  # where heads of groups are split
ANY_NUMBER = 2**31 - 1  # of batch elements


def blocks(arg: Any, side: str, rows: int, heads: Any) -> Any:
    """The number of blocks: one for each tile of each head; for packed sequences, for the largest possible number of
    tiles.

    Args:
        side: the length that is cut into tiles.
        rows: of a tile, where the call is dense.
    """
    if arg.work is None:
        return T.ceildiv(getattr(arg, side), rows) * heads * arg.batch
    return (arg.work.shape[0] - 1) * heads


def find(arg: Any, block: Any, heads: Any, by_tma: tuple[str, ...] = ()) -> BatchElement | PackedSequence:
    """The place of a block's tile.

    Args:
        arg: the kernel's parameters.
        block: of those that are launched.
        heads: of queries, or of keys, that the grid has blocks for.
        by_tma: the parameters that are copied by TMA.
    """
    return BatchElement(arg, block, heads) if arg.work is None else PackedSequence(arg, block, heads, by_tma)


class BatchElement:
    """The place of a tile in a dense call.

    Attributes:
        exists: whether there is a tile for the block.
        arg: the kernel's parameters, as the tile's work is written for them.
        block: the block's number among those of its sequence, here among all: tiles and heads follow from it.
        first: the number of the first tile of the sequence among those of all sequences, here 0.
        least_tiles: of the other side, which a block visits even where nothing is visible: its loads by TMA are waited
            for within the loop over them.
    """

    exists, first, least_tiles = True, 0, 1

    def __init__(self, arg: Any, block: Any, heads: Any) -> None:
        self.arg, self.block, self.heads = arg, block, heads

    def number(self, pair: Any) -> Any:
        """The batch element's number, given the number of its pair with a head."""
        return T.truncdiv(pair, self.heads)

    def uniform(self, value: Any) -> Any:
        """The value, marked for ptxas as equal in all threads of a warp."""
        return value


class PackedSequence:
    """The place of a tile in a packed sequence; attributes as of :class:`BatchElement`."""

    least_tiles = 0

    def __init__(self, arg: Any, block: Any, heads: Any, by_tma: tuple[str, ...]) -> None:
        wait_for_previous(arg.arch)
        self._arg, self._by_tma = arg, by_tma
        # In a variable: within an index TileLang would divide in 64 bits, which takes longer than reading the record.
        self._run = T.alloc_var("int32", init=T.truncdiv(block, heads))[0]
        if by_tma:
            # Registers are short here: the record is read from shared memory at each use.
            self._record = T.alloc_shared([WIDTH + 1], "int32", scope="shared")
            _keep(self._record, arg.work, 1 + self._run)
        self.exists = self._run < (self._record[WIDTH] if by_tma else arg.work[0, COUNT])
        self.first = self._field("first", FIRST)
        self.block = block - self.first * heads
        self._sequence, self._padded_q = self._field("sequence", SEQUENCE), self._field("padded_q", PADDED_Q)
        q_start, seqlen_q = self._field("q_start", Q_START), self._field("seqlen_q", Q_LEN)
        k_start, seqlen_k = self._field("k_start", K_START), self._field("seqlen_k", K_LEN)
        self._queries, self._keys, self._read = (q_start, seqlen_q), (k_start, seqlen_k), (q_start, seqlen_q)
        if by_tma and "dq" in vars(arg):
            # Queries without keys, such as unused tail rows, have a fully masked tile; they are not read.
            self._read = (q_start, T.if_then_else(seqlen_k > 0, seqlen_q, 0))
        own = {name: self._rows(name, tensor) for name, tensor in vars(arg).items() if _has_rows(name, tensor)}
        own |= {"written_out": self._written_out(), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        self.arg = SimpleNamespace(**(vars(arg) | own))

    def number(self, pair: Any) -> Any:
        return self._sequence

    def uniform(self, value: Any) -> Any:
        return value if isinstance(value, int) else T.shfl_sync(value, 0)

    def _field(self, name: str, index: int) -> Any:
        if self._by_tma:
            return self._record[index]
        return Builder.current().bind(name, self._arg.work[1 + self._run, index])

    def _rows(self, name: str, tensor: Any) -> Any:
        """The view of a tensor that has the sequence's rows only."""
        if name in _PADDED:
            return self._padded_rows(name, tensor)
        rows = self._keys if name in _OF_KEYS else self._read if name in ("q", "do") else self._queries
        if name in self._by_tma:
            return RaggedRows(tensor, *rows)
        return self._view(tensor, (_OF_KEYS | _OF_QUERIES)[name], rows)

    def _padded_rows(self, name: str, tensor: Any) -> Any:
        first = self._padded_q
        if name == "dq_sum":  # in rows of the head dim, or of other columns
            first = T.truncdiv(first * self._arg.sum_columns, tensor.shape[3])
        if name in self._by_tma:
            return MovedRows(tensor, first)
        # Only prepare.py accesses rows behind the last one: it fills whole tiles.
        ends = name != "dq_sum" and "lse" not in vars(self._arg)
        return self._view(tensor, 2, (first, self._read[1] if ends else tensor.shape[2] - first))

    def _written_out(self) -> list[Any]:
        """The workspaces of gradients of a modification's tensors."""
        rows = {BY_KEY: self._keys, SPREAD: self._queries}
        pairs = zip(getattr(self._arg, "written_out", ()), getattr(self._arg, "paths", ()))
        return [self._view(x, 2, rows[path.way]) if path.way in rows else x for x, path in pairs]

    def _view(self, tensor: Any, axis: int, rows: tuple[Any, Any]) -> Any:
        return LateView(tensor, axis, *rows) if self._by_tma else view(tensor, axis, *rows)


def _has_rows(name: str, tensor: Any) -> bool:
    return tensor is not None and (name in _OF_QUERIES or name in _OF_KEYS or name in _PADDED)


@T.macro
def _keep(record, work, number):
    """Copies a record to shared memory, and behind it the number of records.

    With the fence here, TileLang puts none before every product and copy, which do not read the record.
    """
    thread = T.get_thread_binding()
    if thread < WIDTH:
        record[thread] = work[number, thread]
    if thread == WIDTH:
        record[thread] = work[0, COUNT]
    T.fence_proxy_async()
    T.sync_threads()


def view(tensor: Any, axis: int, start: Any, length: Any) -> Any:
    """A view of a tensor with one batch element: rows from `start` on along `axis`, the same for any batch index."""
    shape, strides = [ANY_NUMBER, *tensor.shape[1:]], [0, *tensor.strides[1:]]
    shape[axis] = length
    offset = T.cast(start, "int64") * strides[axis]
    name = f"{tensor.name}_of_sequence"
    return tirx.decl_buffer(shape, tensor.dtype, name, data=tensor.data, strides=strides, elem_offset=offset)


class LateView:
    """A view whose bounds are read from shared memory at each use."""

    def __init__(self, tensor: Any, axis: int, start: Any, length: Any) -> None:
        self._tensor, self._axis, self._rows = tensor, axis, (start, length)

    def __getitem__(self, indices: tuple[Any, ...]) -> Any:
        return self.bound()[indices]

    def __setitem__(self, indices: tuple[Any, ...], value: Any) -> None:
        T.buffer_store(self.bound(), value, list(indices))

    def bound(self) -> Any:
        """The view, whose bounds are read here."""
        start, length = (Builder.current().bind(name, x) for name, x in zip(("start", "length"), self._rows))
        return view(self._tensor, self._axis, start, length)


def at_once(tensor: Any) -> Any:
    """A tensor, or a view of one whose bounds are read now, and kept."""
    return tensor.bound() if isinstance(tensor, LateView) else tensor


class MovedRows:
    """The rows from `first` on of a workspace (1, heads, rows, ..), for copies of whole tiles by TMA."""

    def __init__(self, tensor: Any, first: Any) -> None:
        self._tensor, self._first = tensor, first

    def __getitem__(self, indices: Any) -> Any:
        _, h, rows, *columns = indices
        moved = slice(self._first + rows.start, self._first + rows.stop)
        return self._tensor[(0, h, moved, *columns)]


class RaggedRows:
    """A sequence's rows of a tensor (1, total, heads, head_dim), for copies of tiles by TMA that end with it."""

    shape = (ANY_NUMBER,)

    def __init__(self, tensor: Any, start: Any, length: Any) -> None:
        self._map, self._end, self._length = ragged.ragged(tensor), start + length, length

    def __getitem__(self, indices: Any) -> Any:
        _, rows, h, columns = indices
        count = int(arith.Analyzer().simplify(rows.stop - rows.start))
        return ragged.tile(self._map, self._end, self._length, rows.start, count, h, columns)


# --- The query heads of a block that owns keys; where groups are split (shares/) they are some of its group's. The grid
# then has blocks for ``shares * kv_heads`` heads: first those of the first share of each group, which has as many heads
# as any other or one more. Each block stores the part of dk and dv that is due to its heads, in float32.


def all_heads(arg: Any, kv_head: Any) -> SimpleNamespace:
    """The heads of a block where groups are not split."""
    heads = arg.heads_per_kv_head
    return SimpleNamespace(kv_head=kv_head, first_head=kv_head * heads, heads=heads)


def heads_of_block(arg: Any, number: Any, held: Callable[[Any], Any] = lambda value: value) -> SimpleNamespace:
    """The kv head of a share, by its number among those of all groups, its first query head, and how many it has.

    held: stores a number in a variable.
    """

    def value(number: Any) -> Any:
        kept = held(number)
        return kept[0] if isinstance(kept, tirx.Buffer) else kept

    shares = T.truncdiv(arg.share_heads, arg.kv_heads)
    share, kv_head = T.truncdiv(number, arg.kv_heads), T.truncmod(number, arg.kv_heads)
    least, larger = T.truncdiv(arg.heads_per_kv_head, shares), T.truncmod(arg.heads_per_kv_head, shares)
    return SimpleNamespace(
        kv_head=value(kv_head),
        first_head=value(kv_head * arg.heads_per_kv_head + share * least + T.min(share, larger)),
        heads=value(least + T.if_then_else(share < larger, 1, 0)),
    )


def store_part(
    part: Any,
    parts: Any,
    head_dim: int,
    b: Any,
    key: Any,
    number: Any,
    seqlen_k: Any,
    first: int = 0,
    keeps_columns: bool = False,
) -> None:
    """Stores a block's part of dk or dv, straight from registers: four threads write 32 bytes side by side.

    Args:
        part: [block_N, head_dim with padding], or several of these one below the other.
        parts: of all shares, (batch, seqlen_k, shares * kv_heads, head_dim).
        number: of the share's part among those of `parts`.
        first: the first row of this part. The threads that get here have no rows of other parts.
        keeps_columns: whether the columns of padding seem to be read. Where registers are full, ptxas serialises
            products some of whose results nothing reads (C7511).
    """
    parts, width = at_once(parts), part.shape[1]
    if keeps_columns and head_dim < width:
        _store(part, _with_columns(parts, width), _unknown(head_dim), b, key, number, seqlen_k, first, 8)
    else:
        _store(part, parts, head_dim, b, key, number, seqlen_k, first, 1)


def _unknown(number: int) -> Any:
    """A number that no compiler knows."""
    return T.alloc_var("int32", init=T.shfl_sync(T.int32(number), 0))


def _with_columns(parts: Any, columns: Any) -> Any:
    """The same tensor for the compiler, with more columns than it has, which must not be accessed."""
    strides = list(parts.strides)
    if not strides:
        strides = [1]
        for size in reversed(parts.shape[1:]):
            strides.insert(0, strides[0] * T.cast(size, "int64"))
    name, shape = f"{parts.name}_widened", [*parts.shape[:-1], columns]
    return tirx.decl_buffer(shape, parts.dtype, name, data=parts.data, strides=strides, elem_offset=parts.elem_offset)


@T.macro
def _store(part, parts, head_dim, b, key, number, seqlen_k, first, together):
    for i, d in T.Parallel(*part.shape):
        # Of so many columns together all or none are stored: head dims are multiples of 8.
        if key + (i - first) < seqlen_k and d // together * together < head_dim:
            parts[b, key + (i - first), number, d] = part[i, d]
